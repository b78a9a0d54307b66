"""Run a piece of the folded program and the corresponding piece of the model on the same random values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from tpcompiler._torch import FakeTensor, OpOverload, aten, symbols_of, tree_map
from tpcompiler.errors import reason
from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.program import BOTH, CanonicalProgram
from tpcompiler.judge.compare.judge import bands, is_rounded, largest_magnitude, widened
from tpcompiler.judge.compare.promote import WIDE, is_narrow, promoted, promoted_dtype
from tpcompiler.judge.sound.agreement import describe_value
from tpcompiler.judge.sound.changes import DRAWS, MANY
from tpcompiler.judge.sound.drawn import LEAST, LONGER, SHORT, SPREAD, DrawnSizes
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.numbering import Known, Numbering
from tpcompiler.rules.experts import BY_BLOCK
from tpcompiler.rules.index_range import SAME_VALUES, door_ranges

MOST = 2**26  # elements of all values of both pieces
TYPICAL, FEW = 64, 8  # numbers for a dynamic size, the second in pieces of many elements
# Between sums in another order, in float32 or (so many epsilons) in half precision, where another activation differs by
# as much. So pieces in half precision are compared in float32 too.
TOLERANCE, EPSILONS = 1e-3, 8
Values = dict[fx.Node, Any]
Piece = list[fx.Node]


class Pieces:
    """A comparison of values of two graphs; equal numbers in `ours` and `theirs` mark values already known to be equal.

    Args:
        whole: number -> one of our values that has it.
        drawn: the place of each op that draws random numbers among those of its graph.
    """

    def __init__(
        self,
        made: Folded,
        model: CanonicalProgram,
        ours: Mapping[fx.Node, int],
        theirs: Mapping[fx.Node, int],
        whole: Mapping[int, fx.Node],
        drawn: Mapping[fx.Node, int],
    ) -> None:
        self.made, self.model, self.ours, self.theirs, self.whole = made, model, ours, theirs, whole
        self.numbering = Numbering(drawn)
        self.differences: dict[tuple[int, ...], str | None] = {}
        chosen = (node for node in model.graph.nodes if BOTH in node.meta)
        self.predicates = {theirs[node.args[0]] for node in chosen}
        self.indices = door_ranges(model, {})
        self.rising = rising_inputs(model.graph)
        self.counting = counting(model.graph)
        self.real = {number for node, number in theirs.items() if self._is_real(node)}
        self.of_inputs = symbols_of(node.meta.get("val") for node in made.graph.find_nodes(op="placeholder"))
        self.literals = {
            node.name: model.state(fqn) for node, fqn in model.leaves() if not isinstance(model.state(fqn), FakeTensor)
        }

    def compare(self, ours: fx.Node, theirs: fx.Node, *, near: bool = False) -> str | None:
        """Describe how two values differ; empty if they are equal, None if they cannot be run here.

        They are run on random values of the nearest values that both are computed from. If they differ there, they are
        run on random inputs too (unless `near`), because no inputs may lead to such values.
        """
        difference: str | None = _static_difference(ours.meta.get("val"), theirs.meta.get("val"))
        if difference:
            return difference
        own = {self.ours.get(ours), self.theirs[theirs]}
        predicates = (self.predicates & self.whole.keys()) - own  # each is tried with both values
        for stops in (self._meeting(ours, theirs, own),) if near else (self._meeting(ours, theirs, own), set()):
            found = None if stops is None else self._run(ours, theirs, stops | predicates)
            if not found:
                return found if found == "" else difference or None
            difference = difference or found
        return difference

    def _meeting(self, ours: fx.Node, theirs: fx.Node, own: set[int | None]) -> set[int] | None:
        """Return the numbers of the nearest common values that both pieces are computed from; None if they are far."""
        passed = set(own)

        def is_stop(number: int) -> bool:
            return number in self.real and number in self.whole and number not in passed

        while True:
            one, two = self._slice(ours, self.ours, is_stop), self._slice(theirs, self.theirs, is_stop)
            if _elements((*one, *two), FEW) > MOST:
                return None
            ends = [
                {known[node] for node in nodes if is_stop(known[node])}
                for nodes, known in ((one, self.ours), (two, self.theirs))
            ]
            if ends[0] == ends[1]:
                return ends[0]
            passed |= ends[0] ^ ends[1]

    def _slice(self, end: fx.Node, known: Mapping[fx.Node, int], is_stop: Callable[[int], bool]) -> Piece:
        """Return the nodes that a value is computed from, in order, back to sizes and to values that are given."""
        needed, waiting = {end}, [end]
        while waiting:
            node = waiting.pop()
            if node is end or not (is_stop(known[node]) or self._size(node, known) is not None):
                new = [used for used in node.all_input_nodes if used not in needed]
                needed.update(new)
                waiting += new
        return sorted(needed)

    def _size(self, node: fx.Node, known: Mapping[fx.Node, int]) -> Any:
        """Return the size that a node reads off a value of the ranks, if sizes of inputs decide it; else None.

        One program may read it off the inputs, the other off any later value, which so is no part of the piece.
        """
        if node.target is not aten.sym_size.int:
            return None
        of, dim = cast(Any, node.args)
        size = edit.shape(self.whole[known[of]])[dim] if known[of] in self.whole else None
        return size if symbols_of([size]) <= self.of_inputs else None

    def _is_real(self, node: fx.Node) -> bool:
        """Return True if any value may replace it: integers may be sorted places, and floats may count them."""
        value = node.meta.get("val")
        real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        return real and node not in self.counting

    def _run(self, ours: fx.Node, theirs: fx.Node, stops: set[int]) -> str | None:
        """Describe the difference, empty for equal pieces; None if they are too large, or fail.

        Pieces of the same ops, as in every layer, are run once. Integers are small, or any valid index.
        """
        one, two = (
            self._slice(end, known, stops.__contains__) for end, known in ((ours, self.ours), (theirs, self.theirs))
        )
        same = self._key(one, two, stops)
        if same not in self.differences:
            known = {self.theirs[node] for node in two} | {self.ours.get(node) for node in one}
            predicates = [number for number in sorted(self.predicates & stops) if number in known]
            found = [
                self._difference(one, two, stops, far, dict(zip(predicates, setting, strict=True)))
                for setting in _settings(len(predicates))
                for far in (False, True, True)
                if _elements((*one, *two), FEW) <= MOST
            ]
            self.differences[same] = None if all(each is None for each in found) else next(filter(None, found), "")
        return self.differences[same]

    def _key(self, ours: Piece, theirs: Piece, stops: set[int]) -> tuple[int, ...]:
        """Return a key that is equal for pieces of the same ops on values of the same layouts."""
        places: dict[int, int] = {}
        ends = []
        for nodes, known in ((ours, self.ours), (theirs, self.theirs)):
            own: Known = {}
            for node in nodes:
                number, size = known[node], self._size(node, known)
                if number in stops:
                    place, whole = places.setdefault(number, len(places)), self.whole[number]
                    drawn = whole.name if whole.name in self.literals else whole.op
                    own[node] = self.numbering.number("given", place, drawn, number in self.predicates, key(whole))
                elif size is not None:
                    own[node] = self.numbering.number("size", str(size))
                else:
                    self.numbering.of(node, own)
            ends.append(own[nodes[-1]])
        return tuple(ends)

    def _difference(
        self, ours: Piece, theirs: Piece, stops: set[int], far: bool, predicates: Mapping[int, bool]
    ) -> str | None:
        is_large = _elements((*ours, *theirs), TYPICAL) > MANY
        for left in reversed(range(DRAWS)):
            fits = left == 0
            least, spread = (LONGER if fits else SHORT) if is_large else (LEAST, SPREAD)
            self.made.sizes = DrawnSizes(fits=fits, scaled=0 < left <= DRAWS // 2, least=least, spread=spread)
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
            return _difference(one, two) or self._difference_in_float32(ours, theirs, given)
        return None

    def _difference_in_float32(self, ours: Piece, theirs: Piece, given: Mapping[int, Any]) -> str:
        """Describe the difference if all of both pieces is in float32; empty if they have no half precision."""
        if not is_narrow((*ours, *theirs)):
            return ""
        wide = {number: promoted(value, WIDE) for number, value in given.items()}
        try:
            one, two = self._value(ours, self.ours, wide, WIDE), self._value(theirs, self.theirs, wide, WIDE)
        except Exception:  # an op has kernels for half precision only
            return ""
        return _difference(one, two)

    def _given(self, ours: Piece, theirs: Piece, stops: set[int], far: bool) -> dict[int, Any]:
        """Return a random value for every stop and every placeholder."""
        values: dict[int, Any] = {}
        for node, number in (*((n, self.ours[n]) for n in ours), *((n, self.theirs[n]) for n in theirs)):
            if number not in values and (number in stops or node.op == "placeholder"):
                values[number] = self._random(self.whole[number], far)
        return values

    def _random(self, node: fx.Node, far: bool) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return self.made.plain(value)
        if node.name in self.literals and node.op == "placeholder":
            return self.literals[node.name]
        shape, strides = ([self.made.plain(size) for size in each] for each in (value.shape, value.stride()))
        if value.is_floating_point() or value.is_complex():
            result = torch.randn(shape, dtype=torch.float32)
            is_weight = far and node.op == "placeholder" and value.ndim > 1  # large results saturate activations
            result = result.div_(math.sqrt(max(1, shape[-1]))) if is_weight else result.add_(0.5)
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

    def _value(
        self, nodes: Piece, known: Mapping[fx.Node, int], given: Mapping[int, Any], dtype: torch.dtype | None = None
    ) -> Any:
        """Run a piece, with a dtype all in that dtype."""
        env: Values = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for node in nodes:
                if known.get(node) in given:
                    env[node] = given[known[node]]
                elif (size := self._size(node, known)) is not None:
                    env[node] = self.made.plain(size)
                elif node.op == "get_attr":
                    env[node] = edit.fake(node)
                else:
                    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: env[used])
                    args, kwargs = tree_map(lambda each: _here(each, dtype), (args, kwargs))
                    env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return env[nodes[-1]]


def _settings(count: int) -> Iterable[tuple[bool, ...]]:
    """Return values for predicates: all combinations of a few; for many, each one alone and all except it."""
    if count <= 4:
        return itertools.product((False, True), repeat=count)
    return [tuple((at == one) == value for at in range(count)) for one in range(count) for value in (False, True)]


def _here(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value if dtype is None else promoted_dtype(value, dtype)


def _elements(nodes: Iterable[fx.Node], dynamic: int) -> int:
    """Return the number of elements of the values of nodes, with this number for each dynamic size."""
    return sum(
        math.prod(size if isinstance(size, int) else dynamic for size in value.shape)
        for node in nodes
        for value in edit.outputs(node)
    )


def _static_difference(ours: Any, theirs: Any) -> str:
    """Describe a difference of two tensors of unlike dtypes or shapes, whatever their dynamic sizes are."""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return ""
    sizes = zip(ours.shape, theirs.shape, strict=False)
    apart = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
    if apart or (ours.dtype, ours.ndim) != (theirs.dtype, theirs.ndim):
        return f"they are {describe_value(ours)} and {describe_value(theirs)}"
    return ""


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
    one, two = widened(value), widened(whole)
    tolerance = max(TOLERANCE, EPSILONS * torch.finfo(whole.dtype).eps)
    for band in bands(two) if two.numel() else ():
        limit = largest_magnitude([two[band]]) * tolerance
        if not torch.allclose(one[band], two[band], rtol=0, atol=limit, equal_nan=True):
            return False
    return True


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
