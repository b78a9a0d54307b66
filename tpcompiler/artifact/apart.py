"""Find a buffer that programs of one model would not share, because they run over other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tpcompiler._torch import FakeTensor
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.ir.shares import same_bits
from tpcompiler.runtime.artifact import lacks_weights
from tpcompiler.runtime.records import TensorRecord


def find_state_apart(programs: Mapping[str, ArtifactProgram]) -> str:
    """Describe a buffer that one program writes and another of the same model also holds; return "" without one.

    `parallelize` refuses such programs; files may have been put together since.
    """
    for (name, own), (other, theirs) in itertools.permutations(programs.items(), 2):
        if own.mesh == theirs.mesh or own.manifest.family == theirs.manifest.family:
            continue
        rows, others = ({row.name: row for row in each.manifest.tensors} for each in (own, theirs))
        common = rows.keys() & others.keys()
        states = sorted(common & {*own.graph(0).graph_signature.buffers_to_mutate.values()})
        if states and len(states) < len(common) and all(_is_same(own, theirs, rows[n], others[n]) for n in common):
            return (
                f"{states[0]!r} is a buffer that {name!r} writes on {own.mesh}, and {other!r} has its own on "
                f"{theirs.mesh}, which sees nothing of it"
            )
    return ""


def _is_same(own: ArtifactProgram, theirs: ArtifactProgram, row: TensorRecord, other: TensorRecord) -> bool:
    if (row.shape, row.dtype) != (other.shape, other.dtype):
        return False
    if lacks_weights(own.manifest) or lacks_weights(theirs.manifest):
        return True  # a checkpoint gives both the same
    values = own.read(row.name), theirs.read(row.name)
    return any(isinstance(value, FakeTensor) for value in values) or same_bits(*values)
