"""Run a piece of the folded program and the corresponding piece of the model on the same random values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import FakeTensor, OpOverload, aten, tree_map
from tpcompiler.errors import reason
from tpcompiler.ir import edit
from tpcompiler.ir.program import BOTH, CanonicalProgram
from tpcompiler.judge.compare.judge import is_rounded, largest_magnitude, widened
from tpcompiler.judge.sound.changes import DRAWS
from tpcompiler.judge.sound.drawn import DrawnSizes
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.rules.experts import BY_BLOCK
from tpcompiler.rules.index_range import SAME_VALUES, door_ranges

MOST = 2**26  # elements of all values of both pieces
DYNAMIC = 64  # a typical number for a dynamic size
# Between sums in another order, in float32 or (so many epsilons) in half precision; a wrong value differs by about the
# size of the values.
TOLERANCE, EPSILONS = 1e-3, 8
Values = dict[fx.Node, Any]


class Pieces:
    """A comparison of values of two graphs; equal numbers in `ours` and `theirs` mark values already known to be equal.

    `believed`: the pieces that were too large to run, or that failed at all sizes and values that were tried.
    """

    def __init__(
        self, made: Folded, model: CanonicalProgram, ours: Mapping[fx.Node, int], theirs: Mapping[fx.Node, int]
    ) -> None:
        self.made, self.model, self.ours, self.theirs = made, model, ours, theirs
        self.believed = 0
        chosen = (node for node in model.graph.nodes if BOTH in node.meta)
        self.predicates = {theirs[node.args[0]] for node in chosen}
        self.indices = door_ranges(model, {})
        self.rising = rising_inputs(model.graph)
        self.counting = counting(model.graph)
        self.literals = {
            node.name: model.state(fqn) for node, fqn in model.leaves() if not isinstance(model.state(fqn), FakeTensor)
        }

    def compare(self, ours: fx.Node, theirs: fx.Node) -> str:
        """Describe how two values differ; empty if they are equal, or cannot be run here."""
        shared = set(self.ours.values()) & set(self.theirs.values())
        shared -= {self.ours.get(ours), self.theirs[theirs]}
        difference = ""
        predicates = self.predicates & shared  # each is tried with both values
        for stops in (self._meeting(ours, theirs, shared) | predicates, predicates):
            one, two = _slice(ours, self.ours, stops), _slice(theirs, self.theirs, stops)
            if sum(map(_elements, (*one, *two))) > MOST:
                self.believed += not difference
                return difference
            own_difference = self._run(one, two, stops)
            if own_difference is None:
                self.believed += not difference
                return difference
            if not own_difference:
                return ""
            difference = difference or own_difference
        return difference

    def _meeting(self, ours: fx.Node, theirs: fx.Node, shared: set[int]) -> set[int]:
        """Return the numbers of the nearest common values that both pieces are computed from."""
        stops = {number for node, number in self.theirs.items() if number in shared and self._is_real(node)}
        while True:
            ends = [
                {known[node] for node in _slice(end, known, stops) if known[node] in stops}
                for end, known in ((ours, self.ours), (theirs, self.theirs))
            ]
            if ends[0] == ends[1]:
                return ends[0]
            stops -= ends[0] ^ ends[1]

    def _is_real(self, node: fx.Node) -> bool:
        """Return True if any value may replace it: integers may be sorted places, and floats may count them."""
        value = node.meta.get("val")
        real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        return real and node not in self.counting

    def _run(self, ours: list[fx.Node], theirs: list[fx.Node], stops: set[int]) -> str | None:
        """Describe the difference, empty for equal pieces; None if they fail.

        Integers are small, or any valid index.
        """
        known = {self.theirs[node] for node in theirs} | {self.ours.get(node) for node in ours}
        predicates = [number for number in sorted(self.predicates & stops) if number in known]
        differences = [
            self._difference(ours, theirs, stops, far, dict(zip(predicates, setting, strict=True)))
            for setting in _settings(len(predicates))
            for far in (False, True, True)
        ]
        return None if all(each is None for each in differences) else next(filter(None, differences), "")

    def _difference(
        self, ours: list[fx.Node], theirs: list[fx.Node], stops: set[int], far: bool, predicates: Mapping[int, bool]
    ) -> str | None:
        for left in reversed(range(DRAWS)):
            self.made.sizes = DrawnSizes(fits=left == 0, scaled=0 < left <= DRAWS // 2)
            try:
                given = self._given(ours, theirs, stops, far)
                given |= {number: torch.full_like(given[number], value) for number, value in predicates.items()}
                one = self._value(ours, self.ours, given)
            except Exception:  # sizes do not fit, or indices are invalid
                continue
            try:
                two = self._value(theirs, self.theirs, given)
            except Exception as error:  # the model fails on values that the ranks accept
                return f"it does not run on the same values ({reason(error)})"
            return _difference(one, two)
        return None

    def _given(self, ours: list[fx.Node], theirs: list[fx.Node], stops: set[int], far: bool) -> dict[int, Any]:
        """Return a random value for every stop and every placeholder."""
        values: dict[int, Any] = {}
        whole = {number: node for node, number in reversed(list(self.ours.items()))}
        for node, number in (*((n, self.ours[n]) for n in ours), *((n, self.theirs[n]) for n in theirs)):
            if number not in values and (number in stops or node.op == "placeholder"):
                values[number] = self._random(whole[number], far)
        return values

    def _random(self, node: fx.Node, far: bool) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return self.made.plain(value)
        if node.name in self.literals and node.op == "placeholder":
            return self.literals[node.name]
        shape, strides = ([self.made.plain(size) for size in each] for each in (value.shape, value.stride()))
        if value.is_floating_point() or value.is_complex():
            result = torch.randn(shape, dtype=torch.float32).add_(0.5)
        elif value.dtype == torch.bool:
            result = torch.rand(shape) < 0.5
        elif node.name in self.rising:
            rising, counted = self.rising[node.name]
            size = self.made.plain(edit.shape(rising.of)[rising.dim])
            result = rising.draw(value, shape, size)
            result = result.diff(prepend=result.new_zeros(1)) if counted else result
        elif far:  # ids, or places
            least, most = self.indices.get(node.name, (0, 7))
            result = torch.randint(max(0, least), most + 1, shape)
        else:
            result = torch.arange(math.prod(shape)).view(shape) % 3
        result = result.to(value.dtype)
        if any(stride == 0 for size, stride in zip(shape, strides, strict=True) if size > 1):
            return result
        return torch.empty_strided(shape, strides, dtype=value.dtype).copy_(result)

    def _value(self, nodes: list[fx.Node], known: Mapping[fx.Node, int], given: Mapping[int, Any]) -> Any:
        env: Values = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for node in nodes:
                if known.get(node) in given:
                    env[node] = given[known[node]]
                elif node.op == "get_attr":
                    env[node] = edit.fake(node)
                else:
                    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: env[used])
                    args, kwargs = tree_map(_here, (args, kwargs))
                    env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return env[nodes[-1]]


def _settings(count: int) -> Iterable[tuple[bool, ...]]:
    """Return values for predicates: all combinations of a few; for many, each one alone and all except it."""
    if count <= 4:
        return itertools.product((False, True), repeat=count)
    return [tuple((at == one) == value for at in range(count)) for one in range(count) for value in (False, True)]


def _here(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _slice(end: fx.Node, known: Mapping[fx.Node, int], stops: set[int]) -> list[fx.Node]:
    """Return the nodes that a value is computed from, in order, back to values with these numbers."""
    needed, waiting = {end}, [end]
    while waiting:
        node = waiting.pop()
        if node is end or known[node] not in stops:
            new = [used for used in node.all_input_nodes if used not in needed]
            needed.update(new)
            waiting += new
    return [node for node in end.graph.nodes if node in needed]


def _elements(node: fx.Node) -> int:
    return sum(math.prod(size if isinstance(size, int) else DYNAMIC for size in v.shape) for v in edit.outputs(node))


def _difference(ours: Any, theirs: Any) -> str:
    """Describe a difference; empty for values that are equal up to rounding."""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        pairs = (ours, theirs) if isinstance(ours, (list, tuple)) else ([ours], [theirs])
        if isinstance(ours, (list, tuple)) and len(ours) == len(theirs):
            return next(filter(None, (_difference(*pair) for pair in zip(*pairs, strict=True))), "")
        return "" if ours == theirs else f"they are {ours} and {theirs}"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"they are {ours.dtype} {list(ours.shape)} and {theirs.dtype} {list(theirs.shape)}"
    if _is_close(ours, theirs):
        return ""
    if not is_rounded(ours):
        return "they differ"
    apart, scale = largest_magnitude([widened(ours) - widened(theirs)]), largest_magnitude([theirs])
    return f"on random values they differ by {apart:.2g} of {scale:.2g}"


def _is_close(value: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return True if a value is the whole one, up to the rounding of sums in another order."""
    if not is_rounded(whole):
        return torch.equal(value, whole)
    limit = largest_magnitude([whole]) * max(TOLERANCE, EPSILONS * torch.finfo(whole.dtype).eps)
    return torch.allclose(widened(value), widened(whole), rtol=0, atol=limit, equal_nan=True)


BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@dataclass(frozen=True)
class Rising:
    """A call's operand with rising positions in a dim of another operand.

    Kernels do not check them: other values make torch read any memory, or leave rows of the result uninitialised.

    Attributes:
        fixed: the known position: the `first` is 0, or the `last` is the size of the dim.
    """

    places: fx.Node
    of: fx.Node
    dim: int
    fixed: str = ""

    def draw(self, value: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
        """Return random positions in a dim of this size; runs between them may be empty."""
        places = torch.randint(size + 1, tuple(shape)).sort().values
        if self.fixed == "first":
            places[..., :1] = 0
        elif self.fixed == "last":
            places[..., -1:] = size
        return places.to(value.dtype)


def find_rising(call: fx.Node) -> Rising | None:
    """Return the operand of a call that must rise, if there is one."""
    target = call.target
    if not isinstance(target, OpOverload):
        return None
    if target in BAGS:
        bound = edit.bound(call)
        return Rising(bound["offsets"], bound["indices"], 0, "first")
    if target is BY_BLOCK:
        bound = edit.bound(call)
        return Rising(bound["ends"], bound["x"], 1)
    if str(target) in GROUPED and len(operands := edit.operands(call)) >= 3:
        left, right, ends = operands[:3]
        dims = edit.ndim(left), edit.ndim(right)
        of, dim = {(2, 3): (left, 0), (2, 2): (left, 1), (3, 2): (right, 1)}[dims]
        return Rising(ends, of, dim, "last")
    return None


def rising_inputs(graph: fx.Graph) -> Mapping[str, tuple[Rising, bool]]:
    """Return the inputs with such positions by name, with True for inputs whose running sum has them."""
    inputs = {}
    for call in edit.calls(graph):
        if (rising := find_rising(call)) is not None:
            node, counted = rising.places, False
            while node.op == "call_function" and (node.target in SAME_VALUES or node.target is aten.cumsum.default):
                counted |= node.target is aten.cumsum.default
                node = edit.operands(node)[0]
            if node.op == "placeholder":
                inputs[node.name] = rising, counted
    return inputs


def counting(graph: fx.Graph) -> set[fx.Node]:
    """Return the floats that are computed from integers alone, such as counts of each integer.

    No random float may replace one, because other ops may use the same integers.
    """
    counts: set[fx.Node] = set()
    for node in edit.calls(graph):
        used = [(each, value.dtype) for each in node.all_input_nodes for value in edit.outputs(each)]
        integers = [is_integer(dtype) or each in counts for each, dtype in used]
        if any(integers) and all(it or dtype == torch.bool for it, (_, dtype) in zip(integers, used, strict=True)):
            counts.update([node] if any(not is_integer(value.dtype) for value in edit.outputs(node)) else ())
    return counts


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
