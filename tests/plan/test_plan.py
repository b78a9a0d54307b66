"""Plans: patterns, which entry rules a name, and the words of every refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from tpcompiler.errors import PlanError
from tpcompiler.plan.plan import Plan, PlanEntry
from tpcompiler.plan.styles import Style

COLWISE = Style("colwise", cut="out")

LLAMA = [
    "model",
    "model.embed_tokens",
    "model.embed_tokens.weight",
    *(
        f"model.layers.{layer}{part}"
        for layer in range(2)
        for part in ("", ".self_attn", *(f".self_attn.{x}_proj" for x in "qkvo"), ".mlp", ".mlp.up_proj")
    ),
    "lm_head",
]


def ruled(plan: dict[str, object], names: list[str]) -> dict[str, str]:
    return {name: entry.pattern for name, entry in Plan.of(plan).assign(names).items()}


@pytest.mark.parametrize(
    ("pattern", "matched", "other"),
    [
        ("up", ["up"], ["a.up", "up.weight", "upp", "u"]),
        ("*", ["up", "0"], ["a.up"]),
        ("*.up", ["a.up", "0.up"], ["up", "a.b.up"]),
        ("layers.*.up", ["layers.0.up", "layers.10.up"], ["layers.up", "layers.0.1.up"]),
        ("layer_*.up", ["layer_0.up", "layer_.up"], ["layers.0.up", "layer_0.1.up"]),
        ("*_proj", ["q_proj"], ["a.q_proj", "q_proj.weight"]),
        ("**.up", ["up", "a.up", "a.b.up"], ["a.up.weight", "a.cup"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["ab", "b.a"]),
        ("a.**.up", ["a.up", "a.b.up", "a.b.c.up"], ["a", "up", "ab.up"]),
        ("**", ["a", "a.b"], []),
        ("**.a.**", ["a", "x.a", "a.x", "x.a.x"], ["xa", "b"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a[0]+", ["a[0]+"], ["a0"]),
    ],
)
def test_matches(pattern: str, matched: list[str], other: list[str]) -> None:
    entry = PlanEntry(pattern, COLWISE, where="")
    assert [name for name in matched + other if entry.matches(name)] == matched


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*a" * 25 + "*b", "a" * 60),
        (".".join(["**"] * 30 + ["b"]), "a." * 400 + "a"),
        ("**.a." * 30 + "b", "a." * 400 + "a"),
    ],
)
def test_many_stars(pattern: str, name: str) -> None:
    entry = PlanEntry(pattern, COLWISE, "")
    assert not entry.matches(name)
    assert entry.matches(name[:-1] + "b")


def test_more_stars_than_a_name_has_parts() -> None:
    with pytest.raises(PlanError, match="has 101 stars\n  help: write at most 100"):
        Plan.of({"*a" * 101: "colwise"})


@given(st.text("ab.*", max_size=9), st.text("ab.", max_size=9))
def test_a_pattern_means_the_same_however_it_is_matched(pattern: str, name: str) -> None:
    """As the plainest way says, which may take without end for a longer one."""
    parts = [
        r"(?:[^.]+\.)*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") + r"\."
        for part in pattern.split(".")
    ]
    plain = re.fullmatch("".join(parts), name + ".") is not None
    assert PlanEntry(pattern, COLWISE, "").matches(name) == plain


def test_entries_of_a_mapping() -> None:
    assert Plan.of({"*.up": "colwise", "down": ColwiseParallel}).entries == (
        PlanEntry("*.up", COLWISE, where=""),
        PlanEntry("down", COLWISE, where=""),
    )


def test_where_repeats_the_line() -> None:
    plan = Plan.of({"*.up.weight": "S(0)", "a": {"tp": Shard(0)}, "b": RowwiseParallel, "c": Replicate()})
    assert [entry.where for entry in plan.entries] == [
        'the plan ("*.up.weight": "S(0)")',
        "the plan (\"a\": {'tp': Shard(dim=0)})",
        'the plan ("b": RowwiseParallel)',
        'the plan ("c": Replicate())',
    ]


def test_a_plan_is_read_once() -> None:
    plan = Plan.of({"up": "colwise"})
    assert Plan.of(plan) is plan


def test_assign_keeps_the_order_of_the_program() -> None:
    assert ruled({"down": "rowwise", "up": "colwise"}, ["up", "act", "down"]) == {"up": "up", "down": "down"}


@pytest.mark.parametrize(
    ("specific", "general"),
    [("a.b.up", "a.*.up"), ("a.*.up", "**.up"), ("a.b.*", "a.*.*"), ("a.*.up", "a.*.u*"), ("a.**.up", "**.up")],
)
def test_the_more_specific_entry_wins(specific: str, general: str) -> None:
    names = ["a.b.up"]
    assert ruled({specific: "colwise", general: "rowwise"}, names) == {"a.b.up": specific}
    assert ruled({general: "rowwise", specific: "colwise"}, names) == {"a.b.up": specific}


def test_equal_styles_do_not_conflict() -> None:
    assert ruled({"a.*": "colwise", "*.b": ColwiseParallel()}, ["a.b"]) == {"a.b": "a.*"}


def test_a_conflict_is_solved_by_an_entry_of_its_own() -> None:
    assert ruled({"a.*": "colwise", "*.b": "rowwise", "a.b": "R"}, ["a.b"]) == {"a.b": "a.b"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        # a Hugging Face base-model plan, on the model with a head
        (
            "layers.*.self_attn.q_proj",
            "'model.layers.*.self_attn.q_proj', 'model.layers.*.self_attn.v_proj', 'model.layers.*.self_attn.o_proj'",
        ),
        (
            "model.layers.*.self_attn.q_prj",
            "'model.layers.*.self_attn.q_proj', 'model.layers.*.self_attn.v_proj', 'model.layers.*.self_attn.o_proj'",
        ),
        ("**.up_prj", "'**.up_proj', '**.v_proj', '**.q_proj'"),
        ("up_proj", "'**.up_proj', '**.v_proj', '**.q_proj'"),
        ("model.layers.2.mlp", "'model.layers.1.mlp', 'model.layers.0.mlp', 'model.layers.*.mlp'"),
        ("lm_haed", "'lm_head', '**.lm_head'"),
        ("nothing.like.it", "'model', 'model.embed_tokens', 'model.embed_tokens.weight'"),
    ],
)
def test_an_entry_that_matches_nothing(pattern: str, names: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.of({"lm_head": "colwise", pattern: "colwise"}).assign(LLAMA)
    assert str(caught.value) == (
        f"plan entry '{pattern}' matches nothing\n"
        f"  help: use a name of the program, such as {names}\n"
        f'  asked by: the plan ("{pattern}": "colwise")'
    )


def test_a_program_without_names() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.of({"up": "colwise"}).assign([])
    assert str(caught.value) == (
        "plan entry 'up' matches nothing\n"
        "  help: the program has no module and no parameter to name\n"
        '  asked by: the plan ("up": "colwise")'
    )


def test_data_reads_back_to_an_equal_plan(tmp_path: Path) -> None:
    plan = Plan.of(
        {
            "a": "colwise_rep",
            "*.b": "S(0)",
            "**.c": {"dp": "R", "tp": "S(0)"},
            "d": ColwiseParallel(output_layouts=Shard(1)),
            "e": PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)),
        }
    )
    data = plan.to_data()
    assert data == {
        "a": "colwise_gather_output",
        "*.b": "S(0)",
        "**.c": {"dp": "R", "tp": "S(0)"},
        "d": {"style": "colwise", "outputs": ["S(1)"]},
        "e": {"inputs": ["R", None]},
    }
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data, indent="\t"))
    assert Plan.of(data) == Plan.of(file) == Plan.of(str(file)) == plan
    assert Plan.of(Plan().to_data()) == Plan()


def test_not_a_plan() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.of(3)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "3 is not a plan\n  help: give a mapping of names to styles, or the path of a YAML or JSON file"
    )


def test_a_pattern_is_text() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.of({0: "colwise"})  # type: ignore[dict-item]
    assert str(caught.value) == (
        'plan pattern 0 is not text\n  help: write the name of a layer, such as "*.up"\n  asked by: the plan'
    )
