"""The single-device program that a rank claims to share, as lines that must be equal on all ranks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument

from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.judge.sound.folded import Folded, reads_data
from tpcompiler.judge.sound.numbering import body_text


def whole_text(made: Folded) -> list[str]:
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
                lines.append(_call_text(whole))
            continue
        if whole.op == "placeholder":
            value = whole.meta.get("val")
            known = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            lines.append(f"{whole.name} is {known}")
        shown = ", ".join(sharding.text(made.mesh) for sharding in made.shardings.get(node, ()))
        call = body_text(node) if node.op == "get_attr" else _call_text(whole)
        lines.append(f"{whole.name}: {shown} = {call}")
    return lines


def describe_input(spec: Any) -> str:
    value = f"={spec.arg.value!r}" if isinstance(spec.arg, ConstantArgument) else ""
    kept = " that no state dict has" if spec.persistent is False else ""
    return f"{spec.kind.name.lower()} {spec.arg.name}{value} of {spec.target}{kept}"


def describe_output(spec: Any) -> str:
    value = f" {spec.arg.value!r}" if isinstance(spec.arg, ConstantArgument) else ""
    return f"{spec.kind.name.lower()}{value} of {spec.target}"


def cuts_of(made: Folded) -> dict[tuple[str, ...], set[str]]:
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


def _call_text(whole: fx.Node) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _call_text(value) if _is_number(value) else value.name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(shown, value))}]"
        return str(value)

    words = [*map(shown, whole.args), *(f"{name}={shown(value)}" for name, value in whole.kwargs.items())]
    return f"{edit.VIEWS[0] if whole.target in edit.VIEWS else whole.target}({', '.join(words)})"
