"""Ways to make reading a .pt2 hang, fill the memory, or reach outside: not tried where the file is trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime.poisons import EXAMPLES, MODEL, Entries, changed, relu, saved, size


def guard_with_a_library(entries: Entries, marker: Path) -> None:
    """dlopen by a subscript."""
    changed(entries, MODEL, lambda data: data.update(guards_code=[f"torch.ctypes.cdll['{marker}.so'] != 0"]))


def guard_that_reads_the_environment(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["torch.os.environ['HOME'] != 0"]))


def guard_without_end(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["9**9**9 > 1"]))


def size_without_end(entries: Entries, marker: Path) -> None:
    size(entries, "9**9**9")


def names_without_end(entries: Entries, marker: Path) -> None:
    """torch counts from 0 to the number in the name."""
    limits = {"min_val": 0, "max_val": 9}
    changed(entries, MODEL, lambda data: data["range_constraints"].update(u99999999999=limits))


def origin_that_opens_a_library(entries: Entries, marker: Path) -> None:
    change = {"source_fn_stack": f"x,torch.ctypes.cdll.{str(marker).replace('.', '_')}"}
    changed(entries, MODEL, lambda data: relu(data)["metadata"].update(change))


def quotient_without_end(entries: Entries, marker: Path) -> None:
    size(entries, "9**Rational(64, Rational(1, 10**18))")


def number_without_end(entries: Entries, marker: Path) -> None:
    size(entries, "1e9999999999")


def underscores_without_end(entries: Entries, marker: Path) -> None:
    size(entries, "1e9_9_9_9_9_9_9_9")


def divisor_without_end(entries: Entries, marker: Path) -> None:
    one, two = ("+".join(f"{i + 2}*s{i}**{degree}" for i in range(6)) for degree in (62, 61))
    size(entries, f"FloorDiv({one}+1,{two}+2)")


def digits_without_end(entries: Entries, marker: Path) -> None:
    size(entries, "Float('0.1', 1000000000)")


def guard_that_repeats_a_list(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["L['x'].shape * 700000000 == 0"]))


def guard_that_repeats_a_text(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["L['mode'] * 4000 * 4000 * 4000 == 0"]))


def sum_without_end(entries: Entries, marker: Path) -> None:
    size(entries, "Pow(Add(s0,s1,s2,s3,s4,s5,s6,s7), 50)")


def rounding_without_end(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["round(5, -9999999999) == 0"]))


def examples_without_end(entries: Entries, marker: Path) -> None:
    value: Any = ()
    for _ in range(40):
        value = (value, value)
    entries[EXAMPLES] = saved(((value,), {}))


class Large:
    def __reduce__(self) -> Any:
        return bytearray, (3 * 10**9,)


def bytes_without_end(entries: Entries, marker: Path) -> None:
    entries[EXAMPLES] = saved(((Large(),), {}))


def power_without_end(entries: Entries, marker: Path) -> None:
    def change(data: Any) -> None:
        numbers = [{"name": "", "arg": {"as_int": number}, "kind": 1} for number in (9999, 99999999)]
        relu(data).update(target="_operator.pow", inputs=numbers)

    changed(entries, MODEL, change)


ENDLESS: list[tuple[Callable[[Entries, Path], None], str]] = [
    (guard_with_a_library, f"{MODEL} has an input check that is no plain comparison: "),
    (guard_that_reads_the_environment, f"{MODEL} has an input check that is no plain comparison: "),
    (guard_without_end, f"{MODEL} has an input check that is no plain comparison: '9**9**9 > 1'"),
    (size_without_end, f"{MODEL} has a size that is no plain expression: '9**9**9'"),
    (origin_that_opens_a_library, f"{MODEL} looks into what is no module, class or op: "),
    (quotient_without_end, f"{MODEL} has a size that is no plain expression: "),
    (number_without_end, f"{MODEL} has a size that is no plain expression: "),
    (underscores_without_end, f"{MODEL} has a size that is no plain expression: "),
    (divisor_without_end, f"{MODEL} has a size that is no plain expression: "),
    (digits_without_end, f"{MODEL} has a size that is no plain expression: "),
    (guard_that_repeats_a_list, f"{MODEL} has an input check that is no plain comparison: "),
    (guard_that_repeats_a_text, f"{MODEL} has an input check that is no plain comparison: "),
    (sum_without_end, f"{MODEL} has a size that is no plain expression: "),
    (rounding_without_end, f"{MODEL} has an input check that is no plain comparison: "),
    (examples_without_end, f"{EXAMPLES} has example inputs without end"),
    (bytes_without_end, f"{EXAMPLES} needs a pickle that may make a thing of any size ("),
    (names_without_end, f"{MODEL} makes torch count up to a size's name: 'u99999999999'"),
    (power_without_end, f"{MODEL} has a power that is too large: '99999999'"),
]
