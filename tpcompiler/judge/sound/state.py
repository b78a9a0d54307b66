"""Check what ranks hold: shares of weights that make one whole, their numbers, and symmetric memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler._torch import WRITTEN_KINDS, FakeTensor
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import same_bits
from tpcompiler.ir.text import dtype_name
from tpcompiler.judge.sound.folded import read_claimed
from tpcompiler.judge.sound.shares import cut, join
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.judge.sound.written import WrittenRank
from tpcompiler.runtime.artifact import Manifest, lacks_weights
from tpcompiler.runtime.rank_file import strides_of, taken_by
from tpcompiler.runtime.records import TensorRecord

KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant_tensor"}


def check_numbers(ranks: Sequence[WrittenRank], manifest: Manifest) -> None:
    """Check that every rank has the manifest's numbers.

    Raises:
        Unsound: a rank has other numbers.
    """
    for name, rows in manifest.rank_numbers.items():
        for rank, each in enumerate(ranks):
            held = each.state.get(name)
            found = held.tolist() if isinstance(held, torch.Tensor) and held.dtype == torch.int64 else held
            if found != [rows[rank]]:
                raise Unsound(None, f"rank {rank} holds the numbers {found}, and the manifest says {[rows[rank]]}")


def check_symmetric(ranks: Sequence[WrittenRank], manifest: Manifest) -> None:
    """Check that every rank uses the same memory, of the group in the manifest, and allocates the same amount.

    Raises:
        Unsound: memory is mapped for another group, is a tensor of the model, or differs between ranks.
    """
    for rank, each in enumerate(ranks):
        groups = {name: room.group for name, room in each.rooms.items()}
        if groups != manifest.symm_mem:
            raise Unsound(
                None,
                f"rank {rank} reduces over the symmetric memory {groups}, and the manifest says {manifest.symm_mem}",
            )
        for name, room in each.rooms.items():
            held = each.state.get(name)
            if not isinstance(held, torch.Tensor) or (tuple(held.shape), held.dtype) != room[1:]:
                raise Unsound(None, f"rank {rank} does not hold the symmetric memory {name!r} that its program takes")
            if room != (first := ranks[0].rooms[name]):
                raise Unsound(None, f"the symmetric memory {name!r} is {room} on rank {rank}, and {first} on rank 0")


def check_state(
    ranks: Sequence[WrittenRank],
    manifest: Manifest,
    mesh: Mesh,
    originals: Sequence[ExportedProgram],
    beside: Mapping[str, Manifest],
) -> None:
    """Check that every rank has its share of every tensor in the manifest and no more, and that replicas are equal.

    The joined shares must equal the tensors of the originals bit for bit. Tensors in another program's files are
    checked with that program, which must be among the neighbours and have the same tensor. If weights are still to be
    cut, only their names are checked.

    Raises:
        Unsound: a tensor is extra, missing, of another shape or dtype, or has other content.
    """
    rows = {row.name: row for row in manifest.tensors}
    for rank, each in enumerate(ranks):
        for spec in each.program.graph_signature.input_specs:
            kind, row = KINDS.get(spec.kind), rows.get(str(spec.target))
            if spec.kind is InputKind.CONSTANT_TENSOR and spec.target in manifest.rank_numbers:
                continue
            if kind and (row is None or row.kind != kind):
                there = f"calls it a {row.kind}" if row else "does not"
                raise Unsound(None, f"rank {rank} has the {kind} {spec.target!r}, and the manifest {there}")
        known = {*rows, *manifest.symm_mem, *(str(spec.target) for spec in each.program.graph_signature.input_specs)}
        if more := sorted(each.state.keys() - known):
            raise Unsound(None, f"rank {rank} holds {more[0]!r}, which nothing takes")
        elsewhere = {name for name, row in rows.items() if row.stored_in is not None}
        if lacks_weights(manifest):
            continue
        _check_layout(each, rank, elsewhere)
        _check_memory(each, rank, elsewhere)
    if lacks_weights(manifest):
        return
    _check_offsets(ranks)
    held = [{**original.constants, **original.state_dict} for original in originals]
    for original, theirs in zip(originals, held, strict=True):
        named = {name for name, row in rows.items() if row.kind != "constant_tensor"}
        if more := sorted(named - theirs.keys()):
            raise Unsound(None, f"the original has no tensor {more[0]!r}: it is another model")
        takes = {str(spec.target) for spec in original.graph_signature.input_specs if spec.kind in KINDS}
        if lacking := sorted(takes & theirs.keys() - rows.keys()):
            raise Unsound(None, f"no rank holds the original's tensor {lacking[0]!r}")
    for name, row in rows.items():
        if row.stored_in is not None:
            _check_elsewhere(row, manifest, beside)
            continue
        if not manifest.files and any(isinstance(each.state.get(name), FakeTensor) for each in ranks):
            continue  # in memory, exported without weights
        wholes = _wholes(row, ranks, mesh)
        if _as_held(row, mesh).partial:
            _check_terms(row, wholes[0], ranks, mesh)
        for whole in wholes[1:]:
            if not same_bits(whole, wholes[0]):
                raise Unsound(None, f"{name!r} is not the same on ranks that share it")
        if row.tied_to is not None:
            _check_tied(row, wholes[0], rows, ranks, mesh)
        values = (theirs[name].detach() for theirs in held if name in theirs)
        if not all(isinstance(value, FakeTensor) or same_bits(wholes[0], value) for value in values):
            raise Unsound(None, f"{name!r}: the ranks' shares do not make the original's tensor")


def _check_offsets(ranks: Sequence[WrittenRank]) -> None:
    """Check that shares of one size start at one storage offset on all ranks: ops may address the memory."""
    known: dict[tuple[str, torch.Size], tuple[int, int]] = {}
    for rank, each in enumerate(ranks):
        for name, value in each.state.items():
            if _has_memory(value):
                other, offset = known.setdefault((name, value.shape), (rank, value.storage_offset()))
                if value.storage_offset() != offset:
                    both = f"{offset} on rank {other} and at {value.storage_offset()} on rank {rank}"
                    raise Unsound(None, f"{name!r} begins in its memory at {both}")


def _check_terms(row: TensorRecord, whole: torch.Tensor, ranks: Sequence[WrittenRank], mesh: Mesh) -> None:
    """Check that one rank holds the pending value and the others the neutral one: other terms could be large."""
    sharding = _as_held(row, mesh)
    for rank, each in enumerate(ranks):
        if not same_bits(each.state[row.name].detach(), cut(whole, sharding, mesh, rank)):
            raise Unsound(None, f"{row.name!r} is not the term of rank {rank} for {row.sharding}")


def _check_memory(each: WrittenRank, rank: int, elsewhere: Set[str]) -> None:
    """Check that written buffers and parameters overlap neither another tensor nor themselves."""
    written = {spec.target for spec in each.program.graph_signature.output_specs if spec.kind in WRITTEN_KINDS}
    begins = {name: value.data_ptr() for name, value in each.state.items() if _has_memory(value)}
    last, until = "", 0
    for name, begin in sorted(begins.items(), key=lambda item: item[1]):
        value = each.state[name]
        if name in written - elsewhere and _may_overlap_itself(value):
            raise Unsound(None, f"rank {rank} writes to {name!r}, whose elements may share memory")
        extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        if begin < until and not written.isdisjoint((name, last)):
            raise Unsound(None, f"rank {rank} writes to {name!r} and {last!r}, which share memory")
        if begin + extent * value.element_size() > until:
            last, until = name, begin + extent * value.element_size()


def _may_overlap_itself(value: torch.Tensor) -> bool:
    """Return True unless the dims have an order in which each stride exceeds the reach of the smaller ones."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def check_shared(programs: Mapping[str, Sequence[WrittenRank]], manifests: Mapping[str, Manifest]) -> None:
    """Check that all programs that share a tensor expect the same strides.

    Raises:
        Unsound: a program expects other strides than the program that stores the tensor.
    """
    for name, ranks in programs.items():
        elsewhere = {row.name: row.stored_in for row in manifests[name].tensors if row.stored_in is not None}
        for rank, each in enumerate(ranks):
            ours = taken_by(each.program)
            for tensor, other in elsewhere.items():
                theirs = taken_by(programs[other][rank].program) if other in programs else {}
                if tensor in ours and tensor in theirs and strides_of(ours[tensor]) != strides_of(theirs[tensor]):
                    both = f"{strides_of(ours[tensor])} to {name!r} on rank {rank}, and {strides_of(theirs[tensor])}"
                    raise Unsound(None, f"{tensor!r} has the strides {both} to {other!r}")


