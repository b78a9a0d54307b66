"""A rank program is an ordinary exported program: it can be exported and decomposed again, and adds no waiting."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.export import ExportedProgram

from tests.compared import compare
from tests.promises.models import CASES, NAMES, converted, functional, ranks
from tests.zoo.faults import without_collective
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.parallel.program_subject import layout_of

aten = torch.ops.aten


def exported_again(program: ExportedProgram, name: str, strict: bool = False) -> ExportedProgram:
    case = CASES[name]
    made = torch.export.export(program.module(), (), case.inputs, dynamic_shapes=case.dims, strict=strict)
    return made.run_decompositions({})  # so that it says which buffers are written


CHANGES: dict[str, Callable[[ExportedProgram, str], ExportedProgram]] = {
    "functional": lambda program, name: program.run_decompositions({}),
    "core aten": lambda program, name: program.run_decompositions(),
    "exported again": exported_again,
    "exported again, strict": lambda program, name: exported_again(program, name, strict=True),
    "exported again, core aten": lambda program, name: exported_again(program, name).run_decompositions(),
}


def collectives(program: ExportedProgram) -> list[tuple[object, ...]]:
    """Every collective with all its arguments but the tensor, in order."""
    return [(str(n.target), *map(str, n.args[1:])) for n in program.graph.nodes if edit.is_collective(n)]


def judged(programs: Sequence[ExportedProgram], name: str) -> VerifyReport:
    made = converted(name, len(programs))
    inputs = [node.name for node in made.converted.resharded.user_inputs()]
    return compare(
        made.only.original(),
        programs,
        (),
        CASES[name].inputs,
        layout_of(made.only),
        inputs,
        made.converted.resharded.output_names(),
    )


@pytest.mark.slow
@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("name", "change"), list(itertools.product(["odd_dynamic", "odd", "conv_cut", "views", "counting"], CHANGES))
)
def test_what_is_made_of_it_is_still_equal(name: str, change: str) -> None:
    before = ranks(name, 2)
    after = [CHANGES[change](program, name) for program in before]
    assert [collectives(p) for p in after] == [collectives(p) for p in before]
    assert collectives(before[0])
    assert all(read_claim(node).origin for p in after for node in edit.calls(p.graph) if edit.is_tensor(node))
    report = judged(after, name)
    assert report.ok, str(report)


@pytest.mark.slow
def test_a_decomposed_program_without_a_collective_is_not_equal() -> None:
    """Negative control."""
    first, second = (program.run_decompositions() for program in ranks("odd", 2))
    name = next(node.name for node in first.graph.nodes if edit.is_collective(node))
    assert judged([first, second], "odd").ok
    assert not judged([without_collective(first, name), without_collective(second, name)], "odd").ok


def waits(program: ExportedProgram) -> Counter[str]:
    """The calls for which the host must wait for the device: values that it reads, sizes that data decides, copies to
    another device, assertions of numbers. `wait_tensor` is none: it makes the device's stream wait for the collective.
    Nor is `_assert_async`: on a GPU a kernel compares, and the host goes on.
    """
    found: Counter[str] = Counter()
    for node in edit.calls(program.graph):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        values = [v.meta["val"] for v in edit.operands(node)]
        by_mask = node.target is aten.index.Tensor and any(v.dtype in (torch.bool, torch.uint8) for v in values[1:])
        reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(node.target.tags)
        moves = any(v.device != out.device for v in values for out in edit.outputs(node))
        asserts = "assert" in node.target.name() and "async" not in node.target.name()
        if by_mask or reads or moves or asserts:
            found[str(node.target)] += 1
    return found


@pytest.mark.sample(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_for_nothing_new(name: str, world: int) -> None:
    for program in ranks(name, world):
        assert not waits(program) - waits(functional(name))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + x.sum().item(),
        lambda x: torch.nonzero(x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x[x > 0],
        lambda x: torch.unique(x),
        lambda x: x.to("meta"),
        lambda x: torch._check(x.sum().item() > 0),
    ],
    ids=["item", "nonzero", "masked_select", "boolean index", "unique", "copy", "assertion"],
)
def test_waiting_is_recognised(forward: Callable[[torch.Tensor], object]) -> None:
    """Negative control: each of the ways to wait."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return forward(x), x

    assert waits(torch.export.export(Model(), (torch.ones(3),)))
