"""Propose a rule for an op from its behaviour on shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tpcompiler._torch import OpOverload
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.judge.rules.check_rule import DEGREES, Inputs, calls_of, is_even, is_idle
from tpcompiler.judge.rules.placements import SoundWay, sound_placements
from tpcompiler.judge.rules.run_on_shards import Mismatch, check, node_of, rule_from
from tpcompiler.rules.notation import RuleText, Shards, parse

TRIED = (2, 3, 5)  # numbers of ranks: most sizes are a multiple of one of these
Place = tuple[int, int]  # (tensor, operands first; one of its dims)


@dataclass(frozen=True)
class DiscoveredRule:
    """A proposal for `register_rule(op, text, **options)`.

    Attributes:
        based_on: the shapes of the operands of each sample. The proposal holds for these; for others it is a guess.
    """

    op: str
    text: str
    shards: Shards
    linear: tuple[tuple[int, ...], ...]
    reduce: str
    sizes: Mapping[str, str]
    based_on: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of `register_rule` other than the text that differ from their defaults."""
        every = {"shards": self.shards, "linear": self.linear, "reduce": self.reduce, "sizes": dict(self.sizes)}
        default = {"shards": "even", "linear": (), "reduce": "sum", "sizes": {}}
        return {name: value for name, value in every.items() if value != default[name]}

    def __str__(self) -> str:
        words = [repr(self.op), repr(self.text), *(f"{name}={value!r}" for name, value in self.options.items())]
        return "\n".join([f"register_rule({', '.join(words)})", *(f"# holds for {shapes}" for shapes in self.based_on)])


@dataclass
class _Sample:
    """The shapes of one sample, and its sound ways for every number of ranks."""

    operands: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    sound: dict[int, list[SoundWay]] = field(default_factory=dict)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(value.shape) for value in (*self.operands, *self.outputs)]

    def verdicts(self, way: SoundWay) -> list[bool]:
        """Return, for every number of ranks that divides the way's cuts, True if the way is sound."""
        whole = SoundWay((*way.inputs, *way.outputs), ())
        every = [*self.operands, *self.outputs]
        return [way in self.sound[degree] for degree in TRIED if is_even(whole, every, degree)]


def discover_rule(op: object, sample_inputs: Iterable[Inputs]) -> DiscoveredRule:
    """Run calls on shards in every way, and express the ways that give the whole result as a rule.

    The samples should be calls of one kind, with sizes that differ from each other and have divisors among 2, 3 and 5.
    The proposal has been checked on them as `check_rule` does. A factor that needs a local body is left whole.

    Args:
        sample_inputs: the arguments of each call as a tuple, or `(args, kwargs)`.

    Raises:
        RuleError: the op does not exist, samples disagree, or no rule text can express the ways.
    """
    samples, nodes = [], []
    for target, args, kwargs in calls_of(op, sample_inputs):
        node = node_of(target, args, kwargs)
        sample = _Sample([edit.fake(operand) for operand in edit.operands(node)], edit.outputs(node))
        for degree in TRIED:
            sample.sound[degree] = sound_placements(target, args, kwargs, degree)
        samples.append(sample)
        nodes.append(node)
    if not samples:
        raise RuleError(f"no sample of {op} was given", help="give the arguments of at least one call")
    assert isinstance(target, OpOverload)
    _check_alike(target, samples)
    lengths = {name: len(value) for name, value in edit.bound(nodes[0]).items() if isinstance(value, (list, tuple))}
    written = _RuleWriter(samples, _agreed(target, samples), lengths).rule()
    for shards in ("any", "nonempty", "even"):
        try:
            for node in nodes:
                rule = rule_from(written, node, shards)
                for degree in DEGREES:
                    check(node, rule, degree)
            break
        except Mismatch as mismatch:
            wrong = mismatch
    else:
        raise RuleError(f"what was found does not make a rule: {wrong.message}", help="write the rule by hand")
    sizes = {name: " ".join(_dim_text(dim) for dim in term) for name, term in written.sizes.items()}
    based_on = tuple(", ".join(str(list(value.shape)) for value in each.operands) for each in samples)
    name = str(target).replace(".", "::", 1)
    return DiscoveredRule(name, written.text, shards, written.linear, written.reduce, sizes, based_on)


def _dim_text(dim: Sequence[str]) -> str:
    return "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


def _check_alike(target: OpOverload, samples: Sequence[_Sample]) -> None:
    first = samples[0].shapes
    for index, other in enumerate(samples):
        if [[size == 1 for size in shape] for shape in other.shapes] != [[size == 1 for size in s] for s in first]:
            raise RuleError(
                f"samples of {target} disagree: sample 0 has the shapes {_listed(first)}, sample {index} "
                f"{_listed(other.shapes)}",
                help="discover a rule for tensors of each order, and each place of a size of 1, by itself",
            )


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _agreed(target: OpOverload, samples: Sequence[_Sample]) -> list[SoundWay]:
    """Return the ways that are sound wherever they divide evenly, and in which no operand might as well be whole."""
    agreed = []
    for way in dict.fromkeys(way for each in samples for ways in each.sound.values() for way in ways):
        verdicts = [each.verdicts(way) for each in samples]
        yes = [i for i, each in enumerate(verdicts) if each and all(each)]
        no = [i for i, each in enumerate(verdicts) if each and not any(each)]
        if yes and no:
            raise RuleError(
                f"samples of {target} disagree: {way} holds for sample {yes[0]} and not for sample {no[0]}",
                help="discover a rule for calls of each kind by itself, and register a function that tells them apart",
            )
        if yes and all(all(each) for each in verdicts):
            agreed.append(way)
    results = {(way.inputs, way.outputs) for way in agreed}
    return [way for way in agreed if not is_idle(way, results) or (way.sizes and not _cuts(way.inputs))]


