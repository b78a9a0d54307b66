"""Hand a model's state from the ranks of one artifact to those of another, which may run on other machines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from msgspec import Meta

from tpcompiler._torch import group_over, meet_ranks
from tpcompiler.errors import ArtifactError, LaunchError, explaining
from tpcompiler.runtime.agree import RESTART, WAIT
from tpcompiler.runtime.records import MOST_DIMS, Count, Degree, DtypeText, Record, Shape, read_record
from tpcompiler.runtime.turns import taking_turns
from tpcompiler.runtime.weights import dtype_of

Side = Literal["source", "target"]
BUCKET = 1 << 26  # bytes
Slice = Annotated[list[Annotated[list[Count], Meta(min_length=2, max_length=2)]], Meta(max_length=MOST_DIMS)]
MAKE = "make it with tpcompiler handover SOURCE TARGET -o handover.json"


class Move(Record, frozen=True):
    """A part of a tensor that one rank sends to another."""

    tensor: str  # its name
    source: Count  # the rank that sends it
    source_slice: Slice  # [start, stop] in each dim of the sender's share
    target: Count  # the rank that receives it
    target_slice: Slice  # [start, stop] in each dim of the receiver's share


class HandedTensor(Record, frozen=True):
    """A tensor that both sides hold."""

    shape: Shape  # global
    dtype: DtypeText  # of the side that receives it, such as `f32`
    source_sharding: str  # on the ranks that send it
    target_sharding: str  # on the ranks that receive it
    source_name: str | None = None  # its name on the side that sends it, if that is another


class Handover(Record, frozen=True):
    """The parts of all tensors that go from the ranks of one artifact to those of another."""

    source_ranks: Degree  # number of ranks that send
    target_ranks: Degree  # number of ranks that receive
    tensors: dict[str, HandedTensor]  # by name
    moves: list[Move]  # by receiver, sender and tensor

    def __post_init__(self) -> None:
        """Reject moves that would leave ranks waiting for each other.

        Raises:
            ValueError: a move has a rank or a tensor that there is not, or parts of different sizes.
        """
        for move in self.moves:
            what = f"a part of {move.tensor!r}"
            if move.tensor not in self.tensors:
                raise ValueError(f"a part is of {move.tensor!r}, which is not listed")
            if move.source >= self.source_ranks or move.target >= self.target_ranks:
                ends = f"rank {move.source} of {self.source_ranks} to rank {move.target} of {self.target_ranks}"
                raise ValueError(f"{what} goes from {ends}")
            for each in (move.source_slice, move.target_slice):
                if any(start > stop for start, stop in each):
                    raise ValueError(f"{what} ends before it begins: {each}")
            sent, received = (_shape(each) for each in (move.source_slice, move.target_slice))
            if sent != received:
                counts = f"{prod(sent)} elements on rank {move.source} and {prod(received)} on rank {move.target}"
                raise ValueError(f"{what} has {counts}")


def _shape(where: Slice) -> list[int]:
    return [stop - start for start, stop in where]


def read_handover(path: str | os.PathLike[str]) -> tuple[Handover, str]:
    """Return the content of a file that `tpcompiler handover` wrote, and its SHA-256.

    Raises:
        ArtifactError: the file is missing, or has another form.
    """
    with explaining(f"{os.fspath(path)} cannot be read", MAKE):
        content = Path(path).read_bytes()
    try:
        return read_record(Handover, msgspec.json.decode(content)), hashlib.sha256(content).hexdigest()
    except ValueError as error:
        found = "" if isinstance(error, msgspec.DecodeError) else error
        raise ArtifactError(f"{os.fspath(path)} is not a handover{found}", help=MAKE) from error


class HandoverLink:
    """A connection of all ranks of both sides, over which the state of the source replaces that of the target."""

    def __init__(
        self, handover: Handover, side: Side, group: Any, processes: Sequence[int], bucket_bytes: int = BUCKET
    ) -> None:
        """`processes`: those of the source and of the target, each of which runs as many ranks in a row."""
        self.side: Side = side
        self._group, self._handover, self._process, self._most = group, handover, dist.get_rank(), bucket_bytes
        ranks = [handover.source_ranks, handover.target_ranks]
        self._each = {of: ranks[at] // processes[at] for at, of in enumerate(("source", "target"))}
        self._behind = processes[0]  # where the target's processes begin in the group

    @torch.no_grad()
    def transfer(self, programs: Any) -> int:
        """Send this process's tensors, or receive them: all of both sides call it once for each handover.

        Tensors are written in place, between two calls of the programs: the next call has all of them. Call it from the
        thread that calls the programs, after the same call on all ranks: during a call of another thread it raises, as
        a second caller would, so that no call has some of the tensors.

        Args:
            programs: the result of `tpcompiler.load`: a module, or several by name.

        Returns:
            The bytes that this process sent or received.

        Raises:
            ArtifactError: the programs have other tensors than the handover.
            LaunchError: another rank failed, or did not arrive in time; or another thread calls a program.
        """
        with taking_turns({name for module in _modules(programs) for name in module.group_names}):
            return self._transfer(programs)

    def _transfer(self, programs: Any) -> int:
        tensors, sends, total = _find_tensors(programs), self.side == "source", 0
        messages = [
            (other, _in_buckets([self._part(tensors, move) for move in moves], self._most))
            for other, moves in self._by_other()
        ]
        for at in range(max((len(buckets) for _, buckets in messages), default=0)):
            now = [(other, buckets[at]) for other, buckets in messages if at < len(buckets)]
            contents = [
                torch.cat([part.to(dtype).contiguous().view(-1).view(torch.uint8) for part, dtype in parts])
                if sends
                else parts[0][0].new_empty(sum(_bytes(*each) for each in parts), dtype=torch.uint8)
                for _, parts in now
            ]
            self._exchange([other for other, _ in now], contents)
            for (_, parts), content in zip(now, contents, strict=True) if not sends else ():
                for (part, dtype), own in zip(
                    parts, torch.split(content, [_bytes(*each) for each in parts]), strict=True
                ):
                    part.copy_(own.clone().view(dtype).view(part.shape))  # a number begins at a multiple of its size
            total += sum(map(len, contents))
        return total

    def _exchange(self, others: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        sends = self.side == "source"
        with explaining("the other side of the handover failed", RESTART, RuntimeError, raised=LaunchError):
            pending = [
                self._group.send([content], other + self._behind, 0) if sends else self._group.recv([content], other, 0)
                for other, content in zip(others, contents, strict=True)
            ]
            for work in pending:
                work.wait()

    def _by_other(self) -> Iterator[tuple[int, list[Move]]]:
        """Yield every process of the other side with the moves between it and this one, in an order that both have."""

        def pair(move: Move) -> tuple[int, int]:
            return move.target // self._each["target"], move.source // self._each["source"]

        at = self.side == "source"  # the place in a pair of the side that this process is on
        mine = [move for move in self._handover.moves if pair(move)[at] == self._process]
        for each, moves in groupby(sorted(mine, key=pair), key=pair):
            yield each[not at], list(moves)

    def _part(self, tensors: Sequence[Mapping[str, torch.Tensor]], move: Move) -> tuple[torch.Tensor, torch.dtype]:
        """Return the part of a tensor that a move is of, and the dtype in which it is sent."""
        handed, rank = self._handover.tensors[move.tensor], getattr(move, self.side)
        where = move.source_slice if self.side == "source" else move.target_slice
        name = handed.source_name or move.tensor if self.side == "source" else move.tensor
        if (own := tensors[(rank % self._each[self.side]) % len(tensors)].get(name)) is None:
            raise ArtifactError(f"the programs have no tensor {name!r}, which the handover names", help=MAKE)
        dtype = dtype_of(handed.dtype)
        if own.ndim != len(where) or any(stop > size for (_, stop), size in zip(where, own.shape, strict=True)):
            raise ArtifactError(
                f"rank {rank} holds {name!r} as {list(own.shape)}, and the handover moves {where} of it", help=MAKE
            )
        if self.side == "target" and own.dtype != dtype:
            raise ArtifactError(f"rank {rank} holds {name!r} as {own.dtype}, and the handover sends {dtype}", help=MAKE)
        return own[tuple(slice(*each) for each in where)], dtype


def _in_buckets(
    parts: Sequence[tuple[torch.Tensor, torch.dtype]], most: int
) -> list[list[tuple[torch.Tensor, torch.dtype]]]:
    """Return the parts in groups of at most so many bytes; a part that is larger is cut along its first dim."""
    buckets, held = [list[tuple[torch.Tensor, torch.dtype]]()], 0
    for whole, dtype in parts:
        rows = max(most * len(whole) // max(_bytes(whole, dtype), 1), 1) if whole.ndim else 1
        for part in torch.split(whole, rows) if whole.ndim and len(whole) else [whole]:
            if buckets[-1] and held + _bytes(part, dtype) > most:
                buckets.append([])
                held = 0
            buckets[-1].append((part, dtype))
            held += _bytes(part, dtype)
    return [bucket for bucket in buckets if bucket]


def _bytes(part: torch.Tensor, dtype: torch.dtype) -> int:
    return part.numel() * dtype.itemsize


def join_handover(
    path: str | os.PathLike[str],
    side: Side,
    address: str,
    *,
    processes: tuple[int, int] | None = None,
    bucket_bytes: int = BUCKET,
    timeout: timedelta = WAIT,
    backend: str | None = None,
) -> HandoverLink:
    """Connect this rank with all ranks of both sides; call it on each of them, after `load`.

    Rank 0 of the source listens at the address. The process groups of `load` are left alone.

    Args:
        path: a file of `tpcompiler handover`, the same on all ranks.
        side: "source" on the ranks that send, "target" on those that receive.
        address: `HOST:PORT` of rank 0 of the source.
        processes: those of the source and of the target, where they are fewer than its ranks (`load(same_bits=True)`).
        bucket_bytes: what is sent between two processes at once, and the memory that it takes on each; the same on all.
        timeout: how long ranks wait for each other: here, and in transfers.
        backend: "nccl" or "gloo", by default that of this process's own group.

    Raises:
        ArtifactError: the file is missing, or has another form.
        LaunchError: this side has another number of ranks than the file, the address has another form, ranks have
            different files, or not all arrived in time.
    """
    handover, digest = read_handover(path)
    if not dist.is_initialized():
        raise LaunchError("there is no process group yet", help="call tpcompiler.load first, under torchrun")
    world, rank, all_ranks = dist.get_world_size(), dist.get_rank(), (handover.source_ranks, handover.target_ranks)
    ranks = processes or all_ranks
    if any(number < 1 or of % number for of, number in zip(all_ranks, ranks, strict=True)):
        raise LaunchError(f"{ranks} processes cannot run {all_ranks} ranks", help="give divisors of these")
    if (wanted := ranks[side == "target"]) != world:
        raise LaunchError(f"{os.fspath(path)} has {wanted} ranks as {side}, and this world has {world}", help=MAKE)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"{address!r} is not HOST:PORT", help="give the address of rank 0 of the source")
    place, size = rank + ranks[0] * (side == "target"), sum(ranks)
    with explaining(f"not all ranks of the handover met at {address}", RESTART, RuntimeError, raised=LaunchError):
        mine = f"{digest} {list(ranks)} {bucket_bytes}".encode()
        store, facts = meet_ranks(host, int(port), place, size, timeout, mine)
        if different := [at for at, other in enumerate(facts) if other != mine]:
            raise LaunchError(
                f"{os.fspath(path)} is another file, or processes or bucket_bytes are others, on "
                f"{_side_of(different[0], ranks)}",
                help="give all ranks the same",
            )
        group = group_over(store, place, size, timeout, backend or dist.get_backend())
    return HandoverLink(handover, side, group, ranks, bucket_bytes)


def _side_of(place: int, ranks: Sequence[int]) -> str:
    is_target = place >= ranks[0]
    return f"rank {place - ranks[0] * is_target} of the {'target' if is_target else 'source'}"


def _modules(programs: Any) -> list[Any]:
    return [*programs.values()] if isinstance(programs, Mapping) else [programs]


def _find_tensors(programs: Any) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of loaded programs by name, for each rank that this process runs."""
    found = list[dict[str, torch.Tensor]]()
    for module in _modules(programs):
        exported = module.exported_program
        held = {**exported.constants, **exported.state_dict, **dict(module.named_buffers())}
        held |= dict(module.named_parameters())
        each = [{name: held[own] for name, own in names.items()} for names in module.leaf_names] or [held]
        found = found or [{} for _ in each]
        for tensors, own in zip(found, each, strict=True):
            tensors |= own
    return found
