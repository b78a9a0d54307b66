"""The subject of a comparison: a program, its ranks' programs, and the inputs distributed to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler.errors import InputsError
from tpcompiler.ir import edit
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.compare.simulate import RankResult
from tpcompiler.runtime.inputs import flatten_inputs
from tpcompiler.runtime.records import BoundaryRecord

GIVEN = InputKind.USER_INPUT
Run = Callable[[Sequence[Sequence[Any]]], Sequence[RankResult]]  # runs all ranks on their flat inputs


@dataclass(frozen=True)
class Subject:
    """A single-device program, its ranks' programs, and the facts that `compare_calls` needs.

    `indices`: rows of the manifest's inputs, for the values that `load` checks before it runs a rank. `run` runs the
    ranks for one call after another instead of `simulate`, and keeps their writes. Those of one `family` share buffers.
    """

    reference: ExportedProgram
    programs: Sequence[ExportedProgram]
    layout: Layout
    input_names: Sequence[str]
    output_names: Sequence[str]
    intermediate: ExportedProgram | None = None
    run: Run | None = None
    indices: Sequence[BoundaryRecord] = ()
    family: str | None = None


def shares_of(subject: Subject, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Any]]:
    """Return every rank's part of the inputs, flat, on the rank's device.

    Raises:
        InputsError: the program rejects the arguments, or the ranks do not divide a size.
    """
    return deal(flatten_inputs(subject.reference, args, kwargs), subject)


def deal(flat: Sequence[Any], subject: Subject) -> list[list[Any]]:
    """Return every rank's part of flat inputs, on the rank's device.

    Raises:
        InputsError: the ranks do not divide the size of a cut dynamic dim.
    """
    programs, layout, names = subject.programs, subject.layout, subject.input_names
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    cut: list[list[torch.Tensor]] = [[] for _ in programs]
    takes = [
        [edit.fake(node) for node, spec in edit.placeholders(program) if spec.kind is GIVEN and edit.is_tensor(node)]
        for program in programs
    ]
    for position, (name, value) in enumerate(zip(names, tensors, strict=True)):
        parts = [layout.cut(name, value, rank).to(take[position].device.type) for rank, take in enumerate(takes)]
        for dim, size in enumerate(takes[0][position].shape):
            sizes = [part.shape[dim] for part in parts]
            if not isinstance(size, int) and len(set(sizes)) > 1:
                degree = layout.mesh.size(layout.shardings[name].dims[dim].axes)
                raise InputsError(
                    f"input '{name}' has {value.shape[dim]} on dim {dim}, which is cut by {degree} ranks",
                    help=f"give a multiple of {degree}",
                )
        for own, part in zip(cut, parts, strict=True):
            own.append(part)
    feeds = [iter(own) for own in cut]
    return [[next(feed) if isinstance(value, torch.Tensor) else value for value in flat] for feed in feeds]
