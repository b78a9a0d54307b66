"""Where in its dim a style's cut lies is read off the ops that use what the layer makes."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.mark_placements import Gathered, mark_placements
from tpcompiler.cost.program import changes
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.notes import shared_leaves
from tpcompiler.ir.program import MarkedProgram, PlannedProgram, Seed, mark_of, pin, tied
from tpcompiler.ir.sharding import WHOLE, DimSharding, Sharding
from tpcompiler.ir.split_axis import on_split_axis
from tpcompiler.rules.infer import Option, Refusal, follow, natural_cut, shardings
from tpcompiler.rules.registry import rule_of

Wish = tuple[fx.Node, Sharding]
MOST_TRIES = 16  # markings from which others are tried: a packed layer takes one, heads that few ranks share up to four


def recut_leaves(program: PlannedProgram) -> PlannedProgram:
    """Cut what a style cuts in the parts, blocks and units in which it is used, so that nothing is gathered for them.

    Before    seeds: qkv.weight: S(0)               16 + 8 + 8 rows, by 2 ranks
              h = linear(x, qkv.weight)
              q, k, v = split(h, [16, 8, 8], -1)
    After     seeds: qkv.weight: S(0, parts 16 8 8)

    A first marking says what is gathered. What the op would take instead is followed back to the leaves: the parts of a
    split (packed weights), whole heads where they are not as many as the ranks divide, or fewer ranks where there are
    fewer heads than ranks. For these an axis becomes two, of which one cuts the heads and the other only what each of
    them is used for. A change that does not spare bytes on the wire is not made. Explicit placements stay as they are.

    Raises:
        PlanError: a packed style, without sizes, of a leaf whose uses show no parts.
    """
    if not any(seed.loose for seed in program.seeds.values()):
        return program
    serial = itertools.count()
    first = _tried(program)
    best, seen, queue = first, {_key(program)}, [(first.cost, next(serial), first)]
    for _ in range(MOST_TRIES):
        if not queue or best.is_settled:
            break
        *_, trial = heapq.heappop(queue)
        best = min(best, trial, key=lambda t: t.cost)
        for other in _others(trial):
            if _key(other) not in seen:
                seen.add(_key(other))
                made = _tried(other, first.sums)
                heapq.heappush(queue, (made.cost, next(serial), made))
    best = min([best, *(trial for *_, trial in queue)], key=lambda t: t.cost)
    chosen = best.program if best.cost < first.cost else program
    _refuse_without_parts(chosen)
    return replace(chosen, notes=(*chosen.notes, *shared_leaves(program, chosen)))


def _refuse_without_parts(program: PlannedProgram) -> None:
    for leaf, fqn in program.leaves():
        seed = program.seeds.get(leaf.name)
        if seed is None or not seed.packed or program.mesh.size(tuple(seed.sharding.axes)) == 1:
            continue
        if not any(cut.parts or any(level.block for level in cut.levels) for cut in seed.sharding.dims):
            raise PlanError(
                f"'{fqn}' is to be cut in parts, but its uses show none",
                help="use the style without 'packed_', or give the sizes of the parts, as in 'packed_colwise:64,16,16'",
                asked_by=seed.asked_by,
            )


@dataclass(frozen=True)
class _Trial:
    """A program with certain cuts, what it gathers, and its cost.

    `sums`: bytes on the wire of one call for the plan's own sums. `cost`: bytes for all changes, then the bytes of the
    leaves on the rank that holds most of them. Fewer ranks would sum at less cost, each with more to do: that is no
    gain, so sums count for as much as those of the first marking at least.
    """

    program: PlannedProgram
    marked: MarkedProgram
    gathered: tuple[Gathered, ...]
    sums: int
    cost: tuple[int, int]

    @property
    def is_settled(self) -> bool:
        """Whether no other cut can be better: nothing is gathered, ranks hold as much, no cut is given up."""
        mesh = self.program.mesh
        return (
            not self.gathered
            and all(mark_of(leaf).settled[0].is_even(leaf.meta["val"].shape, mesh) for leaf, _ in self.marked.leaves())
            and not any(seed.loose and _is_partly_whole(seed.sharding) for seed in self.program.seeds.values())
        )


def _tried(program: PlannedProgram, least: int = 0) -> _Trial:
    gathered: list[Gathered] = []
    marked = mark_placements(program, gathered)
    wire = {True: 0, False: 0}
    for change in changes(marked):
        wire[change.why == "inherent"] += change.wire_bytes
    return _Trial(program, marked, tuple(gathered), wire[True], (wire[False] + max(wire[True], least), _held(marked)))


def _held(marked: MarkedProgram) -> int:
    """Bytes of the leaves on the rank that holds most."""
    held = [0] * marked.mesh.world_size
    for leaf, _ in marked.leaves():
        value = leaf.meta["val"]
        for rank in range(marked.mesh.world_size):
            local = mark_of(leaf).settled[0].local_shape(value.shape, marked.mesh, marked.mesh.coordinate(rank))
            held[rank] += torch.Size(local).numel() * value.element_size()
    return max(held)


def _key(program: PlannedProgram) -> tuple[Any, ...]:
    return program.mesh, tuple(program.seeds.items())


def _others(trial: _Trial) -> Iterator[PlannedProgram]:
    """The program with other cuts: whatever spares one kind of gather, for all of that kind.

    First those that cut all of a leaf, then those that leave parts of it whole, such as the one head of keys.
    """
    program = trial.program
    kinds = (_as_the_op_takes_it, _moved, _shared, _kept)
    for partly, ways in itertools.product((False, True), (kinds, *((kind,) for kind in kinds))):
        wishes: dict[str, Sharding] = {}
        for one, way in itertools.product(trial.gathered, ways):
            found = _pulled(list(way(one, trial)), trial, trial.program.mesh.names if way is _shared else ())
            asked = (_as_asked(wish, program.seeds[name], partly) for name, wish in found.items())
            if way is not _shared and not all(asked):
                continue
            if found and all(wishes.get(name, wish) == wish for name, wish in found.items()):
                wishes.update(found)
        if wishes:
            yield replace(program, seeds=_with(wishes, program))
    yield from _over_two_axes(trial)


def _pulled(wishes: Sequence[Wish], trial: _Trial, shared: Sequence[str] = ()) -> dict[str, Sharding]:
    """The cuts of loose leaves that make all of these values what is wished; none where that cannot be.

    Over the axes `shared` a leaf may become whole.
    """
    found: dict[str, Sharding] = {}
    seeds = trial.program.seeds
    free = {leaf.name for leaf, _ in trial.marked.leaves() if leaf.name not in seeds or seeds[leaf.name].loose}
    made = all(_pull(value, wish, trial.marked, free, found, frozenset(shared)) for value, wish in wishes)
    return {name: wish for name, wish in found.items() if name in seeds} if made else {}


def _as_asked(wish: Sharding, seed: Seed, partly: bool) -> bool:
    """Whether the plan still cuts the leaf, all of it or `partly`: where is open, and by which of the axes of one."""
    whole = _is_partly_whole(wish) and not _is_partly_whole(seed.sharding) and not partly
    return set(wish.cut_axes) <= set(seed.sharding.cut_axes) and not whole


def _is_partly_whole(sharding: Sharding) -> bool:
    """Whether some elements of a leaf are on every rank."""
    return not any(cut.axes and all(part.axes for _, part in cut.parts) for cut in sharding.dims)


def _with(wishes: Mapping[str, Sharding], program: PlannedProgram) -> dict[str, Seed]:
    """The seeds with other cuts; tied leaves stay tied."""
    first_of = tied(program)
    by_first = {first_of[name]: wish for name, wish in wishes.items()}
    return {
        name: replace(seed, sharding=by_first.get(first_of[name], seed.sharding))
        for name, seed in program.seeds.items()
    }


def _as_the_op_takes_it(one: Gathered, trial: _Trial) -> Iterator[Wish]:
    """The operand cut by the same axes on the same dims, where the op's rule lets the cuts lie."""
    rule = rule_of(one.node)
    if rule is None:
        return
    mesh = trial.program.mesh
    have, term = mark_of(edit.operands(one.node)[one.index]).settled[0], rule.pattern.inputs[one.index]
    dims = [natural_cut(rule, dim, cut, mesh) for dim, cut in zip(term, have.dims, strict=True)]
    yield edit.operands(one.node)[one.index], Sharding(tuple(cut or have.dims[d] for d, cut in enumerate(dims)))


