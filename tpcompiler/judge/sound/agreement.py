"""Check that all ranks have shares of one single-device program, and that ranks with equal shapes run one program."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument

from tpcompiler._torch import OpOverload
from tpcompiler.cost.collective import KIND_OF
from tpcompiler.cost.path import FREE, steps_along
from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.text import dtype_name, op_name
from tpcompiler.judge.sound.folded import Folded, reads_data
from tpcompiler.judge.sound.numbering import body_text
from tpcompiler.judge.sound.unsound import Unsound


def check_agreement(ranks: Sequence[Folded]) -> None:
    """Check that all ranks fold to one program, and shard the operands of each op and change alike.

    Raises:
        Unsound: two ranks fold to programs apart, or shard an operand in two ways.
    """
    first, taken = _lines(ranks[0]), dict[tuple[str, ...], tuple[int, set[str]]]()
    distinct = {id(each): rank for rank, each in reversed(list(enumerate(ranks)))}
    for rank in sorted(distinct.values()):
        for one, two in zip_longest(first, _lines(ranks[rank]), fillvalue="no more"):
            if one != two:
                raise Unsound(None, f"ranks 0 and {rank} have shares of different programs: {one}, and {two}")
        for names, here in _cuts(ranks[rank]).items():
            other, there = taken.setdefault(names, (rank, here))
            if there != here:
                one, two = (" and ".join(sorted(found)) for found in (there, here))
                what = f"'{names[-1]}' for '{names[0]}'"
                raise Unsound(None, f"ranks {other} and {rank} take {what} as {one}, and as {two}")


def _lines(made: Folded) -> list[str]:
    """Return the whole program with its shardings and changes, one line each.

    Numbers appear where they are used: a rank may need one for its own share alone.
    """
    signature = made.program.graph_signature
    lines = [*map(describe_input, signature.input_specs), *map(describe_output, signature.output_specs)]
    lines += [f"{symbol} in {sizes}" for symbol, sizes in made.program.range_constraints.items()]
    for node, whole in made.whole.items():
        if _is_number(whole):
            # Calls without results, reads of data and calls that may raise are the same on all ranks.
            of_all = isinstance(whole.target, OpOverload) and (not whole.target._schema.returns or reads_data(whole))
            if of_all or _may_raise(whole):
                lines.append(call_text(whole))
            continue
        if whole.op == "placeholder":
            lines.append(f"{whole.name} is {describe_value(whole.meta.get('val'))}")
        shown = ", ".join(sharding.text(made.mesh) for sharding in made.shardings.get(node, ()))
        call = body_text(node) if node.op == "get_attr" else call_text(whole)
        lines.append(f"{whole.name}: {shown} = {call}")
    return lines


def describe_value(value: Any) -> str:
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def describe_input(spec: Any) -> str:
    value = f"={spec.arg.value!r}" if isinstance(spec.arg, ConstantArgument) else ""
    kept = " that no state dict has" if spec.persistent is False else ""
    return f"{spec.kind.name.lower()} {spec.arg.name}{value} of {spec.target}{kept}"


def describe_output(spec: Any) -> str:
    value = f" {spec.arg.value!r}" if isinstance(spec.arg, ConstantArgument) else ""
    return f"{spec.kind.name.lower()}{value} of {spec.target}"


def _cuts(made: Folded) -> dict[tuple[str, ...], set[str]]:
    """Return the shardings of the operands of each op and change: several can lead to one sharding of the result.

    A rank with an empty share of a result may use no operand for it. The origin of a pending value matters too: terms
    of two sums for one value do not add up.
    """
    cuts: dict[tuple[str, ...], set[str]] = {}
    makers = {node: name for name, region in made.regions.items() for node in region.outputs if region.call is None}
    for whole, shown, operands in _takers(made):
        again: Counter[str] = Counter()
        for used in operands:
            for sharding in made.shardings.get(used, ()):
                by = f" by {makers.get(used, 'the op')}" if sharding.partial else ""
                name = made.whole[used].name
                key = (whole.name, shown, str(again[name]), name)
                cuts.setdefault(key, set()).add(sharding.text(made.mesh) + by)
                again[name] += 1
    return cuts


def _takers(made: Folded) -> Iterator[tuple[fx.Node, str, Sequence[fx.Node]]]:
    """Yield (value in the whole, its sharding, its operands) for every op, change and body, and for the outputs."""
    names = {region.nodes[-1]: region.name for region in made.regions.values()}
    for node, whole in made.whole.items():
        if node in made.changed:
            yield whole, f"{made.shardings[node][0].text(made.mesh)} in {names[node]}", made.changed[node]
        elif node.op in ("call_function", "output"):
            yield whole, "its result", edit.operands(node)
    for region in made.regions.values():
        if region.call is not None:
            yield region.call, "its result", region.inputs


def _is_number(whole: fx.Node) -> bool:
    return whole.op == "call_function" and not edit.outputs(whole)


def _may_raise(whole: fx.Node) -> bool:
    return whole.target in (operator.floordiv, operator.mod, operator.truediv) and not isinstance(whole.args[1], int)


def call_text(whole: fx.Node) -> str:
    """Return a call with the numbers among its arguments as they are computed."""

    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            return call_text(value) if _is_number(value) else value.name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(shown, value))}]"
        return str(value)

    words = [*map(shown, whole.args), *(f"{name}={shown(value)}" for name, value in whole.kwargs.items())]
    return f"{edit.VIEWS[0] if whole.target in edit.VIEWS else whole.target}({', '.join(words)})"


def check_alike(ranks: Sequence[Folded]) -> None:
    """Check that ranks with equal claimed shapes run one program.

    This finds anything that one rank alone does differently. Ranks with shares of another size are compared by the
    program that their graphs fold to.

    Raises:
        Unsound: two of them have programs apart, or a change claims an impossible path.
    """
    _check_paths(ranks[0])
    first: dict[Any, int] = {}
    for rank, each in enumerate(ranks):
        other = first.setdefault(key(list(_shapes(ranks[0], rank))), rank)
        if ranks[other].program is not each.program:
            raise Unsound(None, f"ranks {other} and {rank} hold equal shapes, and run programs apart")


def _check_paths(program: Folded) -> None:
    """Check that each step of a claimed path leads to the next, and that its collectives are called."""
    last = {region.nodes[-1]: region for region in program.regions.values()}
    for node, states in program.paths.items():
        value, called = edit.outputs(program.whole[node])[0], []
        for each in filter(edit.is_collective, last[node].nodes):
            degrees = dict(program.mesh.parts)  # an axis that the mesh lacks is another finding
            axes = [axis for axis in program.mesh.axes_of(str(each.args[-1])) if degrees.get(axis, 1) > 1]
            called += [(KIND_OF[op_name(each)], tuple(axes))] if axes else []
        steps = steps_along(states, value.shape, value.element_size(), program.mesh)
        if steps is None or called != [(step.kind, step.axes) for step in steps if step.kind not in FREE]:
            way = " -> ".join(state.text(program.mesh) for state in states)
            raise Unsound(node, f"claims to change its operand along {way}, which its collectives do not")


def _shapes(program: Folded, rank: int) -> Iterator[Any]:
    """Yield all local shapes that differ between ranks, of values and of the steps of a change."""
    here = program.mesh.coordinate(rank)
    for node, shardings in program.shardings.items():
        for whole, sharding in zip(edit.outputs(program.whole[node]), shardings, strict=True):
            yield from (
                (
                    state.local_shape(whole.shape, program.mesh, here),
                    [[here[axis] for axis in cut.axes] for cut in state.dims if cut.spans],
                )
                for state in program.paths.get(node, (sharding,))
                if not state.is_even(whole.shape, program.mesh)
            )
