"""Run every change of sharding on all ranks, and compare its result with its claim."""

from __future__ import annotations

import math
import operator
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten, c10d_functional, tree_map
from tpcompiler.errors import ArtifactError, reason
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.compare.simulate import Waiting, lock_step, run_call
from tpcompiler.judge.sound.drawn import LONGER, SHORT, DrawnSizes
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.moves import ALONG
from tpcompiler.judge.sound.numbering import Numbering
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.shares import cut, join, reduce_terms
from tpcompiler.judge.sound.unsound import DoesNotRun, Unsound

MANY = 2**22  # elements
TRIALS, DRAWS = 2, 8  # number of trials of dynamic sizes, and of draws in each trial
SMALL = 16
# All other ops in a change of sharding treat all dims alike except one, or all dims.
ALONG_DIM = {*ALONG, aten.cat.default} - {aten.select.int}
ALONG_FIRST = (c10d_functional.all_gather_into_tensor.default, c10d_functional.reduce_scatter_tensor.default)
ALONG_NONE = (
    *(c10d_functional.all_reduce.default, c10d_functional.wait_tensor.default, operator.getitem),
    *(aten.clone.default, aten.div.Tensor, aten.arange.default, aten.add.Tensor),  # the last two make places
)


class ChangeRunner:
    """A run of all ranks' changes: they move elements, so each is run on distinct numbers in float64.

    `rows`: of every rank, the numbers that it may read.
    """

    def __init__(self, ranks: Sequence[Folded], rows: Sequence[Sequence[int]]) -> None:
        self.ranks, self.rows = ranks, rows
        self.right: set[Any] = set()  # keys of the changes that were found right
        self.numbering = Numbering()

    def check(self, name: str) -> None:
        """Run one change in lock step; the very same whole must come out on every rank.

        Raises:
            Unsound: some rank does not get the claimed result.
        """
        regions = [each.regions[name] for each in self.ranks]
        ranks = zip(self.ranks, regions, self.rows, strict=True)
        keys = {id(each): self._key(each, region) for each, region in zip(self.ranks, regions, strict=True)}
        known = tuple((keys[id(each)], *each.numbers.of(region.numbers, row)) for each, region, row in ranks)
        if known in self.right:
            return
        sizes = DrawnSizes()
        for _ in range(TRIALS) if self.ranks[0].program.range_constraints else (0,):
            sizes = self._check_at_some_sizes(regions, sizes)
        self.right.add(known)

    def _key(self, made: Folded, region: ProgramRegion) -> Any:
        """Return everything that the result depends on: what the nodes compute, and the ends with their sizes."""
        number = self.numbering.number
        known = {node: number("input", at, *_end(made, node)) for at, node in enumerate(region.inputs)}
        known |= {node: number("own", at) for at, node in enumerate(region.numbers)}
        steps = tuple(self.numbering.of(node, known) for node in region.nodes)
        return steps, _end(made, region.nodes[-1])

    def _check_at_some_sizes(self, regions: Sequence[ProgramRegion], before: DrawnSizes) -> DrawnSizes:
        """Run a change at random sizes; draw again if it fails to run.

        The export may have found facts about sizes that a file does not record: one is a multiple of 4, or at most
        another.
        """
        for left in reversed(range(DRAWS)):
            sizes = self._draw(DrawnSizes(before.chosen, fits=left == 0, scaled=0 < left <= DRAWS // 2))
            try:
                if left and math.prod(self._shape(regions)) > MANY:
                    fits = left <= DRAWS // 2
                    least, spread = LONGER if fits else SHORT
                    sizes = self._draw(DrawnSizes(before.chosen, fits, least=least, spread=spread))
                self._run(regions)
            except Unsound as error:
                if left and sizes.chosen and isinstance(error, DoesNotRun):
                    continue
                at = f", at {sizes}" if sizes.chosen else ""
                raise Unsound(error.node, f"{error.text}{at}") from error
            break
        return sizes

    def _draw(self, sizes: DrawnSizes) -> DrawnSizes:
        for each in self.ranks:
            each.sizes = sizes
        return sizes

    def _shape(self, regions: Sequence[ProgramRegion]) -> list[int]:
        return change_shape(self.ranks[0], [node for region in regions for node in region.nodes], regions[0])

    def _run(self, regions: Sequence[ProgramRegion]) -> None:
        first, last = self.ranks[0], regions[0].nodes[-1]
        mesh, source, target = first.mesh, first.paths[last][0], first.paths[last][-1]
        whole = _numbers(self._shape(regions), mesh.world_size)
        shares = _shares(whole, source, mesh)
        runs: list[Any] = []
        known: dict[str, Any] = {}
        for each, region, row, share in zip(self.ranks, regions, self.rows, shares, strict=True):
            env = {node: share if edit.is_tensor(node) else each.plain(edit.fake(node)) for node in region.inputs}
            env.update(zip(region.numbers, map(torch.tensor, each.numbers.of(region.numbers, row)), strict=True))
            runs.append(_one(region, env, known))
        try:
            parts = lock_step(runs)
        except ArtifactError as error:
            raise Unsound(last, f"is the end of {regions[0].name}: {error.message}") from error
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # an op on shapes that do not fit
            raise DoesNotRun(last, f"is the end of {regions[0].name}, which does not run: {reason(error)}") from error
        if target.has_spans:  # shares overlap, and may leave elements out
            shares = [cut(whole, Sharding(target.dims), mesh, rank) for rank in range(mesh.world_size)]
            is_right = all(part.shape == share.shape for part, share in zip(parts, shares, strict=True))
            if not is_right or not all(map(torch.equal, reduce_terms(parts, target, mesh), shares)):
                raise Unsound(last, f"does not become {target.text(mesh)} of the whole in its region")
            return
        try:
            replicas = join(parts, target, mesh, whole.shape)
        except ValueError as error:
            raise Unsound(last, f"is not what its region claims: {error}") from error
        if not all(torch.equal(each, whole) for each in {id(replica): replica for replica in replicas}.values()):
            raise Unsound(last, f"does not become {target.text(mesh)} of the whole in its region")


def change_shape(made: Folded, nodes: Iterable[fx.Node], region: ProgramRegion) -> list[int]:
    """Return the shape of the value that a change's `nodes` on all ranks move, reduced in dims that they do not touch.

    So the pending sums of a batch of long texts are reduced on a few numbers.
    """
    last = region.nodes[-1]
    shape = [made.plain(size) for size in edit.outputs(made.whole[last])[0].shape]
    if any(size < 0 for size in shape):
        raise DoesNotRun(last, f"has no value of shape {shape}")
    ends = made.paths[last][0], made.paths[last][-1]
    cut = {at for sharding in ends for at, by in enumerate(sharding.dims) if by.axes}
    for node in nodes:
        if node.target in ALONG_DIM:
            cut.add(int(edit.bound(node)["dim"]) % len(shape))
        elif node.target in ALONG_FIRST:
            cut.add(0)
        elif node.target not in ALONG_NONE:
            return shape
    return [size if at in cut else min(size, SMALL) for at, size in enumerate(shape)]


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


def _one(region: ProgramRegion, env: dict[fx.Node, Any], known: dict[str, Any]) -> Generator[Waiting, Any, Any]:
    """Run one rank's change. `known`: results by call, which are large, and often one tensor for all ranks.

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
    return env[region.nodes[-1]]


def _address(value: Any) -> Any:
    return tree_map(lambda each: f"<{id(each)}>" if isinstance(each, torch.Tensor) else each, value)


def _end(made: Folded, node: fx.Node) -> tuple[str, ...]:
    """Return the size of a number, or the sharding of a tensor and the layout of its whole."""
    if not edit.is_tensor(node):
        return (str(node.meta.get("val")),)
    whole = edit.fake(made.whole[node])
    return made.shardings[node][0].text(made.mesh), f"{whole.dtype}{list(whole.shape)}"