def _cuts(placements: Sequence[object]) -> list[Place]:
    return [(i, placement.dim) for i, placement in enumerate(placements) if isinstance(placement, Shard)]


class _RuleWriter:
    """A writer of rule texts from sound ways; dims that are cut together become one factor."""

    def __init__(self, samples: Sequence[_Sample], ways: Sequence[SoundWay], lengths: Mapping[str, int]) -> None:
        self.shapes = [each.shapes for each in samples]
        self.inputs = len(samples[0].operands)
        self.lengths = lengths
        self.names = _names()
        self.factor: dict[Place, str] = {}
        self.sizes: dict[str, dict[int, Place]] = {}
        self.reduce = "sum"
        self.ways = ways
        self.addends = frozenset[int]()
        self.summed: dict[int, list[str]] = {}  # by output, the factors that it alone sums over

    def rule(self) -> RuleText:
        reducing = [way for way in self.ways if _cuts(way.inputs) and _pending(way)]
        ops = [op for way in reducing if (op := _pending(way))]
        self.reduce = "sum" if "sum" in ops or not ops else max(ops, key=ops.count)
        reducing = [way for way in reducing if _pending(way) == self.reduce]
        self.addends = frozenset(i for way in reducing for i, p in enumerate(way.inputs) if isinstance(p, Partial))
        for way in sorted(self.ways, key=lambda way: sum(not isinstance(p, Replicate) for p in way.inputs)):
            if not any(isinstance(p, Partial) for p in (*way.inputs, *way.outputs)):
                self._add(way)
        for way in reducing:
            if {i for i, p in enumerate(way.inputs) if isinstance(p, Partial)} == self.addends:
                self._add(way)
        words = [f"{self._term(tensor)}{self._sum(tensor)}" for tensor in range(len(self.shapes[0]))]
        left = ", ".join("+" * (i in self.addends) + words[i] for i in range(self.inputs))
        text = _renamed(f"{left} -> {', '.join(words[self.inputs :])}")
        return RuleText(text, self._counted(text), reduce=self.reduce, linear=self._linear())

    def _add(self, way: SoundWay) -> None:
        """Make one factor of the dims that the way cuts, unless one of them already has a factor."""
        places = [*_cuts(way.inputs), *((self.inputs + i, dim) for i, dim in _cuts(way.outputs))]
        smallest = [min(shapes[t][d] for t, d in places) for shapes in self.shapes]
        single = any(all(s[t][d] == n for s, n in zip(self.shapes, smallest, strict=True)) for t, d in places)
        if any(place in self.factor for place in places) or not single:
            return
        name = next(self.names)
        for tensor, dim in places:
            alone = all(s[tensor][dim] == n for s, n in zip(self.shapes, smallest, strict=True))
            self.factor[tensor, dim] = name if alone else f"({name} {next(self.names)}!)"
        if way.sizes:
            argument, entry = way.sizes
            self.sizes.setdefault(argument, {})[entry] = (self.inputs, _cuts(way.outputs)[0][1])
        if _cuts(way.outputs):
            for output in (i for i, placement in enumerate(way.outputs) if isinstance(placement, Partial)):
                self.summed.setdefault(self.inputs + output, []).append(name)

    def _term(self, tensor: int) -> str:
        shape = self.shapes[0][tensor]
        return " ".join(
            "1" if size == 1 else self.factor.setdefault((tensor, dim), f"{next(self.names)}!")
            for dim, size in enumerate(shape)
        )

    def _sum(self, tensor: int) -> str:
        return f" {{{' '.join(self.summed[tensor])}}}" if tensor in self.summed else ""

    def _counted(self, text: str) -> dict[str, tuple[tuple[str, ...], ...]]:
        output = parse(text).outputs[0]
        return {
            argument: tuple(output[entries[i][1]] if i in entries else () for i in range(self.lengths[argument]))
            for argument, entries in self.sizes.items()
        }

    def _linear(self) -> tuple[tuple[int, ...], ...]:
        groups = []
        for way in self.ways:
            group = {i for i, placement in enumerate(way.inputs) if isinstance(placement, Partial)}
            if group and not _cuts(way.inputs) and _pending(way) == "sum" and self.addends <= group:
                groups.append(tuple(sorted(group - self.addends or group)))
        return tuple(groups)


def _pending(way: SoundWay) -> str:
    """Return the reduction that is pending in all outputs that are not cut; empty if they have none or differ."""
    ops = {p.reduce_op if isinstance(p, Partial) else "" for p in way.outputs if not isinstance(p, Shard)}
    return ops.pop() if len(ops) == 1 else ""


def _renamed(text: str) -> str:
    """Rename the factors in the order of their appearance."""
    order = dict.fromkeys(re.findall(r"[a-z]\w*", text))
    new = dict(zip(order, _names(), strict=False))
    return re.sub(r"[a-z]\w*", lambda found: new[found[0]], text)


def _names() -> Iterator[str]:
    yield from "abcdefghijklmnopqrstuvwxyz"
    yield from (f"d{i}" for i in count())
