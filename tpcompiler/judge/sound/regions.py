"""Run a region of all ranks, for a change of sharding or for shares of one op, and compare it with its claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import tree_map
from tpcompiler.errors import InternalError, reason
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.compare.judge import is_rounded, largest_magnitude, widened
from tpcompiler.judge.compare.simulate import Waiting, lock_step, run_call
from tpcompiler.judge.sound.bodies import check_body, needed_checks
from tpcompiler.judge.sound.drawn import LONGER, SHORT, DrawnSizes
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.numbering import Numbering
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.rising import find_rising, is_integer
from tpcompiler.judge.sound.shares import cut, join, runs_of
from tpcompiler.judge.sound.sizes import operand_shapes, plain, region_shapes, whole_shape
from tpcompiler.judge.sound.unsound import DoesNotRun, Unsound
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

Rows = Sequence[Sequence[int]]  # of every rank, the numbers that it may read
# For an op's share: between sums in another order, in float32 or (so many epsilons) in half precision; a wrong share
# differs by about the size of the values.
TOLERANCE, EPSILONS = 1e-3, 8
MANY = 2**22  # elements
TRIALS, DRAWS = 2, 8  # number of trials of dynamic sizes, and of draws in each trial


@dataclass
class Done:
    """Keys of the regions that were found right."""

    known: set[Any] = field(default_factory=set)
    numbering: Numbering = field(default_factory=Numbering)


Check = Callable[[Sequence[Folded], Sequence[ProgramRegion], Rows], None]


def check_region(name: str, ranks: Sequence[Folded], rows: Rows, done: Done) -> None:
    """Run one region of all ranks in lock step.

    A change moves elements, so it is run on distinct numbers in float64, and must return the very same whole. The share
    of an op is run on random values, and compared with the op on the whole. `done`: keys of regions that were found
    right.

    Raises:
        Unsound: some rank does not get the claimed result.
    """
    regions = [each.regions[name] for each in ranks]
    texts = {id(each): _described(each, region, done.numbering) for each, region in zip(ranks, regions, strict=True)}
    for rank, region in enumerate(regions):
        _check_numbers(ranks[rank], region, rows[rank])
    read = ([row[each.numbers.read[n]] for n in r.numbers] for each, r, row in zip(ranks, regions, rows, strict=True))
    known = tuple((texts[id(each)], *numbers) for each, numbers in zip(ranks, read, strict=True))
    if known in done.known:
        return
    check = _check_change if regions[0].call is None else _check_body
    sizes = DrawnSizes()
    for _ in range(TRIALS) if ranks[0].program.range_constraints else (0,):
        sizes = _check_at_some_sizes(check, ranks, regions, rows, sizes)
    if regions[0].call is not None:
        for rank, (each, region) in enumerate(zip(ranks, regions, strict=True)):
            check_body(each, region, _rule(region), rank, rows[rank])
    done.known.add(known)


def _check_numbers(made: Folded, region: ProgramRegion, row: Sequence[int]) -> None:
    for node in region.numbers:
        if made.numbers.read[node] >= len(row):
            raise Unsound(node, f"reads number {made.numbers.read[node]} of a rank that has {len(row)}")


def _check_at_some_sizes(
    check: Check, ranks: Sequence[Folded], regions: Sequence[ProgramRegion], rows: Rows, before: DrawnSizes
) -> DrawnSizes:
    """Run regions at random sizes; draw again if they fail to run.

    The export may have found facts about sizes that a file does not record: one is a multiple of 4, or at most another.
    """
    for left in reversed(range(DRAWS)):
        sizes = _draw(ranks, DrawnSizes(before.chosen, fits=left == 0))
        try:
            if left and max(map(math.prod, region_shapes(ranks[0], regions)), default=0) > MANY:
                fits = left <= DRAWS // 2
                sizes = _draw(ranks, DrawnSizes(before.chosen, fits, *(LONGER if fits else SHORT)))
            check(ranks, regions, rows)
        except Unsound as error:
            if left and sizes.chosen and isinstance(error, DoesNotRun):
                continue
            at = f", at {sizes}" if sizes.chosen else ""
            raise Unsound(error.node, f"{error.text}{at}") from error
        break
    return sizes


def _draw(ranks: Sequence[Folded], sizes: DrawnSizes) -> DrawnSizes:
    for each in ranks:
        each.sizes = sizes
    return sizes


def _check_change(ranks: Sequence[Folded], regions: Sequence[ProgramRegion], rows: Rows) -> None:
    first, mesh = ranks[0], ranks[0].mesh
    (operand,), last = _tensors(regions[0]), regions[0].nodes[-1]
    (shape,) = region_shapes(first, regions)
    source, target = first.shardings[operand][0], first.shardings[last][0]
    whole = _numbers(shape, mesh.world_size)
    shares = _shares(whole, source, mesh)
    feeds = [dict.fromkeys(_tensors(region), shares[rank]) for rank, region in enumerate(regions)]
    outs = [out for (out,) in _run(ranks, regions, rows, feeds)]
    _compare(last, whole, outs, target, mesh, exact=True)


def _numbers(shape: Sequence[int], world: int) -> torch.Tensor:
    """Return distinct fractions of both signs in random order, none of them 0, the result of any reduction of zeros.

    They are odd multiples of the number of ranks, halved some times: sums over ranks are exact, and so are shares of a
    sum. Many elements take 2 bytes each, no more than the model's own, with so few digits that the same holds.
    """
    count = torch.Size(shape).numel()
    unit = world / 2 ** (world.bit_length() + 4)
    if count > MANY:
        odd = world // (world & -world)
        most = max(1, 1023 // (world * odd))
        few: torch.Tensor = torch.randint(-most, most, tuple(shape), dtype=torch.int16, generator=_at_random())
        return few.mul_(2).add_(1).to(torch.float16).mul_(unit)
    order = torch.randperm(count, generator=_at_random()).to(torch.float64)
    return order.mul_(2).sub_(count | 1).mul_(unit).view(tuple(shape))


def _at_random() -> torch.Generator:
    """Return a generator whose draws cannot be known in advance."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _shares(whole: torch.Tensor, sharding: Sharding, mesh: Mesh) -> list[torch.Tensor]:
    """Return the shares of all ranks; pending terms are spread so that no other reduction gives the same result."""
    shares = [cut(whole, Sharding(sharding.dims), mesh, rank).clone() for rank in range(mesh.world_size)]
    for axis, op in sharding.partial:
        degree = mesh.degree(axis)
        for rank, share in enumerate(shares):
            here = mesh.coordinate(rank)[axis]
            turn = ((torch.arange(share.numel()) + here) % degree).view(share.shape).to(share.dtype)
            apart = ((turn == 0) * 7.0 - (turn == 1) * 7.0).to(share.dtype) * (degree > 1)
            if op == "sum":
                share += apart - share * (turn != degree - 1)
            elif op == "avg":
                share += apart
            elif op == "product":
                share.copy_(torch.where(turn == 0, share, 1.0))
            else:
                share += turn * (-5.0 if op == "max" else 5.0)
    return shares


