"""Whether ranks that hold equal shapes run one graph: nothing but weights and a row of numbers may tell them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler.cost.collective import KIND_OF
from tpcompiler.cost.path import FREE, steps_along
from tpcompiler.ir import edit
from tpcompiler.ir.claims import read_claim
from tpcompiler.ir.local import key
from tpcompiler.ir.text import op_name
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.judge.sound.whole_text import body_text


def check_alike(ranks: Sequence[Folded]) -> None:
    """Ranks whose shapes are equal, by what all ranks claim, have equal graphs: every node, argument, value and claim.

    So what one rank alone does otherwise is found, whatever it is. Ranks with shares of another size are compared by
    what their graphs fold to.

    Raises:
        Unsound: naming the first node that differs, or a change that claims a path which no steps take.
    """
    _check_paths(ranks[0])
    first: dict[Any, int] = {}
    texts: dict[int, list[tuple[str, ...]]] = {}
    for rank, made in enumerate(ranks):
        other = first.setdefault(key(list(_shapes(ranks[0], rank))), rank)
        if ranks[other].program is made.program:
            continue
        one, two = (texts.setdefault(id(each), list(_lines(each))) for each in (ranks[other], made))
        if one != two:
            apart = next((pair for pair in zip(one, two, strict=False) if pair[0] != pair[1]), None)
            parts = zip(*apart, strict=True) if apart else [(f"{len(one)} nodes", f"{len(two)} nodes")]
            a, b = next(pair for pair in parts if pair[0] != pair[1])
            node = f" at '{apart[0][0]}'" if apart and apart[0][0] == apart[1][0] else ""
            raise Unsound(None, f"ranks {other} and {rank} hold equal shapes and run other graphs{node}: {a}, and {b}")


def _check_paths(made: Folded) -> None:
    """Whatever machine a path was chosen for, one step leads to the next, and its collectives are called."""
    last = {region.nodes[-1]: region for region in made.regions.values()}
    for node, states in made.paths.items():
        value, called = edit.outputs(made.whole[node])[0], []
        for each in filter(edit.is_collective, last[node].nodes):
            axes = [axis for axis in made.mesh.axes_of(str(each.args[-1])) if made.mesh.degree(axis) > 1]
            called += [(KIND_OF[op_name(each)], tuple(axes))] if axes else []
        steps = steps_along(states, value.shape, value.element_size(), made.mesh)
        if steps is None or called != [(step.kind, step.axes) for step in steps if step.kind not in FREE]:
            way = " -> ".join(state.text(made.mesh) for state in states)
            raise Unsound(node, f"claims to change its operand along {way}, which its collectives do not")


def _shapes(made: Folded, rank: int) -> Iterator[Any]:
    """All local shapes of a rank that not all ranks have, of values and of what they are on the way of a change."""
    here = made.mesh.coordinate(rank)
    for node, shardings in made.shardings.items():
        for whole, sharding in zip(edit.outputs(made.whole[node]), shardings, strict=True):
            yield from (
                state.local_shape(whole.shape, made.mesh, here)
                for state in made.paths.get(node, (sharding,))
                if not state.is_even(whole.shape, made.mesh)
            )


def _lines(made: Folded) -> Iterator[tuple[str, ...]]:
    """(name, call, value, claim) of every node, and what the signature says."""
    program = made.program
    for node in program.graph.nodes:
        call = body_text(node) if node.op == "get_attr" else f"{node.target}({node.args}, {node.kwargs})"
        yield node.name, call, _value(node), str(dict(read_claim(node)) if node.op == "call_function" else "")
    specs = (*program.graph_signature.input_specs, *program.graph_signature.output_specs)
    yield from (("", str(said), "", "") for said in (*specs, program.range_constraints))


def _value(node: fx.Node) -> str:
    values = edit.outputs(node)
    if not values:
        return "" if node.op in ("get_attr", "output") else str(node.meta.get("val"))
    return ", ".join(map(_layout, values))


def _layout(value: torch.Tensor) -> str:
    memory = f" {list(value.stride())} from {value.storage_offset()}" if value.layout is torch.strided else ""
    return f"{value.dtype}{list(value.shape)}{memory}"
