"""The single-device program that a rank claims to share, as lines that all ranks must have alike."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument

from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.soundness.folded import Folded, reads_data


def whole_text(made: Folded) -> list[str]:
    """The whole program with its shardings and changes, a line each.

    Numbers stand where they are used: a rank may need one for its own share alone.
    """
    signature = made.program.graph_signature
    lines = [f"input {spec.kind.name} {spec.arg} is {spec.target!r}" for spec in signature.input_specs]
    for spec in signature.output_specs:
        number = f" {spec.arg.value!r}" if isinstance(spec.arg, ConstantArgument) else ""
        lines.append(f"output {spec.kind.name} is {spec.target!r}{number}")
    lines += [f"{symbol} in {sizes}" for symbol, sizes in made.program.range_constraints.items()]
    for node, whole in made.whole.items():
        if _is_number(whole):
            # What nothing is made of, and what is read from data, is the same on all ranks.
            if isinstance(whole.target, OpOverload) and (not whole.target._schema.returns or reads_data(whole)):
                lines.append(_call_text(whole))
            continue
        if whole.op == "placeholder":
            value = whole.meta.get("val")
            known = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            lines.append(f"{whole.name} is {known}")
        shown = ", ".join(sharding.text(made.mesh) for sharding in made.shardings.get(node, ()))
        call = _body_text(node) if node.op == "get_attr" else _call_text(whole)
        lines.append(f"{whole.name}: {shown} = {call}")
    return lines


def cuts_of(made: Folded) -> dict[tuple[str, ...], set[str]]:
    """How each op and change has what it takes cut: an op's result may have one sharding by several others' means.

    A rank with an empty share of a result may take nothing for it.
    """
    found: dict[tuple[str, ...], set[str]] = {}
    for node, whole in made.whole.items():
        result = made.changed.get(node)
        shown = made.shardings[node][0].text(made.mesh) if result else "its result"
        for used in result or (edit.operands(node) if node.op == "call_function" else ()):
            for sharding in made.shardings.get(used, ()):
                found.setdefault((whole.name, shown, made.whole[used].name), set()).add(sharding.text(made.mesh))
    return found


def _is_number(whole: fx.Node) -> bool:
    return whole.op == "call_function" and not edit.outputs(whole)


def _call_text(whole: fx.Node) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _call_text(value) if _is_number(value) else value.name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(shown, value))}]"
        return str(value)

    words = [*map(shown, whole.args), *(f"{name}={shown(value)}" for name, value in whole.kwargs.items())]
    return f"{whole.target}({', '.join(words)})"


def _body_text(node: fx.Node) -> str:
    """A name for what a body of control flow does."""
    named = node.meta["val"].named_modules()
    parts = [f"{name}: {part.graph}" for name, part in named if isinstance(part, fx.GraphModule)]
    return f"body {hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"
