"""Stages: joined at the values that they hand over, they are the program that was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from tpcompiler._torch import aten, tree_flatten
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram, results_of
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
    made = [results_of(program) for _, program in stages]
    named = [_inputs(program) for _, program in stages]
    own = _inputs(whole)
    waiting = [*_pairs_of_outputs(stages, made, whole), *_pairs_of_written(stages, whole)]
    known = set[tuple[fx.Node, int, fx.Node]]()
    while waiting:
        value, stage, node = waiting.pop()
        value, node = _original(value), _original(node)
        if (value, stage, node) in known:
            continue
        known.add((value, stage, node))
        name = named[stage].get(node, "")
        if name in stages[stage][0].receives:
            source = stages[stage][0].receives[name]
            if source >= stage or name not in made[source]:
                raise Unsound(None, f"stage {stage} takes {name!r} from stage {source}, which does not return it")
            waiting.append((value, source, made[source][name]))
        elif node in named[stage] or value in own:
            if own.get(value) != name:
                raise Unsound(
                    None, f"stage {stage} reads {name or node.name!r}, and the whole {own.get(value, value.name)!r}"
                )
        else:
            waiting += ((a, stage, b) for a, b in _operands(value, node, stage))
    return sum(len(record.receives) for record, _ in stages)


def _inputs(program: CanonicalProgram) -> dict[fx.Node, str]:
    return {node: str(spec.target or node.name) for node, spec in program.inputs()}


def _pairs_of_outputs(
    stages: Stages, made: Sequence[Mapping[str, Any]], whole: CanonicalProgram
) -> list[tuple[fx.Node, int, fx.Node]]:
    found = []
    for name, value in results_of(whole).items():
        if not isinstance(value, fx.Node):
            if any(record.constants.get(name, stages) != value for record, _ in stages):
                raise Unsound(None, f"the output {name!r} is {value!r}, and a stage says otherwise")
            continue
        owners = [at for at, (record, _) in enumerate(stages) if name in record.outputs]
        if len(owners) != 1 or name not in made[owners[0]]:
            raise Unsound(None, f"{len(owners)} stages return the output {name!r}")
        found.append((value, owners[0], made[owners[0]][name]))
    return found


def _pairs_of_written(stages: Stages, whole: CanonicalProgram) -> list[tuple[fx.Node, int, fx.Node]]:
    found, written = [], [{name: value for value, name in program.written()} for _, program in stages]
    for value, name in whole.written():
        writers = [at for at, own in enumerate(written) if name in own]
        if len(writers) != 1:
            raise Unsound(None, f"{len(writers)} stages write {name!r}")
        found.append((value, writers[0], written[writers[0]][name]))
    if extra := {name for own in written for name in own} - {name for _, name in whole.written()}:
        raise Unsound(None, f"a stage writes {min(extra)!r}, and the whole does not")
    return found


def _original(node: fx.Node) -> fx.Node:
    """Return the value that a node is a copy of."""
    while node.target in COPIES:
        node = node.all_input_nodes[0]
    return node


def _operands(value: fx.Node, node: fx.Node, stage: int) -> list[tuple[fx.Node, fx.Node]]:
    """Return what two calls of one op take, in pairs."""
    ops = {"view" if each.target in edit.VIEWS else each.target for each in (value, node)}
    ours, theirs = (tree_flatten((each.args, each.kwargs))[0] for each in (value, node))
    if value.target in edit.VIEWS:  # one may write -1 for a size
        ours, theirs = map(_viewed, (value, node))
    if len(ops) > 1 or len(ours) != len(theirs) or not all(map(_are_alike, ours, theirs)):
        raise Unsound(None, f"{node.name!r} of stage {stage} is not {value.name!r} of the whole")
    return [(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, fx.Node)]


def _viewed(node: fx.Node) -> list[Any]:
    """Return what a view takes: a value, and sizes, as numbers where they are known."""
    value, sizes = edit.bound(node).values()
    return [
        value,
        *(made if isinstance(made, int) else size for size, made in zip(sizes, edit.shape(node), strict=True)),
    ]


def _are_alike(ours: Any, theirs: Any) -> bool:
    """Return True for two nodes, or equal constants."""
    if isinstance(ours, fx.Node) or isinstance(theirs, fx.Node):
        return isinstance(ours, fx.Node) and isinstance(theirs, fx.Node)
    return bool(ours == theirs)
