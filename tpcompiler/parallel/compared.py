"""Compare runs of converted programs with the single device's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler.ir.devices import device_types
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.judge.compare.compare import VerifyReport, compare_calls
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.passes.move_device import move_device
from tpcompiler.runtime.place import place_state


def on_cpu(program: ExportedProgram) -> ExportedProgram:
    """Return the program for a CPU, where its ops can be evaluated on any machine."""
    return expand_collectives(move_device(program, "cpu"))


def compared_calls(
    subjects: Mapping[str, Subject], calls: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]]
) -> VerifyReport:
    """Run `compare_calls` with the programs moved to the device of the originals' tensors."""
    notes, moved = [], {}
    for name, subject in subjects.items():
        there = next((kind for kind in device_types(subject.reference.graph) if kind != "cpu"), "cpu")
        programs = [expand_collectives(move_device(program, there)) for program in subject.programs]
        for program in programs:
            place_state(program, there)
        moved[name] = replace(subject, programs=programs)
        made_for = {kind for program in subject.programs for kind in device_types(program.graph)} - {there}
        if made_for:
            notes.append(f"run on {there}: the same graphs as those for {made_for.pop()}, with the device renamed")
    report = compare_calls(moved, calls)
    return structs.replace(report, note=notes[0]) if notes else report