def _check_body(ranks: Sequence[Folded], regions: Sequence[ProgramRegion], rows: Rows) -> None:
    first, mesh, region = ranks[0], ranks[0].mesh, regions[0]
    call = region.call
    _rule(region)
    used = {node.name: node for node in call.all_input_nodes if edit.is_tensor(node)}
    cuts: dict[str, set[Sharding]] = {name: set() for name in used}
    for node in _tensors(region):
        cuts.setdefault(first.whole[node].name, set()).add(first.shardings[node][0])
    for each, other in zip(ranks, regions, strict=True):
        for node in _tensors(other):
            if each.whole[node].name not in used:
                raise Unsound(other.nodes[-1], f"is the end of {other.name}, which uses '{node.name}' outside its call")
            here, there = cuts[each.whole[node].name], each.shardings[node][0]
            if here and there not in here:
                raise Unsound(
                    other.nodes[-1],
                    f"is the end of {other.name}, which takes '{node.name}' as {there.text(mesh)} on some ranks only",
                )
            here.add(there)  # the first rank's share is empty, and it needs no operand for it
    generator = _at_random()
    shapes = operand_shapes(first, region)
    ran = False
    rising = find_rising(call)
    integers = [
        name
        for name, node in used.items()
        if is_integer(edit.outputs(node)[0].dtype) and (rising is None or node is not rising.places)
    ]
    trials = _trials(first, region, [shapes[name] for name in integers])
    # Integers may be positions in other integers, unlike random ids.
    for edges, in_order in itertools.product(trials, itertools.product((False, True), repeat=len(integers))):
        given = {name: None if it else edges for name, it in zip(integers, in_order, strict=True)}
        wholes = {
            name: _random(edit.outputs(node)[0], shapes[name], given.get(name), generator)
            for name, node in used.items()
            if rising is None or node is not rising.places
        }
        if rising is not None:
            name, size = rising.places.name, wholes[rising.of.name].shape[rising.dim]
            wholes[name] = rising.draw(edit.outputs(rising.places)[0], shapes[name], size, generator)
        try:
            result = _on_the_whole(first, call, wholes)
        except (RuntimeError, IndexError):  # these ids are not looked up in the cut dim
            continue
        ran = True
        feeds = [
            {node: cut(wholes[each.whole[node].name], each.shardings[node][0], mesh, rank) for node in _tensors(other)}
            for rank, (each, other) in enumerate(zip(ranks, regions, strict=True))
        ]
        outs = list(_run(ranks, regions, rows, feeds))
        for index, node in enumerate(region.outputs):
            part = first.whole[node]
            expected = result if part is call else result[part.args[1]]
            _compare(node, expected, [out[index] for out in outs], first.shardings[node][0], mesh, exact=False)
    if not ran:
        raise DoesNotRun(region.nodes[-1], f"is the end of {region.name}, whose call cannot be run")


