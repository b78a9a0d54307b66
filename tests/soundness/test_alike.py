"""What one rank alone does otherwise, of ranks that hold equal shapes, and no number shows."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.runtime.written import write_artifact
from tests.trust.damage import Artifact, claim, inserted
from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.judge.sound.check import check_programs

aten = torch.ops.aten
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
PLAN = {"l": "colwise", "m": "rowwise"}
EQUAL = "ranks 0 and 1 hold equal shapes, and run programs apart"


class Strided(nn.Module):
    """What it makes depends on how a value, and a buffer, lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.register_buffer("k", torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.m(self.l(x))
        return y.as_strided((4, 8), (8, 1)) * 2 + self.k.as_strided((4, 8), (8, 1), 0)


def made(model: nn.Module, sizes: Any = None, mesh: int = 2, plan: Any = PLAN, **boundary: Any) -> Artifact:
    torch.manual_seed(0)
    return Artifact.of(tpcompiler.parallelize(export(model, (X,), dynamic_shapes=sizes), mesh, plan, **boundary))


def found(artifact: Artifact) -> list[str]:
    return check_programs(artifact.written(), artifact.manifest).findings


def outputs(artifact: Artifact) -> list[Any]:
    return [result.outputs for result in simulate(artifact.ranks, [[X]] * len(artifact.ranks))]


def last_wait(program: ExportedProgram) -> fx.Node:
    return [node for node in edit.calls(program.graph) if edit.is_wait(node)][-1]


def put_after(wait: fx.Node, *calls: tuple[Any, tuple[Any, ...]]) -> None:
    users, value, before = list(wait.users), wait, wait.next
    for target, args in calls:
        value = inserted(before, target, (value, *args), wait)
    for user in users:
        user.replace_input_with(wait, value)


def columns_first(artifact: Artifact) -> None:
    """A change ends with the same numbers in another order in memory."""
    put_after(last_wait(artifact.last), (aten.permute.default, ([1, 0],)), (aten.clone.default, ()))
    clone = next(node for node in edit.calls(artifact.last.graph) if node.target is aten.clone.default)
    clone.kwargs = {"memory_format": torch.contiguous_format}
    users = list(clone.users)
    back = inserted(clone.next, aten.permute.default, (clone, [1, 0]), clone)
    for user in users:
        user.replace_input_with(clone, back)
    for node in edit.calls(artifact.last.graph):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            with next(iter(node.graph.nodes)).meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)


def test_the_order_in_memory() -> None:
    artifact = made(Strided())
    assert found(artifact) == []
    wrong = artifact.copied()
    columns_first(wrong)
    assert found(wrong)[0].startswith(EQUAL)
    right, other = outputs(artifact), outputs(wrong)
    assert torch.equal(right[0][0], other[0][0])
    assert not torch.allclose(right[1][0], other[1][0])


