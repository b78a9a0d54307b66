"""Dynamic dims that are cut get sizes that the mesh divides, in a shape environment of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim

import tpcompiler
from tests.passes.models import Mlp
from tests.passes.stages import Call, divided, planned
from tpcompiler._torch import sym_hint
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.local import fake_mode_of
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.passes.divide_sizes import divide_sizes

X = torch.randn(6, 4)
BATCH = {"x": {0: Dim("batch", max=64)}}


def named(text: str, program: PlannedProgram) -> str:
    """The text with the symbols of the program called <0>, <1>, ... in the order in which they come."""
    found = {str(s) for n in program.graph.nodes for s in _symbols(n.meta.get("val"))}
    for index, symbol in enumerate(sorted(found, key=text.find)):
        text = text.replace(symbol, f"<{index}>")
    return text


def _symbols(value: Any) -> set[Any]:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return {s for size in sizes if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}


def shapes(program: PlannedProgram) -> str:
    rows = (f"{n.name}: {list(v.shape)}\n" for n in program.graph.nodes if edit.is_tensor(n) for v in [n.meta["val"]])
    return named("".join(rows), program)


def function(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.flatten(0, 1), -y


def test_before_and_after() -> None:
    module, given = Call(function), (torch.randn(6, 3, 4), torch.randn(6))
    batch = Dim("batch")
    sizes = {"x": {0: batch}, "y": {0: batch}}
    before = planned(module, given, inputs=["S(0)", None], dynamic_shapes=sizes)
    after = divided(module, given, inputs=["S(0)", None], dynamic_shapes=sizes)
    assert_expected_inline(
        shapes(before),
        """\
x: [<0>, 3, 4]
y: [<0>]
view: [3*<0>, 4]
neg: [<0>]
pin: [3*<0>, 4]
pin_1: [<0>]
""",
    )
    assert_expected_inline(
        shapes(after),
        """\
x: [2*<0>, 3, 4]
y: [2*<0>]
view: [6*<0>, 4]
neg: [2*<0>]
pin: [6*<0>, 4]
pin_1: [2*<0>]
""",
    )
    assert [n.text for n in after.notes] == [
        "dim 0 of input 'x' must be a multiple of 2",
        "dim 0 of input 'y' must be a multiple of 2",
    ]


def test_a_size_that_the_mesh_divides_already_stays() -> None:
    sizes = {"x": {0: 2 * Dim("half", min=1, max=32)}}
    before = planned(Mlp(), (X,), inputs=["S(0)"], dynamic_shapes=sizes)
    assert divide_sizes(before) is before


def test_a_part_of_the_degree_may_be_there_already() -> None:
    sizes = {"x": {0: 2 * Dim("half", min=1, max=32)}}
    program = divided(Mlp(), (torch.randn(8, 4),), inputs=["S(0)"], dynamic_shapes=sizes, degree=4)
    assert shapes(program).splitlines()[4] == "x: [4*<0>, 4]"


def test_the_users_shape_environment_stays_as_it_is() -> None:
    before = planned(Mlp(), (X,), inputs=["S(0)"], dynamic_shapes=BATCH)
    env = fake_mode_of(before.graph).shape_env
    assert env is not None
    known = (len(env.guards), dict(env.var_to_range), len(env.backed_var_to_val))
    after = divide_sizes(before)
    other = fake_mode_of(after.graph).shape_env
    assert other is not env
    assert other is not None
    assert known == (len(env.guards), dict(env.var_to_range), len(env.backed_var_to_val))
    assert len(other.backed_var_to_val) == len(env.backed_var_to_val) + 1


@pytest.mark.parametrize(("least", "greatest", "found"), [(5, 7, "none"), (2, 7, "one")])
def test_a_range_without_two_multiples(least: int, greatest: int, found: str) -> None:
    """None of them could be called; one is a static size."""
    with pytest.raises(UnsupportedError) as raised:
        divided(Mlp(), (X,), inputs=["S(0)"], dynamic_shapes={"x": {0: Dim("b", min=least, max=greatest)}}, degree=4)
    message = str(raised.value)
    assert message.startswith("cannot shard input 'x' on dim 0: its size s")
    assert message.endswith(
        f" from {least} to {greatest}, and {found} of these is a multiple of 4\n"
        "  help: export with that dim static or with a wider range, or leave it whole\n"
        "  asked by: inputs="
    )


def test_a_size_that_depends_on_data() -> None:
    """Nobody can give inputs that have an even number of positive elements."""

    def positive(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).nonzero()

    with pytest.raises(UnsupportedError, match="its size u0 is dynamic and need not be a multiple of 2"):
        divided(Call(positive), (X,), outputs=["S(0)"])


class Added(nn.Module):
    """Rows of y are put among those of x, so that there may be no more of them."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(1, (y > 0).long(), y) * 2


class Fours(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, 4)).sum(1) + y[:1]


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("of_a_file", [False, True])
@pytest.mark.parametrize(
    ("model", "rows", "cut", "rounded", "sizes"),
    [
        (Added(), 7, ["R", "S(0)"], 21, [(9, 9), (14, 6)]),  # 9 would be more than the other 7
        (Fours(), 8, ["S(0)", "R"], 24, [(12, 5), (24, 24)]),  # 9 would be no multiple of 4
        (Fours(), 7 * 4, ["R", "S(0)"], 30, [(12, 3), (24, 24)]),  # nothing speaks of these
    ],
)
def test_what_the_export_found_of_sizes_holds_in_the_example(
    model: nn.Module, rows: int, cut: list[str], rounded: int, sizes: Any, of_a_file: bool, tmp_path: Path
) -> None:
    free = ({0: Dim.AUTO}, {0: Dim.AUTO})
    exported = torch.export.export(model, (torch.randn(rows, 4), torch.randn(rows, 4)), dynamic_shapes=free)
    if of_a_file:
        torch.export.save(exported, tmp_path / "model.pt2")
        exported = torch.export.load(tmp_path / "model.pt2")
    made = tpcompiler.parallelize(exported, 3, {}, inputs=cut)
    values = [node.meta["val"] for node in made.converted.resharded.user_inputs()]
    assert sym_hint(values[cut.index("S(0)")].shape[0]) == rounded
    for x, y in sizes:
        assert made.verify((torch.randn(x, 4), torch.randn(y, 4))).ok
