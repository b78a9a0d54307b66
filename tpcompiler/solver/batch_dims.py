"""The price of work on all samples, in programs with gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.ir import edit
from tpcompiler.ir.program import PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import Dim, Rule
from tpcompiler.rules.registry import rule_of

Side = Literal["all", "outer", "inner"]  # of a dim of several parts, those that are samples
PARTS: Mapping[Side, slice] = {"all": slice(None), "outer": slice(1), "inner": slice(-1, None)}
ALL_SAMPLES = 1e4  # seconds: of all work on all samples; more than all else, and yet a price where there is no choice


class Part(NamedTuple):
    """A value's share in all values of samples that are read and computed, and its dims of samples."""

    share: float = 0.0
    dims: tuple[int, ...] = ()


class Samples(NamedTuple):
    """Axes that cut samples, and the values of samples.

    To have all samples on a rank is never worth what it saves: the samples of the example are few, and those of a
    training run are many. Gradients of parameters have none.
    """

    axes: frozenset[str]
    parts: dict[fx.Node, Part]

    def parts_of(self, node: fx.Node, operands: Sequence[fx.Node]) -> tuple[Part, ...]:
        """Return the parts of a call's operands and results."""
        made = dict.fromkeys(range(len(edit.outputs(node))), Part())
        made |= {at: self.parts.get(value, Part()) for value, at in edit.results(node)}
        return (*(self.parts.get(operand, Part()) for operand in operands), *made.values())

    def dims_of(self, value: fx.Node, axis: str) -> tuple[int, ...]:
        """Return the dims of samples that an axis may cut."""
        return self.parts[value].dims if axis in self.axes and value in self.parts else ()

    def seconds(self, parts: Sequence[Part], shardings: Sequence[Sharding]) -> float:
        """Return the price of a call's operands and results that the axes do not cut along samples."""
        seconds = 0.0
        for part, sharding in zip(parts, shardings, strict=True):
            if part.dims:
                cut = {axis for dim in part.dims for axis in sharding.dims[dim].axes}
                seconds += ALL_SAMPLES * part.share * len(self.axes - cut)
        return seconds


NO_SAMPLES = Samples(frozenset(), {})


def find_sample_axes(programs: Sequence[PlannedProgram]) -> frozenset[str]:
    """Return the axes that cut inputs of programs with gradients, except one that cuts layers too."""
    found = set[str]()
    for program in programs:
        if next(program.gradients(), None) is not None:
            planned = {axis for own in program.planned.values() for axis in own.sharding.axes}
            layers = {program.mesh.model_axis} if program.is_searched else planned & {program.mesh.model_axis}
            inputs = (program.constraints[node.name].sharding.axes for node in program.user_inputs())
            found |= {axis for axes in inputs for axis in axes} - layers
    return frozenset(found)


def find_samples(programs: Sequence[PlannedProgram]) -> Samples:
    """Return the axes of samples, and the values with dims of them."""
    axes, dims = find_sample_axes(programs), dict[fx.Node, tuple[int, ...]]()
    for program in programs if axes else ():
        dims |= _find_dims(program, axes)
    sizes = {value: float(sym_hint(edit.fake(value).numel())) for value in dims}
    total = sum(size * (1 + len(value.users)) for value, size in sizes.items())
    return Samples(axes, {value: Part(sizes[value] / total, own) for value, own in dims.items()})


def _find_dims(program: PlannedProgram, axes: frozenset[str]) -> dict[fx.Node, tuple[int, ...]]:
    """Return the dims that come of a dim of an input that the axes cut."""
    dims = dict[fx.Node, dict[int, Side]]()
    for node in program.user_inputs():
        cuts = program.constraints[node.name].sharding.dims
        dims[node] = {at: "all" for at, cut in enumerate(cuts) if not axes.isdisjoint(cut.axes)}
    for node in edit.calls(program.graph):
        rule = rule_of(node)
        if node.target is pin:
            dims[node] = dims.get(edit.operands(node)[0], {})
        if rule is None:
            continue
        samples = dict[str, Side]()
        for operand, term in zip(edit.operands(node), rule.pattern.inputs, strict=True):
            for at, side in dims.get(operand, {}).items():
                samples |= _taken_apart(_long(rule, term[at]), side)
        for made, at in edit.results(node):
            parts = ((place, _long(rule, dim)) for place, dim in enumerate(rule.pattern.outputs[at]))
            dims[made] = {place: _side(dim, samples) for place, dim in parts if not samples.keys().isdisjoint(dim)}
    return {value: tuple(sorted(own)) for value, own in dims.items() if own}


def _long(rule: Rule, dim: Dim) -> list[str]:
    return [factor for factor in dim if not is_one(rule.extent[factor])]


def _taken_apart(parts: Sequence[str], side: Side) -> dict[str, Side]:
    """Return the parts of a dim that are samples."""
    return dict.fromkeys(parts, side) if len(parts) == 1 else dict.fromkeys(parts[PARTS[side]], "all")


def _side(parts: Sequence[str], samples: Mapping[str, Side]) -> Side:
    """Return which parts of a dim are samples; all, where it cannot be said."""
    first, last = parts[0], parts[-1]
    if first == last:
        return samples[first]
    if (first in samples) == (last in samples):
        return "all"
    return "outer" if first in samples else "inner"