def test_where_in_memory_a_tensor_begins() -> None:
    """A buffer is a view of a larger tensor, of which an op takes the beginning."""
    artifact = made(Strided())
    held = artifact.last.state_dict["k"]
    artifact.last.state_dict["k"] = moved = torch.cat([torch.full((8,), 9.0), held.flatten()])[8:].view(4, 8)
    assert torch.equal(moved, held)
    assert not torch.equal(moved.as_strided((4, 8), (8, 1), 0), held.as_strided((4, 8), (8, 1), 0))
    assert found(artifact) == ["'k' begins in its memory at 0 on rank 0 and at 8 on rank 1"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.m(self.l(x))
        return y.sigmoid(), y.tanh()


def reduced_twice(artifact: Artifact, swapped: bool) -> None:
    """The value is reduced from what the op has made, and again from terms of a change; one rank swaps the two."""
    for rank, program in enumerate(artifact.ranks):
        wait = last_wait(program)
        start, tanh = wait.args[0], next(n for n in program.graph.nodes if n.target is aten.tanh.default)
        assert isinstance(start, fx.Node)
        term = inserted(tanh, aten.full_like.default if rank else aten.clone.default, (wait, 0)[: 1 + bool(rank)], wait)
        claim(term).update(reshard="c", change="R -> P(sum)", sharding=["P(sum)"])
        pending, ends = start.args[0], []
        for name, value in (("r1", term), ("r2", pending)):
            if swapped and rank:
                value = pending if name == "r1" else term
            again = inserted(tanh, start.target, (value, *start.args[1:]), start)
            ends.append(inserted(tanh, wait.target, (again,), wait))
            for node in (again, ends[-1]):
                claim(node)["reshard"] = name
        tanh.replace_input_with(wait, ends[0])
        both = inserted(program.graph.output_node(), aten.add.Tensor, (tanh, ends[1]), tanh)
        claim(both)["origin"] = "both"
        values = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        program.graph.output_node().args = ((values[0], both),)
        program.graph_signature.output_specs[1].arg.name = both.name
    artifact.manifest.collectives.extend(copy.deepcopy(artifact.manifest.collectives * 2))


@pytest.mark.slow
def test_terms_of_two_changes_are_not_swapped() -> None:
    """On ranks with other shares too: three of 8 rows hold 3, 3 and 2."""
    for world in (2, 3):
        wrong = made(Branches(), mesh=world, inputs=["R"])
        reduced_twice(wrong, swapped=True)
        assert any("take 'linear_1' for 'linear_1'" in each for each in found(wrong)), found(wrong)


ROWS = ({0: Dim("rows", min=4, max=64)},)


def a_place_by_a_size(artifact: Artifact) -> None:
    """Columns are taken one by one, the first at `20 // rows`: the right one where there are more than 20."""
    wait, graph = last_wait(artifact.last), artifact.last.graph
    (x,) = (node for node in graph.nodes if node.name == "x")
    with graph.inserting_before(next(edit.calls(graph))):
        rows = graph.call_function(aten.sym_size.int, (x, 0))
        place = graph.call_function(operator.floordiv, (20, rows))
    rows.meta = {"val": x.meta["val"].shape[0], "custom": {}}
    place.meta = {"val": 20 // rows.meta["val"], "custom": {}}
    users, before = list(wait.users), wait.next
    columns = [inserted(before, aten.select.int, (wait, 1, place if i == 0 else i), wait) for i in range(8)]
    for column in columns:
        column.meta["val"] = wait.meta["val"].select(1, 0)
    stacked = inserted(before, aten.stack.default, (columns, 1), wait)
    for user in users:
        user.replace_input_with(wait, stacked)


def a_size_that_raises(artifact: Artifact) -> None:
    """A number that is nothing, but where it divides by nothing."""
    graph = artifact.last.graph
    view = next(node for node in edit.calls(graph) if node.target is aten.view.default)
    size = next(node for node in edit.calls(graph) if node.target is aten.sym_size.int)
    given = view.args[1][0]  # type: ignore[index]
    steps = [(operator.sub, (size, 5)), (operator.floordiv, (size, None)), (operator.sub, (None, None))]
    last = size
    for target, args in [*steps, (operator.add, (given, None))]:
        with graph.inserting_before(view):
            last_args = tuple(last if arg is None else arg for arg in args)  # type: ignore[attr-defined]
            new = graph.call_function(target, last_args)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in last_args]
        new.meta = {"val": target(*values), "custom": {}}
        last = new
    view.update_arg(1, [last, *view.args[1][1:]])  # type: ignore[index]


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        return x.view(rows * columns).tanh()


@pytest.mark.parametrize(
    ("model", "damage", "finding", "asked"),
    [
        (Branches, a_place_by_a_size, "which is no fixed part of it", {"plan": PLAN}),
        (Flat, a_size_that_raises, "ranks 0 and 1 have shares of different programs", {"plan": {}, "inputs": ["S(1)"]}),
    ],
)
def test_what_is_wrong_at_few_sizes(
    model: type[nn.Module], damage: Callable[[Artifact], None], finding: str, asked: dict[str, Any]
) -> None:
    artifact = made(model(), ROWS, **asked)
    assert found(artifact) == []
    damage(artifact)
    assert any(finding in each for each in found(artifact)), found(artifact)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p


@pytest.mark.slow
def test_an_average_of_three_is_what_each_holds(tmp_path: Path) -> None:
    """The third of three times a number is not always that number, so the terms are not added up to be compared."""
    torch.manual_seed(0)
    program = export(Mean(), (X,))
    tpcompiler.parallelize(program, 3, {"p": "P(avg)"}).save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").check(program).ok
    artifact = made(Mean(), mesh=3, plan={"p": "P(avg)"})
    artifact.put(1, "p", artifact.leaf(1, "p") + 1)
    assert found(artifact) == ["'p' is not the same on ranks that share it"]


def test_a_name_that_stands_for_two_tensors(tmp_path: Path) -> None:
    artifact = made(Strided())
    artifact.last.constants["k"] = artifact.last.state_dict["k"] + 1
    write_artifact(
        tmp_path / "out", artifact.manifest, lambda rank, path: torch.export.save(artifact.ranks[rank], path)
    )
    with pytest.raises(ArtifactError, match="'k' is in the state and in the constants"):
        tpcompiler.open(tmp_path / "out").only.rank_program(len(artifact.ranks) - 1)
