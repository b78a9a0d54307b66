"""A program that breaks a promise of its stage is refused, by the name of the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.models import MEGATRON, Mlp
from tests.passes.stages import divided, folded, local, placed
from tpcompiler.errors import InternalError
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.node_placement import PLACEMENT
from tpcompiler.ir.program import LocalProgram, LoweredProgram, PlacedProgram, Program, check_invariants
from tpcompiler.ir.sharding import Sharding

ROWS = Sharding((DimSharding.by("tp"), WHOLE))
HELP = "\n  help: report this with the model and the plan"


def node_of(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def change(name: str, **parts: Any) -> Callable[[Program], None]:
    def apply(program: Program) -> None:
        node = node_of(program, name)
        node.meta[PLACEMENT] = replace(node.meta[PLACEMENT], **parts)

    return apply


def unmark(program: Program) -> None:
    del node_of(program, "relu").meta[PLACEMENT]


@pytest.mark.parametrize(
    ("stage", "damage", "message"),
    [
        (placed, unmark, "PlacedProgram: 'relu' has no placement"),
        (placed, change("relu", shardings=()), "PlacedProgram: 'relu' has another number of shardings than of tensors"),
        (
            placed,
            change("relu", shardings=(Sharding.replicated(3),)),
            "PlacedProgram: 'relu' of 2 dims has a sharding of 3",
        ),
        (
            placed,
            change("relu", shardings=(Sharding(ROWS.dims, (("tp", "sum"),)),)),
            "PlacedProgram: 'relu' uses a mesh axis twice",
        ),
        (
            folded,
            change("relu", shardings=(ROWS,)),
            "PlacedProgram: 'linear_1' has 'relu' in another sharding than it needs",
        ),
    ],
)
def test_a_broken_promise(stage: Callable[..., Program], damage: Callable[[Program], None], message: str) -> None:
    program = stage(Mlp(), (torch.randn(2, 4),), MEGATRON)
    check_invariants(program)
    damage(program)
    with pytest.raises(InternalError) as error:
        check_invariants(program)
    assert str(error.value).splitlines()[:2] == (message + HELP).splitlines()


def test_markers_that_are_left() -> None:
    """A stage is a type: what one allows, the next refuses."""
    early, late = divided(Mlp(), (torch.randn(2, 4),), MEGATRON), folded(Mlp(), (torch.randn(2, 4),), MEGATRON)
    with pytest.raises(InternalError, match=r"PlacedProgram: .* has no placement"):
        check_invariants(PlacedProgram(early.source, early.graph, early.mesh, early.notes))
    with pytest.raises(InternalError, match="LoweredProgram: 'reshard' is still a marker"):
        check_invariants(LoweredProgram(late.source, late.graph, late.mesh, 0))


@pytest.mark.slow
def test_every_stage_keeps_its_promises() -> None:
    program = local(Mlp(), (torch.randn(2, 4),), MEGATRON)
    assert isinstance(program, LocalProgram)
    assert not isinstance(program, PlacedProgram)
    check_invariants(program)
