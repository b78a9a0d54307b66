"""The plan's words about layers become constraints on leaves and pins on values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from tests.passes.models import Tied
from tests.passes.stages import Call, canonical, planned
from tpcompiler.errors import PlanError, TpCompilerError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.text import program_text
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan.plan import Plan

MESH = Mesh.of(2)
X, Y = torch.randn(2, 4), torch.randn(2, 4)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Conv1D(nn.Module):
    """Weight [in, out], as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def cuts(program: PlannedProgram) -> dict[str, str]:
    names = {node.name: fqn for node, fqn in program.leaves()}
    return {names[name]: own.sharding.text(program.mesh) for name, own in program.planned.items()}


def split_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The second part of the weight, its columns in pairs, as a matrix again."""
    _, second = self.m.w.split([2, 8], 1)
    return x @ second.unflatten(1, (4, 2)).flip(2).flatten(1)


SPLIT = Call(split_weight, m=Call(lambda: None, w=(4, 10)))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("module", "plan", "expected"),
    [
        (Mlp(), {"up": "colwise"}, {"up.weight": "S(0)", "up.bias": "S(0)"}),
        (Mlp(), {"down": "rowwise"}, {"down.weight": "S(1)"}),
        (Mlp(), {"*": "replicate"}, dict.fromkeys(["up.weight", "up.bias", "down.weight", "down.bias"], "R")),
        (Mlp(), {"up": "colwise", "up.bias": "R"}, {"up.weight": "S(0)", "up.bias": "R"}),
        (Mlp(), {"up.weight": "S(-1)", "up.bias": "P(sum)"}, {"up.weight": "S(1)", "up.bias": "P(sum)"}),
        (Mlp(), {"up.weight": {"tp": "S(0)"}}, {"up.weight": "S(0)"}),
        (Call(lambda self, x: self.c(x), c=Conv1D()), {"c": "colwise"}, {"c.weight": "S(1)", "c.bias": "S(0)"}),
        (Call(lambda self, x: self.c(x), c=Conv1D()), {"c": "rowwise"}, {"c.weight": "S(0)"}),
        (
            Call(lambda self, x: self.c(x[None])[0], c=nn.Conv1d(2, 6, 3)),
            {"c": "colwise"},
            {"c.weight": "S(0)", "c.bias": "S(0)"},
        ),
        (
            Call(lambda self, x: self.c(x[None])[0], c=nn.Conv1d(2, 6, 3, groups=2)),
            {"c": "colwise"},
            {"c.weight": "S(0)", "c.bias": "S(0)"},
        ),
        # No activation comes into the layer, only another's leaf.
        (
            Call(lambda self, x: x + self.c(self.m.w), c=nn.Linear(6, 4), m=Call(lambda: None, w=(2, 6))),
            {"c": "colwise"},
            {"c.weight": "S(0)", "c.bias": "S(0)"},
        ),
        (
            Call(lambda self, x: x + self.c(self.m.w), c=nn.Linear(6, 4), m=Call(lambda: None, w=(2, 6))),
            {"c": "rowwise"},
            {"c.weight": "S(1)"},
        ),
        (Call(lambda self, x: self.e(x.long()), e=nn.Embedding(9, 4)), {"e": "colwise"}, {"e.weight": "S(1)"}),
        (
            Call(lambda self, x: self.e(x.long()), e=nn.Embedding(9, 4)),
            {"e": "embedding_rowwise"},
            {"e.weight": "S(0)"},
        ),
        (
            Call(lambda self, x: x @ self.m.w.t().to(x.dtype), m=Call(lambda: None, w=(6, 4))),
            {"m": "colwise"},
            {"m.w": "S(0)"},
        ),
        (SPLIT, {"m": "colwise"}, {"m.w": "S(1)"}),
        (SPLIT, {"m": "rowwise"}, {"m.w": "S(0)"}),
    ],
)
def test_constraints(module: nn.Module, plan: Mapping[str, Any], expected: dict[str, str]) -> None:
    assert cuts(planned(module, (X,), plan)) == expected


def test_a_constraint_on_one_tied_leaf_is_on_all() -> None:
    assert cuts(planned(Tied(), (X.long(),), {"embed": "rowwise"})) == {"embed.weight": "S(0)", "head.weight": "S(0)"}
    assert cuts(planned(Tied(), (X.long(),), {"head": "rowwise"})) == {"head.weight": "S(1)", "embed.weight": "S(1)"}


def test_a_tied_leaf_that_a_strict_export_names_once() -> None:
    exported = torch.export.export(Tied(), (X.long(),), strict=True)
    for name, cut in (("embed", "S(0)"), ("head", "S(1)")):
        program = apply_plan(canonicalize(exported), Plan.of({name: "rowwise"}), MESH)
        assert cuts(program) == {"embed.weight": cut}
    with pytest.raises(PlanError, match="one tensor that two layers use, but the plan places it differently"):
        apply_plan(canonicalize(exported), Plan.of({"embed": "rowwise", "head": "rowwise"}), MESH)


def test_a_layer_borrows_no_weight_of_a_layer_inside_of_it() -> None:
    module = Call(lambda self, x: F.linear(x, self.up.weight), up=nn.Linear(4, 4, bias=False))
    with pytest.raises(PlanError, match="it has no weight itself"):
        planned(Call(lambda self, x: self.m(x), m=module), (X,), {"m": "colwise"})


def test_a_buffer_that_is_written_is_no_weight() -> None:
    """What a layer reads from a cache is an activation, though no input of this call has gone into it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        read = self.out(self.cache)
        self.cache.copy_(x)
        return read

    module = Call(forward, out=nn.Linear(4, 4), cache=torch.zeros(2, 4))
    assert cuts(planned(module, (X,), {"out": "rowwise"})) == {"out.weight": "S(1)"}