def _moved(one: Gathered, trial: _Trial) -> Iterator[Wish]:
    """The operand cut on another dim, which is of the same dim of the leaves: by heads, and not by what packs them."""
    rule, value = rule_of(one.node), edit.operands(one.node)[one.index]
    if rule is None:
        return
    have, term, seeds = mark_of(value).settled[0], rule.pattern.inputs[one.index], trial.program.seeds
    for old, new in itertools.permutations(range(have.ndim), 2):
        axes = have.dims[old].axes
        if not axes or have.dims[new].axes or not rule.pattern.whole.intersection(term[old]):
            continue
        dims = [WHOLE if d == old else cut for d, cut in enumerate(have.dims)]
        dims[new] = DimSharding.by(*axes)
        found = _pulled([(value, Sharding(tuple(dims)))], trial)
        if found and all(_as_asked(wish, seeds[name], False) for name, wish in found.items()):
            yield value, Sharding(tuple(dims))
            return


def _shared(one: Gathered, trial: _Trial) -> Iterator[Wish]:
    """The operand whole while the op runs over its axes all the same, because others are cut.

    Not where these are weights: two column-wise layers in a row are cut both, and what is between them is gathered.
    """
    if one.why != "fallback":
        return
    value = edit.operands(one.node)[one.index]
    have, want = mark_of(value).settled[0], one.want
    lost = {axis for axis in have.axes if have.only(axis) != want.only(axis)}
    if lost and lost <= {axis for cut in one.option.cuts.values() for axis in cut.axes}:
        yield value, Sharding.replicated(want.ndim).beside(want, lost)


