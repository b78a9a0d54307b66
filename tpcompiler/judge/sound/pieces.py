"""A piece of the folded program and the piece of the model that it stands for, both run on the same random values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import FakeTensor, tree_map
from tpcompiler.errors import reason
from tpcompiler.ir import edit
from tpcompiler.ir.program import BOTH, CanonicalProgram
from tpcompiler.judge.sound.drawn import Sizes
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.regions import DRAWS, EPSILONS, TOLERANCE
from tpcompiler.judge.sound.rising import counting, rising_inputs
from tpcompiler.judge.sound.sizes import plain
from tpcompiler.rules.index_range import door_ranges

MOST = 2**26  # elements of all values of both pieces
DYNAMIC = 64  # about what is drawn for a dynamic size
Values = dict[fx.Node, Any]


class Pieces:
    """Compare values of two graphs, given the values that were found equal: by number in `ours` and `theirs`.

    `believed`: the pieces that were too large to be run, or that do not run at any sizes or values that were tried.
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
        """How two values differ; nothing where they are equal, or cannot be run here."""
        shared = set(self.ours.values()) & set(self.theirs.values())
        shared -= {self.ours.get(ours), self.theirs[theirs]}
        difference = ""
        predicates = self.predicates & shared  # each is tried with both values
        for stops in (self._meeting(ours, theirs, shared) | predicates, predicates):
            one, two = _slice(ours, self.ours, stops), _slice(theirs, self.theirs, stops)
            if sum(map(_elements, (*one, *two))) > MOST:
                self.believed += not difference
                return difference
            found = self._run(one, two, stops)
            if found is None:
                self.believed += not difference
                return difference
            if not found:
                return ""
            difference = difference or found
        return difference

    def _meeting(self, ours: fx.Node, theirs: fx.Node, shared: set[int]) -> set[int]:
        """The nearest values, by number, from which both pieces are computed; and not one of them from another."""
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
        """Whether any value may stand for it: integers may be places, and in order, and floats may count them."""
        value = node.meta.get("val")
        real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        return real and node not in self.counting

    def _run(self, ours: list[fx.Node], theirs: list[fx.Node], stops: set[int]) -> str | None:
        """The difference, if any; None where they do not run. Integers are small, or whatever an index may be."""
        known = {self.theirs[node] for node in theirs} | {self.ours.get(node) for node in ours}
        predicates = [number for number in sorted(self.predicates & stops) if number in known]
        found = [
            self._difference(ours, theirs, stops, far, dict(zip(predicates, setting, strict=True)))
            for setting in _settings(len(predicates))
            for far in (False, True, True)
        ]
        return None if all(each is None for each in found) else next(filter(None, found), "")

    def _difference(
        self, ours: list[fx.Node], theirs: list[fx.Node], stops: set[int], far: bool, predicates: Mapping[int, bool]
    ) -> str | None:
        for left in reversed(range(DRAWS)):
            self.made.sizes = Sizes(fits=left == 0)
            try:
                given = self._given(ours, theirs, stops, far)
                given |= {number: torch.full_like(given[number], value) for number, value in predicates.items()}
                one = self._value(ours, self.ours, given)
            except Exception:  # sizes that do not fit, indices that are none
                continue
            try:
                two = self._value(theirs, self.theirs, given)
            except Exception as error:  # of what the ranks can compute
                return f"it does not run on the same values ({reason(error)})"
            return _difference(one, two)
        return None

    def _given(self, ours: list[fx.Node], theirs: list[fx.Node], stops: set[int], far: bool) -> dict[int, Any]:
        """A random value for every stop, and for every placeholder."""
        found: dict[int, Any] = {}
        whole = {number: node for node, number in reversed(list(self.ours.items()))}
        for node, number in (*((n, self.ours[n]) for n in ours), *((n, self.theirs[n]) for n in theirs)):
            if number not in found and (number in stops or node.op == "placeholder"):
                found[number] = self._random(whole[number], far)
        return found

    def _random(self, node: fx.Node, far: bool) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return plain(value, self.made)
        if node.name in self.literals and node.op == "placeholder":
            return self.literals[node.name]
        shape, strides = ([plain(size, self.made) for size in each] for each in (value.shape, value.stride()))
        if value.is_floating_point() or value.is_complex():
            made = torch.randn(shape, dtype=torch.float32).add_(0.5)
        elif value.dtype == torch.bool:
            made = torch.rand(shape) < 0.5
        elif node.name in self.rising:
            rising, counted = self.rising[node.name]
            size = plain(rising.of.meta["val"].shape[rising.dim], self.made)
            made = rising.draw(value, shape, size, None)
            made = made.diff(prepend=made.new_zeros(1)) if counted else made
        elif far:  # ids, or places
            least, most = self.indices.get(node.name, (0, 7))
            made = torch.randint(max(0, least), most + 1, shape)
        else:
            made = torch.arange(math.prod(shape)).view(shape) % 3
        made = made.to(value.dtype)
        if any(stride == 0 for size, stride in zip(shape, strides, strict=True) if size > 1):
            return made
        return torch.empty_strided(shape, strides, dtype=value.dtype).copy_(made)

    def _value(self, nodes: list[fx.Node], known: Mapping[fx.Node, int], given: Mapping[int, Any]) -> Any:
        env: Values = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for node in nodes:
                if known.get(node) in given:
                    env[node] = given[known[node]]
                elif node.op == "get_attr":
                    env[node] = node.meta["val"]
                else:
                    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: env[used])
                    args, kwargs = tree_map(_here, (args, kwargs))
                    env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return env[nodes[-1]]


def _settings(count: int) -> Iterable[tuple[bool, ...]]:
    """Values for predicates: all combinations of a few, and of many each alone, and all but each."""
    if count <= 4:
        return itertools.product((False, True), repeat=count)
    return [tuple((at == one) == value for at in range(count)) for one in range(count) for value in (False, True)]


def _here(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _slice(end: fx.Node, known: Mapping[fx.Node, int], stops: set[int]) -> list[fx.Node]:
    """What a value is computed from, in order, back to values with these numbers."""
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
    """In words; nothing for what is equal but for rounding."""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        pairs = (ours, theirs) if isinstance(ours, (list, tuple)) else ([ours], [theirs])
        if isinstance(ours, (list, tuple)) and len(ours) == len(theirs):
            return next(filter(None, (_difference(*pair) for pair in zip(*pairs, strict=True))), "")
        return "" if ours == theirs else f"they are {ours} and {theirs}"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"they are {ours.dtype} {list(ours.shape)} and {theirs.dtype} {list(theirs.shape)}"
    if not (ours.is_floating_point() or ours.is_complex()):
        return "" if torch.equal(ours, theirs) else "they differ"
    wide = torch.complex128 if ours.is_complex() else torch.float64
    one, two = ours.to(wide), theirs.to(wide)
    finite = two[torch.isfinite(two)].abs()
    scale = float(finite.amax()) if finite.numel() else 1.0
    limit = scale * max(TOLERANCE, EPSILONS * torch.finfo(ours.dtype).eps)
    if torch.allclose(one, two, rtol=0, atol=limit, equal_nan=True):
        return ""
    return f"on random values they differ by {float((one - two).nan_to_num(0, 0, 0).abs().amax()):.2g} of {scale:.2g}"
