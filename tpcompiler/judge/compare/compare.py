"""Compare all ranks with the single-device program, at a tolerance derived from the program itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from tpcompiler._torch import find_failed_guard
from tpcompiler.errors import one_line
from tpcompiler.judge.compare.judge import Difference, incomparable
from tpcompiler.judge.compare.promote import WIDE, is_narrow
from tpcompiler.judge.compare.subject import Subject, deal
from tpcompiler.judge.compare.trial import SingleDeviceRaises, Trial
from tpcompiler.runtime.artifact import families, is_single
from tpcompiler.runtime.inputs import flatten_inputs, refuse_excluded
from tpcompiler.runtime.records import Record
from tpcompiler.terminal.tables import Shown

# The inputs of a further call: args, or (args, kwargs).
Further = Sequence[Any] | tuple[Sequence[Any], Mapping[str, Any]]
Made = Mapping[str, Mapping[str, Any]]  # the single device's outputs of the last call of each program
Later = Callable[[Made], Further]
Call = tuple[str, Sequence[Any] | Later, Mapping[str, Any]]  # of a program, by name


class VerifyReport(Record, Shown, frozen=True, omit_defaults=False):
    """The verdict, and the largest errors of the program in its own dtype."""

    ok: bool  # true if all outputs are equal within their tolerances
    max_abs_err: float  # the largest difference
    max_rel_err: float  # the largest difference relative to its output's largest magnitude
    outputs: list[Difference] = []  # the outputs, and the values that are written back
    first_diverging: str | None = None  # the first value, in the order of the program, that is wrong on some rank
    note: str = ""  # which program was run, if it is not the one that was asked about
    magnitude: float = 0.0  # the largest magnitude in the output that has the largest absolute error
    tolerance: float = 0.0  # the relative error that was allowed in the output that has the largest one

    def __str__(self) -> str:
        largest = f" in values up to {self.magnitude:.3g}" if self.magnitude else ""
        allowed = f" (tolerance {self.tolerance:.3g})" if self.tolerance else ""
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'}: "
            f"max abs err {self.max_abs_err:.3g}{largest}, max rel err {self.max_rel_err:.3g}{allowed}"
        ]
        if self.note:
            lines.append(f"  {self.note}")
        lines += map(_line, self.outputs)
        if self.first_diverging:
            lines.append(f"  first diverging value: {self.first_diverging}")
        return "\n".join(map(one_line, lines))


def _line(d: Difference) -> str:
    proved = "" if d.finite else ": it has no finite number, which proves nothing"
    if d.strays:
        proved = f": {d.strays} elements are NaN or infinite on one device or on a rank, and not on both"
    off = f"rel err {d.rel:.3g} (tolerance {d.tolerance:.3g})"
    if d.magnitude:
        off += f", abs err {d.abs:.3g} in values up to {d.magnitude:.3g}"
    return f"  {'ok ' if d.ok else 'BAD'} {d.name}: {off}{proved}"


def read_call(call: Further) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return (args, kwargs) for a call given as both, or as args alone."""
    if len(call) == 2 and isinstance(call[0], (tuple, list)) and isinstance(call[1], Mapping):
        return call[0], call[1]
    return call, {}


def compare_calls(subjects: Mapping[str, Subject], calls: Sequence[Call]) -> VerifyReport:
    """Run each reference, the same in float64, and all ranks in lock step; compare every output on every rank.

    Outputs of the model and values written back to buffers and inputs are compared. Each output's tolerance is
    `SPREAD` times the reference's own error against float64, at least `FLOOR` machine epsilons and at most `CEILING`;
    values of very different magnitude (`bands`) have separate tolerances. Integer and boolean outputs must be equal. A
    program with values below float32 is compared unchanged, dtypes included, and once more in float32.

    Args:
        subjects: programs by name; those of one family share their buffers.
        calls: (name, args, kwargs) of each call, which starts from the buffers that earlier calls have written; `args`
            may be a function of the single device's outputs of earlier calls that returns args or (args, kwargs).

    Raises:
        InputsError: a program rejects the arguments.
        MeshError: there is no program of a rank.
        ProgramError: weights have no values.
    """
    trials = {name: [Trial(subject)] for name, subject in subjects.items()}
    simulated = all(subject.run is None for subject in subjects.values())
    if narrow := simulated and any(is_narrow(each[0].reference.graph.nodes) for each in trials.values()):
        for name, subject in subjects.items():
            trials[name].append(Trial(subject, WIDE))
    for family in families(trials, lambda own: own[0].family):
        for each in zip(*family.values(), strict=True):
            for trial in each[1:]:
                trial.share(each[0])
    differences: list[Difference] = []
    own: list[Difference] = []  # of the program in its own dtype
    first = None
    made: dict[str, Mapping[str, Any]] = {}
    for number, (name, given, named) in enumerate(calls):
        given, named = read_call(given(made)) if callable(given) else (given, named)
        flat = flatten_inputs(trials[name][0].reference, given, named)
        refuse_excluded(find_failed_guard(subjects[name].reference, flat))
        shares = deal(flat, subjects[name])
        if failed := find_failed_guard(subjects[name].programs[0], shares[0]):  # what all ranks assert is the same
            differences.append(incomparable(f"the ranks refuse their shares of the inputs, as not {failed}"))
            return VerifyReport(False, float("inf"), float("inf"), differences)
        for trial in trials[name]:
            try:
                results = trial.call(flat, shares)
            except SingleDeviceRaises as error:
                differences.append(incomparable(str(error)))
                return VerifyReport(False, float("inf"), float("inf"), differences)
            own += results if trial.dtype is None else []
            if narrow and trial.dtype is None:
                # In low precision, rounding decides between close values: counts and choices are judged in float32.
                results = [replace(d, ok=True) if d.counted and d.abs < float("inf") else d for d in results]
            elif first is None and not all(d.ok for d in results):
                first = trial.first_diverging(flat, shares)
                first = first and (first if is_single(subjects) else f"{first}, in {name}")
            trial.remember()
            program = "" if is_single(subjects) else f" ({name})"
            of = f"call {number + 1}{program}: " if len(calls) > 1 else ""
            differences += [replace(d, name=f"{of}{d.name}") for d in results]
        made[name] = trials[name][0].made()
    nothing = Difference("", 0.0, 0.0, 0.0, True)
    furthest = max(own, key=lambda each: (each.abs, each.magnitude), default=nothing)
    worst = max(own, key=lambda each: (each.rel, each.tolerance), default=nothing)
    return VerifyReport(
        all(d.ok for d in differences),
        furthest.abs,
        worst.rel,
        differences,
        first,
        magnitude=furthest.magnitude,
        tolerance=worst.tolerance,
    )