def _rule(region: ProgramRegion) -> Rule:
    rule = rule_of(region.call)
    if rule is None or not rule.local:
        raise Unsound(region.nodes[-1], f"is the end of {region.name}, and {region.call.target} is run as it is")
    return rule


def _on_the_whole(made: Folded, call: fx.Node, wholes: Mapping[str, torch.Tensor]) -> Any:
    def given(node: fx.Node) -> Any:
        return wholes[node.name] if node.name in wholes else plain(edit.fake(node), made)

    args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), given)
    return call.target(*args, **kwargs)  # type: ignore[operator]


def _trials(made: Folded, region: ProgramRegion, ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ids to look up in each run: if there are fewer ids than edges of shares, several runs cover them."""
    if not ids:
        return [[0]]
    step = max(1, min(map(math.prod, ids)))
    return [edges[at : at + step] for edges in _edges(made, region) for at in range(0, len(edges), step)]


def _edges(made: Folded, region: ProgramRegion) -> list[list[int]]:
    """Return the ends of shares for each cut size, counted from either side: these ids must be looked up."""
    cuts = []
    for node in (*_tensors(region), *region.outputs):
        for size, by in zip(whole_shape(made, made.whole[node]), made.shardings[node][0].dims, strict=True):
            if by.axes and (size, by) not in cuts:
                cuts.append((size, by))
    edges = []
    for size, by in sorted(cuts, key=lambda each: each[0]):
        shares = [runs_of(by, size, made.mesh, made.mesh.coordinate(rank)) for rank in range(made.mesh.world_size)]
        ends = sorted({end for runs in shares if runs for end in (runs[0][0], runs[-1][-1])})
        edges += [ends, [end - size for end in ends]]
    return edges or [[0, 1]]


def _tensors(region: ProgramRegion) -> list[fx.Node]:
    return [node for node in region.inputs if edit.is_tensor(node)]


def _random(
    value: torch.Tensor, shape: Sequence[int], edges: Sequence[int] | None, generator: torch.Generator
) -> torch.Tensor:
    """Return random values; integers are ids in the cut dim that include the edges of shares, or else 0, 1, 2."""
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if value.is_floating_point() or value.is_complex():
        # Around 1, so that no mean of many values is almost zero.
        return torch.randn(shape, generator=generator).add_(1).to(value.dtype)
    if edges is None:
        return torch.arange(math.prod(shape)).view(tuple(shape)).to(value.dtype)
    ids = torch.randint(min(0, *edges), max(0, *edges) + 1, tuple(shape), generator=generator).view(-1)
    places = torch.randperm(len(ids), generator=generator)[: len(edges)]
    ids[places] = torch.tensor(edges[: len(places)], dtype=ids.dtype)
    return ids.view(shape).to(value.dtype)


def _run(
    ranks: Sequence[Folded],
    regions: Sequence[ProgramRegion],
    rows: Rows,
    feeds: Sequence[Mapping[fx.Node, torch.Tensor]],
) -> list[list[Any]]:
    runs: list[Any] = []
    known: dict[str, Any] = {}
    for each, region, row, feed in zip(ranks, regions, rows, feeds, strict=True):
        sizes = {node: plain(edit.fake(node), each) for node in region.inputs if node not in feed}
        numbers = {node: torch.tensor(row[each.numbers.read[node]]) for node in region.numbers}
        runs.append(_one(region, {**feed, **sizes, **numbers}, known))
    try:
        return lock_step(runs)
    except InternalError as error:
        raise Unsound(regions[0].nodes[-1], f"is the end of {regions[0].name}: {error.message}") from error
    except (RuntimeError, IndexError, ValueError, TypeError) as error:  # an op on shapes that do not fit
        line = reason(error)
        raise DoesNotRun(
            regions[0].nodes[-1], f"is the end of {regions[0].name}, which does not run: {line}"
        ) from error


def _one(region: ProgramRegion, env: dict[fx.Node, Any], known: dict[str, Any]) -> Generator[Waiting, Any, list[Any]]:
    """Run one rank's region. `known`: results by call, which are large, and often one tensor for all ranks.

    Integers that encode floats move and are reduced like the floats: these are passed on unchanged.
    """
    same_as = {node: each.source for each in region.ordered for node in each.nodes}
    for node in region.nodes:
        if node in same_as:
            env[node] = env[same_as[node]]
            continue
        if edit.is_collective(node):
            env[node] = yield from run_call(node, env)
            continue
        same = f"{node.target} {fx.node.map_arg((node.args, node.kwargs), lambda n: _address(env[n]))}"
        if same not in known:
            made = yield from run_call(node, env)
            known[same] = made, [env[used] for used in node.all_input_nodes]  # keeps their addresses unique
        env[node] = known[same][0]
    return [env[node] for node in region.outputs]


def _address(value: Any) -> Any:
    return tree_map(lambda each: f"<{id(each)}>" if isinstance(each, torch.Tensor) else each, value)


def _compare(
    node: fx.Node, whole: torch.Tensor, outs: Sequence[torch.Tensor], sharding: Sharding, mesh: Mesh, exact: bool
) -> None:
    try:
        replicas = join(outs, sharding, mesh, whole.shape)
    except ValueError as error:
        raise Unsound(node, f"is not what its region claims: {error}") from error
    for replica in {id(replica): replica for replica in replicas}.values():
        if not (torch.equal(replica, whole) if exact else is_close(replica, whole)):
            raise Unsound(node, f"does not become {sharding.text(mesh)} of the whole in its region")


def is_close(value: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return True if a value is the whole one, up to the rounding of sums in another order."""
    if not is_rounded(whole):
        return torch.equal(value, whole)
    limit = largest_magnitude([whole]) * max(TOLERANCE, EPSILONS * torch.finfo(whole.dtype).eps)
    return torch.allclose(widened(value), widened(whole), rtol=0, atol=limit, equal_nan=True)


def _described(made: Folded, region: ProgramRegion, numbering: Numbering) -> Any:
    """Return a key with everything that the result depends on: what the nodes compute, inputs and outputs."""
    known = {node: numbering.number("input", at, *_end(made, node)) for at, node in enumerate(region.inputs)}
    known |= {node: numbering.number("own", at) for at, node in enumerate(region.numbers)}
    steps = [numbering.of(node, known, at + 1) for at, node in enumerate(region.nodes)]
    ends = [(known[node], *_end(made, node)) for node in region.outputs]
    if (call := region.call) is None:
        return tuple(steps), tuple(ends)
    # The input for each operand, and the result for each output.
    values = {node: numbering.number("operand", at, _layout(node)) for at, node in enumerate(call.all_input_nodes)}
    parts: list[Any] = [values[made.whole[node]] for node in region.inputs if made.whole.get(node) in values]
    parts += [None if made.whole[node] is call else made.whole[node].args[1] for node in region.outputs]
    return tuple(steps), tuple(ends), numbering.of(call, values), *parts, *needed_checks(made, call)


def _end(made: Folded, node: fx.Node) -> tuple[Any, ...]:
    """Return the size of a number, or the shardings and the whole's layout of a tensor."""
    if not edit.is_tensor(node):
        return (str(node.meta.get("val")),)
    return (*(sharding.text(made.mesh) for sharding in made.shardings[node]), _layout(made.whole[node]))


def _layout(node: fx.Node) -> str:
    value = edit.fake(node)
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
