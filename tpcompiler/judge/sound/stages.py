"""Stages: joined at the values that they hand over, they are the program that was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    _check_outputs(stages, whole, numbers)
    _check_written(stages, whole, numbers)
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


def _check_outputs(stages: Stages, whole: CanonicalProgram, numbers: Sequence[Known]) -> None:
    made = [results_of(program) for _, program in stages]
    for name, value in results_of(whole).items():
        if not isinstance(value, fx.Node):
            if any(record.constants.get(name, stages) != value for record, _ in stages):
                raise Unsound(None, f"the output {name!r} is {value!r}, and a stage says otherwise")
            continue
        owners = [at for at, (record, _) in enumerate(stages) if name in record.outputs]
        if len(owners) != 1 or name not in made[owners[0]]:
            raise Unsound(None, f"{len(owners)} stages return the output {name!r}")
        _compare(f"the output {name!r}", value, made[owners[0]][name], owners[0], numbers)


def _check_written(stages: Stages, whole: CanonicalProgram, numbers: Sequence[Known]) -> None:
    written = [{name: value for value, name in program.written()} for _, program in stages]
    for value, name in whole.written():
        writers = [at for at, own in enumerate(written) if name in own]
        if len(writers) != 1:
            raise Unsound(None, f"{len(writers)} stages write {name!r}")
        _compare(f"what is written to {name!r}", value, written[writers[0]][name], writers[0], numbers)
    if extra := {name for own in written for name in own} - {name for _, name in whole.written()}:
        raise Unsound(None, f"a stage writes {min(extra)!r}, and the whole does not")


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
