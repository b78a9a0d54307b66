"""Every style of the vocabulary: what it asks for, or the exact words with which it is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tpcompiler.errors import PlanError, TpCompilerError, UnsupportedError
from tpcompiler.ir.placements import Cut, Piece
from tpcompiler.plan.styles import ALIASES, REFUSED, STYLES, Style, read_style

R, S0 = Replicate(), Shard(0)
KNOWN = (
    "use one of colwise, colwise_gather_output, rowwise, rowwise_split_input, embedding_rowwise, packed_colwise, "
    "packed_rowwise, replicate, sequence_parallel, gather, moe_tp_experts, grouped_gemm, dispatch_experts, attend_in_turns, shard_at_rest, or a placement such as S(0) or R"
)
PLACEMENT = "write R, S(dim) such as S(0) or S(-1), or P(op) with op one of sum, avg, product, max, min"
PIECES = "write the sizes of parts, such as S(0, parts 16 8 8r), or a unit or a block, such as S(0, unit 4)"
MISSAID = (
    "part 8 8",
    "parts",
    "parts 0 8",
    "parts 8 x",
    "parts 8 8rr",
    "parts 8b4u2",
    "parts 8 8, unit 2",
    "unit",
    "unit 0",
    "unit 1",
    "unit 04",
    "unit -4",
    "unit 4, unit 4",
    "unit 4 block 8",
    "blocks 8",
    "outside",
    f"unit {'9' * 5000}",
    ",",
    "(",
)
PARTS = "write packed_colwise:2 for two equal parts, packed_colwise:64,16,16 for sizes, or packed_colwise alone"
WHOLE = "use 'replicate' meanwhile: every rank then holds and runs the whole layer"


def refusal(value: object) -> tuple[type[TpCompilerError], str]:
    with pytest.raises(TpCompilerError) as caught:
        read_style(value, where="plan.yaml line 4")
    return type(caught.value), str(caught.value)


def words(message: str, help: str) -> str:
    return f"{message}\n  help: {help}\n  asked by: plan.yaml line 4"


COLWISE = Style("colwise", cut="out")
GATHERED = Style("colwise_gather_output", cut="out", outputs=(R,))
ROWWISE = Style("rowwise", cut="in")
SPLIT = Style("rowwise_split_input", cut="in")
PACKED = Style("packed_colwise", cut="out", packed=True)
REPLICATED = Style("replicate", whole=True)
GATHER = Style("gather", outputs=(R,))

DISPATCHED = Style("dispatch_experts", placement=Shard(0), axis="ep", dispatches=True)
NAMES = {
    "moe_tp_experts": Style("moe_tp_experts"),
    "ep_router": Style("moe_tp_experts"),
    "ep_dispatch_experts": Style("moe_tp_experts"),
    "moe_identity_expert": Style("moe_tp_experts"),
    "grouped_gemm": Style("grouped_gemm", placement=Shard(0), axis="ep"),
    "dispatch_experts": DISPATCHED,
    "attend_in_turns": Style("attend_in_turns", in_turns=True, axis="cp"),
    "shard_at_rest": Style("shard_at_rest", axis="dp"),
    "sequence_parallel": Style("sequence_parallel", whole=True, inputs=(Shard(1),), outputs=(Shard(1),)),
    "colwise": COLWISE,
    "local_colwise": COLWISE,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "embedding_colwise": GATHERED,
    "rowwise": ROWWISE,
    "local_rowwise": ROWWISE,
    "rowwise_split_input": SPLIT,
    "rowwise_rep": SPLIT,
    "embedding_rowwise": Style("embedding_rowwise", cut="in"),
    "packed_colwise": PACKED,
    "packed_colwise:2": replace(PACKED, sizes=(2,)),
    "packed_colwise:4,1,1": replace(PACKED, sizes=(4, 1, 1)),
    "packed_rowwise": Style("packed_rowwise", cut="in", packed=True),
    "local_packed_rowwise": Style("packed_rowwise", cut="in", packed=True),
    "local_packed_rowwise:2": Style("packed_rowwise", cut="in", packed=True, sizes=(2,)),
    "replicate": REPLICATED,
    "replicated_with_grad_allreduce": REPLICATED,
    "local": REPLICATED,
    "local_params": REPLICATED,
    "isolated": REPLICATED,
    "mla_kv_a_proj": REPLICATED,
    "gather": GATHER,
    "all_reduce": GATHER,
    " colwise ": COLWISE,
}

PLACED = {
    "S(0)": S0,
    "S(-1)": Shard(-1),
    "R": R,
    "Replicate": R,
    "Shard(1)": Shard(1),
    "P(sum)": Partial(),
    "P(max)": Partial("max"),
}

TORCH = [
    (ColwiseParallel, COLWISE),
    (ColwiseParallel(), COLWISE),
    (ColwiseParallel(input_layouts=Shard(1)), COLWISE),
    (ColwiseParallel(output_layouts=Replicate()), GATHERED),
    (ColwiseParallel(output_layouts=Shard(1)), Style("colwise", cut="out", outputs=(Shard(1),))),
    (RowwiseParallel, ROWWISE),
    (RowwiseParallel(), ROWWISE),
    (RowwiseParallel(input_layouts=Replicate()), ROWWISE),
    (RowwiseParallel(output_layouts=Shard(1)), Style("rowwise", cut="in", outputs=(Shard(1),))),
    (
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)),
        Style("prepare_input", inputs=(R, None)),
    ),
    (
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        Style("prepare_input", inputs=(R,)),
    ),
    (
        PrepareModuleOutput(
            output_layouts=(None, Shard(0)),
            desired_output_layouts=(None, Replicate()),  # type: ignore[arg-type]  # torch's loop takes it
        ),
        Style("prepare_output", outputs=(None, R)),
    ),
    (
        PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
        ),
        Style("prepare_input_output", inputs=(R,), outputs=(S0,)),
    ),
]

WRITTEN = [
    ({"tp": "S(0)"}, Style("placement", placement={"tp": S0})),
    ({"dp": "R", "tp": Shard(0)}, Style("placement", placement={"dp": R, "tp": S0})),
    ({"style": "R"}, Style("placement", placement={"style": R})),  # without a list, every key is a mesh axis
    ({"inputs": ["R", None]}, Style("prepare_input", inputs=(R, None))),
    ({"outputs": [{"tp": "S(0)"}]}, Style("prepare_output", outputs=({"tp": S0},))),
    ({"inputs": ["R"], "outputs": "S(0)"}, Style("prepare_input_output", inputs=(R,), outputs=(S0,))),
    ({"style": "colwise_rep", "inputs": ["R"]}, Style("colwise_gather_output", "out", inputs=(R,), outputs=(R,))),
]


@pytest.mark.parametrize(("name", "style"), NAMES.items())
def test_name(name: str, style: Style) -> None:
    assert read_style(name, where="") == style


def test_every_name_is_tested() -> None:
    assert {*STYLES, *ALIASES} == {name.strip() for name in NAMES if ":" not in name}


@pytest.mark.parametrize(("text", "placement"), PLACED.items())
def test_placement(text: str, placement: Placement) -> None:
    assert read_style(text, where="") == read_style(placement, where="") == Style("placement", placement=placement)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("S(1, parts 48 48)", Cut(1, (Piece(48), Piece(48)))),
        (
            "S(0, parts 16u4 8b4 8r 6<dp)",
            Cut(0, (Piece(16, unit=4), Piece(8, block=4), Piece(8, False), Piece(6, outside="dp"))),
        ),
        ("S(-1, unit 4)", Cut(-1, (Piece(unit=4),))),
        ("S(2, outside dp, unit 4, block 24)", Cut(2, (Piece(0, True, 4, 24, "dp"),))),
    ],
)
def test_a_placement_as_this_project_prints_it(text: str, cut: Cut) -> None:
    style = read_style(text, where="")
    assert style == read_style(cut, where="") == Style("placement", placement=cut)
    assert style.to_data() == str(cut) == text
    assert read_style({"tp": text}, where="").to_data() == {"tp": text}
    loose = text.replace(" ", "  ").replace(",", " ,")
    assert read_style(loose, where="") == style


@pytest.mark.parametrize("missaid", MISSAID)
def test_a_placement_that_says_no_cut(missaid: str) -> None:
    text = f"S(0, {missaid})"
    kind, said = refusal(text)
    whole = words(f"{text!r} is not a placement", PIECES)
    assert (kind, said[:1_000], said[-200:]) == (PlanError, whole[:1_000], whole[-200:])


@pytest.mark.parametrize(("value", "style"), TORCH)
def test_torch_style(value: object, style: Style) -> None:
    assert read_style(value, where="") == style


@pytest.mark.parametrize(("value", "style"), WRITTEN)
def test_mapping(value: object, style: Style) -> None:
    assert read_style(value, where="") == style


@pytest.mark.sample(40)
@pytest.mark.parametrize("value", [*NAMES, *PLACED, *(value for value, _ in TORCH + WRITTEN)])
def test_data_reads_back_to_an_equal_style(value: object) -> None:
    style = read_style(value, where="")
    assert read_style(json.loads(json.dumps(style.to_data())), where="") == style


def test_data_is_what_a_user_would_write() -> None:
    values = [
        "colwise_rep",
        S0,
        {"tp": S0},
        ColwiseParallel(output_layouts=Shard(1)),
        "local_packed_rowwise:4,1,1",
        {"style": "packed_colwise:2", "outputs": ["R"]},
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)),
    ]
    assert [read_style(value, where="").to_data() for value in values] == [
        "colwise_gather_output",
        "S(0)",
        {"tp": "S(0)"},
        {"style": "colwise", "outputs": ["S(1)"]},
        "packed_rowwise:4,1,1",
        {"style": "packed_colwise:2", "outputs": ["R"]},
        {"inputs": ["R", None]},
    ]


REFUSALS = {
    "megamoe_experts": WHOLE,
    "megamoe_router": WHOLE,
}


@pytest.mark.parametrize(("name", "help"), REFUSALS.items())
def test_refused_by_name(name: str, help: str) -> None:
    expected = words(f"style '{name}' is recognised but not supported yet", help)
    assert refusal(name) == (UnsupportedError, expected)


def test_every_refused_name_is_tested() -> None:
    assert REFUSED.keys() <= REFUSALS.keys()


@pytest.mark.parametrize("value", [SequenceParallel, SequenceParallel(), "sequence_parallel"])
def test_sequence_parallel(value: object) -> None:
    style = read_style(value, where="")
    assert (style.whole, style.inputs, style.outputs) == (True, (Shard(1),), (Shard(1),))
    assert read_style(style.to_data(), where="") == style


def test_another_dim_of_the_sequence() -> None:
    style = read_style(SequenceParallel(sequence_dim=2), where="")
    assert style.to_data() == {"style": "sequence_parallel", "inputs": ["S(2)"], "outputs": ["S(2)"]}


def test_inputs_by_keyword_are_refused() -> None:
    value = PrepareModuleInput(input_kwarg_layouts={"x": S0}, desired_input_kwarg_layouts={"x": R})
    message = "style 'PrepareModuleInput(desired_input_kwarg_layouts=...)' is recognised but not supported yet"
    assert refusal(value) == (UnsupportedError, words(message, "use desired_input_layouts, by position"))


class DoubledColwise(ColwiseParallel):
    """A subclass may mean anything, so it must not be read as its base."""


@pytest.mark.parametrize(
    ("value", "name"),
    [(DoubledColwise, "DoubledColwise"), (DoubledColwise(), "DoubledColwise"), (ParallelStyle, "ParallelStyle")],
)
def test_other_parallel_styles_are_refused(value: object, name: str) -> None:
    help = "use ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput"
    assert refusal(value) == (UnsupportedError, words(f"ParallelStyle '{name}' is not one of torch's own", help))


@pytest.mark.parametrize(
    ("value", "message", "help"),
    [
        ("colwize", "unknown style 'colwize'", f"did you mean 'colwise'? {KNOWN}"),
        ("packed_colwize", "unknown style 'packed_colwize'", f"did you mean 'packed_colwise'? {KNOWN}"),
        ("packed_colwise:", "'' in 'packed_colwise:' says no parts", PARTS),
        ("packed_colwise:0", "'0' in 'packed_colwise:0' says no parts", PARTS),
        ("packed_colwise:2,x", "'2,x' in 'packed_colwise:2,x' says no parts", PARTS),
        ("dispatch_experts:2", "unknown style 'dispatch_experts:2'", f"did you mean 'dispatch_experts'? {KNOWN}"),
        ("colwise:2", "unknown style 'colwise:2'", f"did you mean 'colwise'? {KNOWN}"),
        ("prepare_input", "unknown style 'prepare_input'", KNOWN),
        ("S", "unknown style 'S'", KNOWN),
        ("", "unknown style ''", KNOWN),
        (3, "3 is not a style", KNOWN),
        (None, "None is not a style", KNOWN),
        ([S0], "[Shard(dim=0)] is not a style", KNOWN),
        (object, "<class 'object'> is not a style", KNOWN),
        ("S(x)", "'S(x)' is not a placement", PLACEMENT),
        ("P(mean)", "'P(mean)' is not a placement", PLACEMENT),
        (_StridedShard(0, split_factor=2), "'_S(0, 2)' is not a placement", PLACEMENT),
        (Partial("xor"), "'P(xor)' is not a placement", PLACEMENT),
        ({"tp": "colwise"}, "'colwise' is not a placement", PLACEMENT),
        ({"tp": None}, "'None' is not a placement", PLACEMENT),
        ({0: "R"}, "mesh axis 0 is not a name", 'write a name such as {"tp": "S(0)"}'),
        ({}, "{} places nothing", 'name a mesh axis, such as {"tp": "S(0)"}'),
        ({"inputs": [3]}, "'3' is not a placement", PLACEMENT),
        ({"style": "S(0)", "outputs": ["R"]}, "unknown style 'S(0)'", KNOWN),
        (
            {"inputs": ["R"], "output": ["R"]},
            "'output' is not a part of a style",
            'write {"style": name, "inputs": [placement or null, ...], "outputs": [...]}',
        ),
    ],
)
def test_not_a_style(value: object, message: str, help: str) -> None:
    assert refusal(value) == (PlanError, words(message, help))


@pytest.mark.parametrize(
    "value",
    [
        {"inputs": []},
        {"outputs": [None]},
        PrepareModuleInput,
        PrepareModuleInput(),
        PrepareModuleOutput,
        PrepareModuleInputOutput,
    ],
)
def test_a_style_asks_for_something(value: object) -> None:
    expected = words("the style asks for nothing", "give a placement for an input or an output")
    assert refusal(value) == (PlanError, expected)


def test_the_installed_transformers_has_no_other_style() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    assert {*ALL_PARALLEL_STYLES.keys()} - {*STYLES, *ALIASES, *REFUSED} == set()


plain_data = st.recursive(
    st.none() | st.integers() | st.text() | st.text("SRP(-0):,=' colwise_packed") | st.sampled_from([*NAMES, *PLACED]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["style", "inputs", "outputs", "tp"]) | st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(plain_data)
def test_any_data_is_read_or_refused(value: object) -> None:
    try:
        style = read_style(value, where="")
    except TpCompilerError:
        return
    assert read_style(style.to_data(), where="") == style
