"""Stages: joined at the values that they hand over, they are the program that was cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram, results_of
from tpcompiler.judge.sound.numbering import Known, Numbering
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.runtime.inputs import fixed_arguments
from tpcompiler.runtime.records import StageRecord

COPIES = (aten.clone.default, aten.alias.default)
Stages = Sequence[tuple[StageRecord, CanonicalProgram]]


def check_stages(stages: Stages, whole: CanonicalProgram) -> int:
    """Check that stages compute what the whole does, each value by the same ops of the same inputs and leaves.

    Returns:
        The number of values that are handed over.

    Raises:
        Unsound: they do not; or a stage takes a value that no earlier stage returns, or two return one output.
    """
    if any(record.fixed != fixed_arguments(whole.source) for record, _ in stages):
        raise Unsound(None, "the arguments that are constants are not those of the whole")
    table = Numbering()
    numbers, returned = [_number_values(whole, table, {})], list[dict[str, int]]()
    for at, (record, program) in enumerate(stages):
        given = {}
        for name, source in record.receives.items():
            if source >= at or name not in returned[source]:
                raise Unsound(None, f"stage {at} takes {name!r} from stage {source}, which does not return it")
            given[name] = returned[source][name]
        known = _number_values(program, table, given)
        results = {name: value for name, value in results_of(program).items() if isinstance(value, fx.Node)}
        returned.append({name: known[value] for name, value in results.items()})
        numbers.append(known)
    wanted, made = _results(whole), [_results(program, record.outputs) for record, program in stages]
    constants = {name: value for name, value in results_of(whole).items() if not isinstance(value, fx.Node)}
    if any(record.constants != constants for record, _ in stages):
        raise Unsound(None, f"the outputs that are no tensors are {constants}, and a stage says otherwise")
    for what in dict.fromkeys((*wanted, *(what for own in made for what in own))):
        owners = [at for at, own in enumerate(made) if what in own]
        if len(owners) != (what in wanted):
            raise Unsound(None, f"{len(owners)} stages return {what}, and {'one' if what in wanted else 'none'} should")
        _compare(what, wanted[what], made[owners[0]][what], owners[0], numbers)
    return sum(len(record.receives) for record, _ in stages)


def _number_values(program: CanonicalProgram, table: Numbering, given: Mapping[str, int]) -> Known:
    """Number a program's values; of a copy as its original, of an input in `given` as there, of a view by its sizes."""
    names, known = {node: str(spec.target or node.name) for node, spec in program.inputs()}, Known()
    for node in program.graph.nodes:
        if node in names:
            name = names[node]
            known[node] = given[name] if name in given else table.number("input", name)
        elif node.target in COPIES:
            known[node] = known[node.all_input_nodes[0]]
        elif node.target in edit.VIEWS:  # one may write -1 for a size, or compute one that is known
            value, sizes = edit.bound(node).values()
            ends = zip(sizes, edit.shape(node), strict=True)
            made = (size if isinstance(size, int) else known.get(own, own) for own, size in ends)
            known[node] = table.number("view", known[value], *made)
        elif node.op != "output":
            table.of(node, known)
    return known


def _results(program: CanonicalProgram, outputs: Collection[str] | None = None) -> dict[str, fx.Node]:
    """Return the values that a program returns (of its outputs, only these) and writes, by a description."""
    own = {name: value for name, value in results_of(program).items() if outputs is None or name in outputs}
    made = {f"the output {name!r}": value for name, value in own.items() if isinstance(value, fx.Node)}
    return made | {f"the new value of {name!r}": value for value, name in program.written()}


def _compare(what: str, value: fx.Node, made: fx.Node, stage: int, numbers: Sequence[Known]) -> None:
    """Check that a stage makes a value of the whole; if not, name the first of its values that the whole lacks."""
    whole, *stages = numbers
    if whole[value] == stages[stage][made]:
        return
    known = set(whole.values())
    for at, own in enumerate(stages):
        for node, number in own.items():
            if number not in known:
                does = "reads" if node.op == "placeholder" else "computes"
                raise Unsound(None, f"stage {at} {does} {node.name!r}, which the whole does not")
    raise Unsound(None, f"{what} is {value.name!r} in the whole, and {made.name!r} of stage {stage} is another value")
