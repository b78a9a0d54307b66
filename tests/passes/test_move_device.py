"""Everything that a program says of devices is renamed, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.devices import MODELS, exported, other_devices, propagate
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.text import program_text
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.move_device import move_device

aten = torch.ops.aten


def functional(name: str) -> ExportedProgram:
    return canonicalize(exported(name)[0]).source


def text(program: ExportedProgram) -> str:
    return program_text(CanonicalProgram(program, program.graph))


class Rows(nn.Module):
    """What the pass's own text shows."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.arange(8, device="cpu").view(2, 4), torch.ops.aten.scalar_tensor.default(1.0)


def test_before_and_after() -> None:
    before = export(Rows(), (torch.ones(2, 4),)).run_decompositions({})
    (flag,) = (node for node in before.graph.nodes if node.target is aten.scalar_tensor.default)
    flag.kwargs = {}  # as a hand-made graph may have it
    assert_expected_inline(
        text(before),
        """\
x = input f32[2, 4]
arange = arange(8, device=device(type='cpu'), pin_memory=False)
view = view(arange, [2, 4])
add = add(x, view)
scalar_tensor = scalar_tensor(1.0)
return add, scalar_tensor
""",
    )
    assert_expected_inline(
        text(move_device(before, "cuda")),
        """\
x = input f32[2, 4]
arange = arange(8, device=device(type='cuda'), pin_memory=False)
view = reshape(arange, [2, 4])
add = add(x, view)
scalar_tensor = scalar_tensor(1.0, device=device(type='cuda'))
return add, scalar_tensor
""",
    )


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_stays_behind(name: str, world: int) -> None:
    program, plan, _ = exported(name)
    made = tpcompiler.parallelize(program, world, plan, device_type="cuda")
    for rank in range(world):
        moved = made.rank_program(rank)
        assert other_devices(moved, "cuda") == []
        propagate(moved)
        moved.validate()


@pytest.mark.slow
@pytest.mark.parametrize("node", ["arange", "full", "scalar_tensor"])
def test_what_stays_behind_is_found(node: str) -> None:
    """The negative control: one literal put back is seen by the search, and by torch itself."""
    program, plan, _ = exported("literals")
    moved = tpcompiler.parallelize(program, 2, plan, device_type="cuda").rank_program(0)
    (literal,) = (n for n in moved.graph.nodes if n.name == node)
    literal.update_kwarg("device", torch.device("cpu"))
    assert other_devices(moved, "cuda") == [f"{node}.kwargs['device'] is cpu"]
    literal.update_kwarg("device", torch.device("cuda:1"))
    assert other_devices(moved, "cuda") == [f"{node}.kwargs['device'] is cuda:1"]
    if node != "scalar_tensor":  # a tensor of no dims may be anywhere
        with pytest.raises(RuntimeError, match="at least two devices"):
            propagate(moved)
    literal.update_kwarg("device", torch.device("cuda"))
    assert other_devices(moved, "cuda") == []


def test_an_index_is_lost() -> None:
    """What was exported on one GPU runs on the current one of each process."""
    program = copy.deepcopy(move_device(functional("literals"), "cuda"))
    (literal,) = (node for node in program.graph.nodes if node.name == "arange")
    literal.update_kwarg("device", torch.device("cuda:1"))
    assert other_devices(move_device(program, "cuda"), "cuda") == []


def test_the_program_itself_is_not_changed() -> None:
    before = functional("written")
    values = [node.meta.get("val") for node in before.graph.nodes]
    was, state = str(before), dict(before.state_dict)
    moved = move_device(before, "cuda")
    assert str(before) == was
    assert all(node.meta.get("val") is value for node, value in zip(before.graph.nodes, values, strict=True))
    assert all(moved.state_dict[name] is state[name] for name in state), "weights are not copied"
    assert move_device(before, "cpu") is before
