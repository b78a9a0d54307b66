"""A comparison of ranks' programs, maybe damaged ones, with the single device's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler.judge.compare.compare import Call, VerifyReport, compare_calls, read_call
from tpcompiler.judge.compare.judge import FLOOR, SPREAD, Layout
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.judge.compare.trial import run_single
from tpcompiler.runtime.artifact import SINGLE
from tpcompiler.runtime.inputs import flatten_inputs


def compare(
    reference: ExportedProgram,
    programs: Sequence[ExportedProgram],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layout: Layout,
    input_names: Sequence[str],
    output_names: Sequence[str],
    intermediate: ExportedProgram | None = None,
    then: Sequence[Call] = (),
) -> VerifyReport:
    """Compare one program, for a first call and for those of `then`."""
    subject = Subject(reference, programs, layout, input_names, output_names, intermediate)
    return compare_calls({SINGLE: subject}, [(SINGLE, args, kwargs), *((SINGLE, *read_call(call)) for call in then)])


def single_device(
    program: ExportedProgram, kwargs: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[float]]:
    """What one device returns, and the relative error that the judge allows for each output."""
    flat = flatten_inputs(program, (), kwargs)
    expected = [v for v in run_single(program, flat).outputs if isinstance(v, torch.Tensor)]
    exact = [v for v in run_single(program, flat, torch.float64).outputs if isinstance(v, torch.Tensor)]
    noise = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(expected, exact, strict=True)]
    return expected, [max(SPREAD * n, FLOOR * torch.finfo(torch.float32).eps) for n in noise]
