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
from tpcompiler.errors import ArtifactError, LaunchError, reason
from tpcompiler.runtime.agree import RESTART, WAIT
from tpcompiler.runtime.records import MOST_DIMS, Count, Degree, DtypeText, Record, Shape, read_record

Side = Literal["source", "target"]
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
    """A buffer that both sides hold."""

    shape: Shape  # global
    dtype: DtypeText  # such as `f32`
    source_sharding: str  # on the ranks that send it
    target_sharding: str  # on the ranks that receive it


class Handover(Record, frozen=True):
    """The parts of all buffers that go from the ranks of one artifact to those of another."""

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
            if wrong := next((each for each in (move.source_slice, move.target_slice) if _is_reversed(each)), None):
                raise ValueError(f"{what} ends before it begins: {wrong}")
            sent, received = (_shape(each) for each in (move.source_slice, move.target_slice))
            if sent != received:
                counts = f"{prod(sent)} elements on rank {move.source} and {prod(received)} on rank {move.target}"
                raise ValueError(f"{what} has {counts}")


def _is_reversed(where: Slice) -> bool:
    return any(start > stop for start, stop in where)


def _shape(where: Slice) -> list[int]:
    return [stop - start for start, stop in where]


def read_handover(path: str | os.PathLike[str]) -> tuple[Handover, str]:
    """Return the content of a file that `tpcompiler handover` wrote, and its SHA-256.

    Raises:
        ArtifactError: the file is missing, or has another form.
    """
    try:
        content = Path(path).read_bytes()
        return read_record(Handover, msgspec.json.decode(content)), hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise ArtifactError(f"{os.fspath(path)} cannot be read: {reason(error)}", help=MAKE) from error
    except ValueError as error:
        found = "" if isinstance(error, msgspec.DecodeError) else error
        raise ArtifactError(f"{os.fspath(path)} is not a handover{found}", help=MAKE) from error


class HandoverLink:
    """A connection of all ranks of both sides, over which the state of the source replaces that of the target."""

    def __init__(self, handover: Handover, side: Side, group: Any) -> None:
        self.side: Side = side
        self._group, self._handover, self._rank = group, handover, dist.get_rank()

    def transfer(self, programs: Any) -> int:
        """Send this rank's buffers, or receive them: all ranks of both sides call it once for each handover.

        Args:
            programs: the result of `tpcompiler.load`: a module, or several by name.

        Returns:
            The bytes that this rank sent or received.

        Raises:
            ArtifactError: the programs have other buffers than the handover.
            LaunchError: another rank failed, or did not arrive in time.
        """
        buffers, sends = _find_buffers(programs), self.side == "source"
        messages = [
            (other, [self._part(buffers, move) for move in moves]) for other, moves in self._by_other()
        ]  # one for each pair of ranks, whatever the dtypes
        contents = [
            torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
            if sends
            else parts[0].new_empty(sum(map(_bytes, parts)), dtype=torch.uint8)
            for _, parts in messages
        ]
        try:
            pending = [
                self._group.send([content], other + self._handover.source_ranks, 0)
                if sends
                else self._group.recv([content], other, 0)
                for (other, _), content in zip(messages, contents, strict=True)
            ]
            for work in pending:
                work.wait()
        except RuntimeError as error:  # torch has no narrower type
            raise LaunchError(f"the other side of the handover failed: {reason(error)}", help=RESTART) from error
        for (_, parts), content in zip(messages, contents, strict=True) if not sends else ():
            for part, own in zip(parts, torch.split(content, [*map(_bytes, parts)]), strict=True):
                part.copy_(own.clone().view(part.dtype).view(part.shape))  # a number begins at a multiple of its size
        return sum(map(len, contents))

    def _by_other(self) -> Iterator[tuple[int, list[Move]]]:
        """Yield every rank of the other side with the moves between it and this rank, in an order that both have."""
        mine = (each for each in self._handover.moves if getattr(each, self.side) == self._rank)
        for pair, moves in groupby(mine, key=lambda each: (each.target, each.source)):
            yield pair[self.side == "target"], list(moves)

    def _part(self, buffers: Mapping[str, torch.Tensor], move: Move) -> torch.Tensor:
        where = move.source_slice if self.side == "source" else move.target_slice
        if (own := buffers.get(move.tensor)) is None:
            raise ArtifactError(f"the programs have no buffer {move.tensor!r}, which the handover names", help=MAKE)
        if own.ndim != len(where) or any(stop > size for (_, stop), size in zip(where, own.shape, strict=True)):
            raise ArtifactError(
                f"rank {self._rank} holds {move.tensor!r} as {list(own.shape)}, and the handover moves {where} of it",
                help=MAKE,
            )
        return own[tuple(slice(*each) for each in where)]


def _bytes(part: torch.Tensor) -> int:
    return part.numel() * part.element_size()


def join_handover(
    path: str | os.PathLike[str], side: Side, address: str, *, timeout: timedelta = WAIT, backend: str | None = None
) -> HandoverLink:
    """Connect this rank with all ranks of both sides; call it on each of them, after `load`.

    Rank 0 of the source listens at the address. The process groups of `load` are left alone.

    Args:
        path: a file of `tpcompiler handover`, the same on all ranks.
        side: "source" on the ranks that send, "target" on those that receive.
        address: `HOST:PORT` of rank 0 of the source.
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
    ranks, world, rank = [handover.source_ranks, handover.target_ranks], dist.get_world_size(), dist.get_rank()
    if (wanted := ranks[side == "target"]) != world:
        raise LaunchError(f"{os.fspath(path)} has {wanted} ranks as {side}, and this world has {world}", help=MAKE)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"{address!r} is not HOST:PORT", help="give the address of rank 0 of the source")
    place, size = rank + ranks[0] * (side == "target"), sum(ranks)
    try:
        store, files = meet_ranks(host, int(port), place, size, timeout, digest.encode())
        if different := [at for at, other in enumerate(files) if other != digest.encode()]:
            raise LaunchError(
                f"{os.fspath(path)} is another file on {_side_of(different[0], ranks)}",
                help="give all ranks the same file",
            )
        group = group_over(store, place, size, timeout, backend or dist.get_backend())
    except RuntimeError as error:
        raise LaunchError(f"not all ranks of the handover met at {address}: {reason(error)}", help=RESTART) from error
    return HandoverLink(handover, side, group)


def _side_of(place: int, ranks: Sequence[int]) -> str:
    is_target = place >= ranks[0]
    return f"rank {place - ranks[0] * is_target} of the {'target' if is_target else 'source'}"


def _find_buffers(programs: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of loaded programs by name."""
    modules = programs.values() if isinstance(programs, Mapping) else [programs]
    found: dict[str, torch.Tensor] = {}
    for module in modules:
        exported = module.exported_program
        found |= {**exported.constants, **exported.state_dict, **dict(module.named_buffers())}
    return found