def _kept(one: Gathered, trial: _Trial) -> Iterator[Wish]:
    """The other operands as they must be for this one to stay."""
    mesh = trial.program.mesh
    rule, have = rule_of(one.node), mark_of(edit.operands(one.node)[one.index]).settled[0]
    option = follow(rule, rule.pattern.inputs[one.index], have, mesh) if rule is not None else Refusal("")
    both = shardings(rule, option, mesh) if rule is not None and isinstance(option, Option) else Refusal("")
    if not isinstance(both, Refusal):
        yield from zip(edit.operands(one.node), both[0], strict=True)


def _over_two_axes(trial: _Trial) -> Iterator[PlannedProgram]:
    """The program on a mesh of which an axis is two: as many ranks as there are heads, and those that share one."""
    program, seen = trial.program, set()
    for one in trial.gathered:
        rule = rule_of(one.node)
        have = edit.operands(one.node)[one.index]
        for dim, cut in zip(
            rule.pattern.inputs[one.index] if rule else (), mark_of(have).settled[0].dims, strict=False
        ):
            for factor in dim:
                size = rule.extent[factor] if rule else 0
                for axis in cut.axes:
                    degree = program.mesh.degree(axis)
                    heads = math.gcd(size, degree) if isinstance(size, int) else 1
                    if 1 < heads < degree and size < degree * 2 and (axis, heads) not in seen:
                        seen.add((axis, heads))
                        yield on_split_axis(program, axis, heads)


def _pull(
    value: fx.Node,
    wish: Sharding,
    marked: MarkedProgram,
    free: set[str],
    found: dict[str, Sharding],
    shared: frozenset[str],
) -> bool:
    """Whether other cuts of leaves, loose ones and those that no plan names, make the value what is wished: `found`."""
    have = mark_of(value).settled[0]
    if have == wish or have.is_replicated:
        return True  # to cut what is whole is a local slice
    if value.op == "placeholder":
        same_dims = all(bool(cut.axes) >= bool(new.axes) for cut, new in zip(have.dims, wish.dims, strict=True))
        same_dims = same_dims and set(have.cut_axes) <= {*wish.cut_axes, *shared}
        return value.name in free and same_dims and found.setdefault(value.name, wish) == wish
    source, term = _made_by(value)
    rule = rule_of(source) if source is not None else None
    if source is None or rule is None or term is None:
        return False
    option = follow(rule, rule.pattern.outputs[term], wish, marked.mesh)
    if isinstance(option, Refusal):
        # Whole over one of two axes, as a head is for all that use it: to cut the copies is a local slice.
        fewer = {a: Sharding.replicated(wish.ndim).beside(wish, {a}) for a in wish.cut_axes if len(wish.cut_axes) > 1}
        return any(_pull(value, less, marked, free, found, shared | {axis}) for axis, less in fewer.items())
    spoken = {factor for dim in rule.pattern.outputs[term] for factor in dim}
    cuts = dict(option.cuts)
    for operand, given in zip(edit.operands(source), rule.pattern.inputs, strict=True):
        now = follow(rule, given, mark_of(operand).settled[0], marked.mesh)
        if isinstance(now, Option):  # what the wish does not speak of, such as a split's other parts, stays
            cuts.update({factor: cut for factor, cut in now.cuts.items() if factor not in spoken})
    both = shardings(rule, Option(cuts), marked.mesh)
    if isinstance(both, Refusal):
        return False
    return all(
        _pull(operand, want, marked, free, found, shared)
        for operand, want in zip(edit.operands(source), both[0], strict=True)
    )


def _made_by(value: fx.Node) -> tuple[fx.Node | None, int | None]:
    """The call that makes a value, and which of its outputs that is."""
    if value.target is pin or value.op != "call_function":
        return None, None
    if value.target is operator.getitem:
        source, index = value.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index
    return value, 0
