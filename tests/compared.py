"""A comparison of ranks' programs, maybe damaged ones, with the single device's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram

from tpcompiler.judge.compare.compare import Call, VerifyReport, compare_calls, read_call
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.runtime.artifact import SINGLE


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
