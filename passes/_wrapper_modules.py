"""Modules that wrap a layer, such as a layer with a LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.rules.registry import rule_of

Leaves = Mapping[str, Mapping[str, fx.Node]]  # by layer


def find_wrapped(
    calls: Mapping[str, list[fx.Node]], names: Iterable[str], owned: Leaves, static: Set[fx.Node]
) -> dict[str, str]:
    """Return module -> the layer inside that it wraps.

    Such a layer takes its module's input, and the module returns the layer's result, possibly plus other terms: `up`
    wraps `up.linear` if it returns `self.linear(x) + self.b(self.a(x))`. A module that uses a weight itself in this
    way, or has two such layers, wraps none.

    Args:
        calls: those inside each module.
        static: nodes that are computed from leaves alone.
    """
    around = {layer[:at] for layer, leaves in owned.items() if leaves for at, c in enumerate(layer) if c == "."}
    # Styles are of the forward, whose values the backward uses too.
    forward = {name: [node for node in nodes if not is_backward(node)] for name, nodes in calls.items()}
    layers_of_module = {
        name: _layers_of(name, forward, owned, static) for name in names if name in around and forward.get(name)
    }
    return {name: layers[0] for name, layers in layers_of_module.items() if len(layers) == 1}


def _layers_of(name: str, calls: Mapping[str, list[fx.Node]], owned: Leaves, static: Set[fx.Node]) -> list[str]:
    """Return the outermost layers inside a module whose result it returns, alone or as a term of a sum."""
    inside, entering = set(calls[name]), _entering(calls[name], static)
    leaving = (node for node in calls[name] if any(each not in inside and not is_backward(each) for each in node.users))
    terms = [node for node in leaving if node not in static]
    if len(terms) != 1:
        return []
    layers: dict[str, None] = {}
    own = {leaf for fqn, leaf in owned.get(name, {}).items() if fqn.rpartition(".")[0] == name}
    for term in terms:
        operands = edit.operands(term)
        if not entering.isdisjoint(operands) and any(_is_made_of(operand, own, static) for operand in operands):
            return []
        for path in edit.module_paths(term):
            if path.startswith(f"{name}.") and owned.get(path) and _entering(calls[path], static) == entering:
                layers[path] = None
        rule = rule_of(term)
        if term.target is aten.add.Tensor or (rule is not None and rule.relayout):
            terms += (operand for operand in operands if operand in inside and operand not in terms)
    return [path for path in layers if not any(path.startswith(f"{other}.") for other in layers)]


def _entering(calls: Iterable[fx.Node], static: Set[fx.Node]) -> set[fx.Node]:
    """Return the activations that a module's ops take from outside."""
    calls = set(calls)
    return {value for node in calls for value in edit.operands(node)} - calls - static


def _is_made_of(value: fx.Node, leaves: Set[fx.Node], static: Set[fx.Node]) -> bool:
    made_of = value.all_input_nodes if value in static else ()
    return value in leaves or any(_is_made_of(each, leaves, static) for each in made_of)