def test_a_tied_leaf_is_touched_by_an_entry_for_its_other_name() -> None:
    assert planned(Tied(), (X.long(),), {"embed": "rowwise"}).notes == ()
    assert [note.text for note in planned(Tied(), (X.long(),)).notes] == ["embed", "head"]


def test_pins_on_several_inputs_and_outputs_of_a_layer() -> None:
    inner = Call(lambda self, x, y: (x + 1, y + x))
    outer = Call(lambda self, x, y: self.pair(x * 2, y), pair=inner)
    plan = {"pair": {"inputs": ["S(0)", None], "outputs": [None, "S(1)"]}}
    assert_expected_inline(
        program_text(planned(outer, (X, Y), plan)),
        """\
x = input f32[2, 4]
y = input f32[2, 4]
mul = mul(x, 2)
pin_1: S(0) = pin(mul)
add = add(pin_1, 1)
add_1 = add(y, pin_1)
pin: S(1) = pin(add_1)
pin_2: R = pin(add)
pin_3: R = pin(pin)
return pin_2, pin_3
""",
    )


def test_the_boundary() -> None:
    module = Call(lambda self, x, flag, y: {"sum": x + y, "none": None, "same": x})
    program = planned(module, (X, True, Y), inputs={"y": "S(0)"}, outputs={"same": "S(1)"})
    assert_expected_inline(
        program_text(program),
        """\
x = input f32[2, 4]
flag = input True
y = input f32[2, 4]
add = add(x, y)
pin: R = pin(add)
pin_1: S(1) = pin(x)
return pin, None, pin_1
""",
    )
    assert {
        node.name: program.constraints[node.name].sharding.text(program.mesh) for node in program.user_inputs()
    } == {
        "x": "R",
        "y": "S(0)",
    }
    by_position = planned(module, (X, True, Y), inputs=[None, "S(0)"], outputs=[None, "S(1)"])
    assert program_text(by_position) == program_text(program)