def _check_layout(each: WrittenRank, rank: int, elsewhere: Set[str]) -> None:
    """Check the strides of tensors against the program, except those in another program's files."""
    for name, value in taken_by(each.program).items():
        held = each.state.get(name)
        if not isinstance(held, torch.Tensor) or name in elsewhere:
            continue
        if held.shape == value.shape and (found := strides_of(held)) != (said := strides_of(value)):
            raise Unsound(None, f"{name!r} has the strides {found} on rank {rank}, and its program says {said}")


def _has_memory(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return False
    return value.layout is torch.strided and value.numel() > 0


def _wholes(row: TensorRecord, ranks: Sequence[WrittenRank], mesh: Mesh) -> list[torch.Tensor]:
    """Join the ranks' shares of a tensor to wholes, one for each set of replicas."""
    name, held = row.name, []
    for rank, each in enumerate(ranks):
        value = each.state.get(name)
        if not isinstance(value, torch.Tensor):
            raise Unsound(None, f"rank {rank} has no tensor {name!r}, and the manifest has")
        if dtype_name(value.dtype) != row.dtype:
            raise Unsound(None, f"{name!r} is of {value.dtype} on rank {rank}, and the manifest says {row.dtype}")
        held.append(value.detach())
    try:
        return join(held, _as_held(row, mesh), mesh, row.shape)
    except ValueError as error:
        raise Unsound(None, f"{name!r}: {error}") from error


def _as_held(row: TensorRecord, mesh: Mesh) -> Sharding:
    """Return the sharding of a tensor in memory: for a pending average or extremum, every rank holds the whole."""
    try:
        sharding = read_claimed(None, row.sharding, mesh, len(row.shape))
    except Unsound as error:
        raise Unsound(None, f"{row.name!r}: {error}") from error
    return Sharding(sharding.dims, tuple((axis, op) for axis, op in sharding.partial if op in ("sum", "product")))


def _check_tied(
    row: TensorRecord, whole: torch.Tensor, rows: Mapping[str, TensorRecord], ranks: Sequence[WrittenRank], mesh: Mesh
) -> None:
    other = rows.get(row.holder)
    if other is None or (other.stored_in is None and not same_bits(whole, _wholes(other, ranks, mesh)[0])):
        raise Unsound(None, f"{row.name!r} is not {row.tied_to!r}, to which it is tied by the manifest")


def _check_elsewhere(row: TensorRecord, manifest: Manifest, beside: Mapping[str, Manifest]) -> None:
    there = beside.get(row.stored_in or "")
    theirs = next((other for other in there.tensors if other.name == row.name), None) if there else None
    if there is None or theirs is None or theirs.stored_in is not None:
        raise Unsound(None, f"{row.name!r} is not in the files of {row.stored_in!r}, where the manifest says it is")
    if there.mesh != manifest.mesh:
        raise Unsound(None, f"the mesh is {manifest.mesh}, and that of {row.stored_in!r} is {there.mesh}")
    if there.factors != manifest.factors:
        raise Unsound(None, f"axes have factors {manifest.factors}, and those of {row.stored_in!r} {there.factors}")
    for key in ("shape", "dtype", "sharding"):
        ours, other = getattr(row, key), getattr(theirs, key)
        if ours != other:
            raise Unsound(None, f"{row.name!r} is {ours}, and in the files of {row.stored_in!r} it is {other}")