def test_layers_that_no_entry_touches_are_noted() -> None:
    module = Call(
        lambda self, x: self.norm(self.stack(x)), stack=nn.Sequential(*(Mlp() for _ in range(3))), norm=nn.LayerNorm(4)
    )
    notes = planned(module, (X,), {"stack.1.up": "colwise"}).notes
    assert [(note.kind, note.text) for note in notes] == [
        ("untouched", "stack.*.up x 2"),
        ("untouched", "stack.*.down x 3"),
    ]


EMBEDDING = {"embed": "embedding_rowwise"}


def error(module: nn.Module, args: tuple[Any, ...], plan: Mapping[str, object], **kwargs: Any) -> str:
    with pytest.raises(TpCompilerError) as caught:
        planned(module, args, plan, **kwargs)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_weight_that_an_op_without_a_rule_uses_behind_a_copy() -> None:
    """A dim of it cannot be cut either, so the advice does not name one."""
    text = error(Call(lambda self, x: self.embed(x), embed=nn.Embedding(4, 8, max_norm=1.0)), (X.long(),), EMBEDDING)
    assert "aten.embedding_renorm.default has no rule for its use of 'embed.weight'" in text
    assert "help: use 'replicate' for this layer" in text


def test_more_placements_than_tensors() -> None:
    assert_expected_inline(
        error(Mlp(), (X,), {"up": {"inputs": ["R", "R"]}}),
        """\
PlanError: style 'prepare_input' gives 2 input placements, 'up' has 1 tensor inputs
  help: give one placement per tensor
  asked by: the plan ("up": {'inputs': ['R', 'R']})""",
    )
    assert_expected_inline(
        error(Mlp(), (X,), {}, outputs=["R", "R"]),
        """\
ShardingError: 2 output placements for 1 tensor outputs
  help: give one per tensor or a dict""",
    )


def test_dims_that_are_not_there() -> None:
    assert_expected_inline(
        error(Mlp(), (X,), {}, outputs=["S(-3)"]),
        """\
ShardingError: cannot shard output 'output' on dim -3: it has 2 dims
  help: use a dim from -2 to 1
  asked by: outputs=""",
    )
    assert_expected_inline(
        error(Call(lambda self, x: x.sum()), (X,), {}, outputs=["S(0)"]),
        """\
ShardingError: cannot shard output 'output' on dim 0: it has 0 dims
  help: pin it to R
  asked by: outputs=""",
    )


def test_cuts_that_do_not_fit_the_size() -> None:
    assert_expected_inline(
        error(Mlp(), (X,), {"up.weight": "S(0, parts 4 4)"}),
        """\
ShardingError: cannot place 'up.weight' as S(0, parts 4 4): its dim 0 is 6, and the parts add up to 8
  help: give parts that add up to 6, units and blocks that divide it, or S(0) alone
  asked by: the plan ("up.weight": "S(0, parts 4 4)")""",
    )
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    message = error(Mlp(), (X,), {}, inputs={"x": "S(0, block 2)"}, dynamic_shapes=sizes)
    assert ", and it is dynamic\n" in message


def test_the_canonical_program_is_not_changed() -> None:
    program = canonical(Mlp(), (X,))
    before = program_text(program)
    planned(Mlp(), (X,), {"up": "colwise_gather_output"})
    assert program_text(program) == before


@pytest.mark.slow
def test_time_grows_with_the_program_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the layers look at twice as many operands."""

    class Norms(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    def looked_at(count: int) -> int:
        program, seen = canonical(Norms(count), (X,)), list[torch.fx.Node]()
        with monkeypatch.context() as patch:
            patch.setattr(edit, "outputs", lambda node: seen.append(node) or outputs(node))
            apply_plan(program, Plan.of({"layers.*.0": "sequence_parallel", "layers.*.1": "rowwise"}), MESH)
        return len(seen)

    outputs = edit.outputs
    assert looked_at(16) < 2.2 * looked_at(8)
