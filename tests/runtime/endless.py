"""Ways to make reading a .pt2 hang, fill the memory, or reach outside: not tried where the file is trusted."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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


def guard_that_repeats_the_larger_text(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["max(L['mode'], L['mode']) * 4000 * 4000 == 0"]))


def guard_that_repeats_inputs(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["L['given'] * 4000 * 4000 == 0"]))


def maxima_without_end(entries: Entries, marker: Path) -> None:
    """sympy compares them pair by pair."""
    sums = ("+".join(f"s{j}*s{(j + i) % 30}" for j in range(24)) for i in range(1, 17))
    size(entries, f"Max({','.join(sums)})")


def roundings_of_a_sum(entries: Entries, marker: Path) -> None:
    """torch keeps each of them by its text."""
    text = f"Add({','.join(f's{i}' for i in range(1, 1_000))})"
    for _ in range(90):
        text = f"CeilToInt({text})"
    size(entries, text)


def size_in_many_places(entries: Entries, marker: Path) -> None:
    """torch reads it again at each of them."""
    cases = (f"(s77+{i},s77*{i + 2}<(s77+{i})*(s77+{i + 1})*(s77+{i + 2}))" for i in range(2))
    each = {"as_expr": {"expr_str": f"Piecewise({','.join(cases)})", "hint": {"as_int": 3}}}

    def change(data: Any) -> None:
        next(iter(data["graph_module"]["graph"]["tensor_values"].values()))["sizes"] = [each] * 20_000

    changed(entries, MODEL, change)


def hint_without_end(entries: Entries, marker: Path) -> None:
    def change(data: Any) -> None:
        value = next(iter(data["graph_module"]["graph"]["tensor_values"].values()))
        value["sizes"][0] = {"as_expr": {"expr_str": "Mod((s77+1)**5,s77+7)", "hint": {"as_int": 10**4000}}}

    changed(entries, MODEL, change)


def range_without_end(entries: Entries, marker: Path) -> None:
    limits = {"min_val": 2, "max_val": 10**4000}
    changed(entries, MODEL, lambda data: data["range_constraints"].update(s77=limits))


def guards_with_many_parts(entries: Entries, marker: Path) -> None:
    """Of which each is looked for in all that it is a part of."""
    codes = [f"{'+'.join(['L[' + repr(name) + ']'] * 300)} > {i}" for i in range(150) for name in ("mode",)]
    changed(entries, MODEL, lambda data: data.update(guards_code=codes))


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


def power_not_to_be_evaluated(entries: Entries, marker: Path) -> None:
    """It is, for all that its third argument says."""
    size(entries, "Pow(9, 9999999999, 1)")


def exponent_by_name(entries: Entries, marker: Path) -> None:
    size(entries, "Pow(Pow(Pow(Pow(9, e=1000), e=1000), e=1000), e=1000)")


def divisor_of_remainders(entries: Entries, marker: Path) -> None:
    """Each of which is one more unknown."""
    one, two = ("+".join(f"{i}*Mod(s0,{i})**{degree}" for i in range(2, 12)) for degree in (20, 19))
    size(entries, f"FloorDiv({one}+1,{two}+2)")


def absolutes_in_one_another(entries: Entries, marker: Path) -> None:
    text = "s0"
    for number in range(80):
        text = f"Abs({text}-{number + 1})"
    size(entries, text)


def index_of_fractions(entries: Entries, marker: Path) -> None:
    size(entries, "ModularIndexing(s0**Rational(1,3), Add(s1, 1e300), ModularIndexing(s2, s1, 0))")


def texts_far_below(entries: Entries, marker: Path) -> None:
    deep = "[" * 900 + ('"",' * 300_000)[:-1] + "]" * 900
    entries[MODEL] = ('{"stack_trace":' + deep + "," + entries[MODEL].decode()[1:]).encode()


def compute(data: Any, at: int, target: str, *given: dict[str, Any]) -> None:
    """A node that makes the number `evil{at}`."""
    graph, made = data["graph_module"]["graph"], {"as_sym_int": {"as_name": f"evil{at}"}}
    node = {"target": f"_operator.{target}", "name": f"evil{at}", "outputs": [made]}
    node |= {"inputs": [{"name": "", "arg": arg, "kind": 1} for arg in given]}
    graph["nodes"].insert(at, {**node, "metadata": {}, "is_hop_single_tensor_return": None})
    graph["sym_int_values"][f"evil{at}"] = {"as_int": 1}


def chain(entries: Entries, target: str, count: int, *given: dict[str, Any]) -> None:
    """Nodes that each compute with what the one before has made."""

    def change(data: Any) -> None:
        for at in range(count):
            name = {"as_sym_int": {"as_name": f"evil{at - 1}"}}
            args = [name if at and "as_int" in arg and arg["as_int"] == 9 else arg for arg in given]
            compute(data, at, target, *args)

    changed(entries, MODEL, change)


def with_a_computed_exponent(entries: Entries, target: str, kind: str) -> None:
    def change(data: Any) -> None:
        compute(data, 0, "add", {"as_int": 9}, {"as_int": 3 * 10**10})
        compute(data, 1, target, {"as_int": 9}, {kind: {"as_name": "evil0"}})

    changed(entries, MODEL, change)


def power_by_a_computed_number(entries: Entries, marker: Path) -> None:
    with_a_computed_exponent(entries, "pow", "as_sym_int")


def power_by_what_is_called_a_float(entries: Entries, marker: Path) -> None:
    with_a_computed_exponent(entries, "pow", "as_sym_float")


def shift_by_a_computed_number(entries: Entries, marker: Path) -> None:
    with_a_computed_exponent(entries, "lshift", "as_sym_int")


def chain_of_powers(entries: Entries, marker: Path) -> None:
    chain(entries, "pow", 8, {"as_int": 9}, {"as_int": 64})


def chain_of_products(entries: Entries, marker: Path) -> None:
    chain(entries, "mul", 45, {"as_int": 9}, {"as_int": 9})


def text_that_is_repeated(entries: Entries, marker: Path) -> None:
    chain(entries, "mul", 1, {"as_string": "abc"}, {"as_int": 10**9})


def text_that_is_formatted(entries: Entries, marker: Path) -> None:
    chain(entries, "mod", 1, {"as_string": "%2000000000d"}, {"as_int": 1})


def guard_that_formats_a_text(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=["L['mode'] % 5 == 4"]))


def examples_in_a_row(entries: Entries, marker: Path) -> None:
    entries[EXAMPLES] = saved((([1] * 5_000,), {}))


def powers_that_cancel(entries: Entries, marker: Path) -> None:
    one, two = "2**Rational(1,7)", "3**Rational(1,7)"
    size(entries, f"Abs({one}+{two}-(2**Rational(2,7)+3**Rational(2,7)+2*6**Rational(1,7))**Rational(1,2))")


class Doubled:
    """A text that is as long again with every step."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __reduce__(self) -> Any:
        return codecs.encode, (Doubled(self.depth - 1) if self.depth else b"ab", "hex_codec")


def text_that_doubles(entries: Entries, marker: Path) -> None:
    entries[EXAMPLES] = saved(((Doubled(36),), {}))


def tensor_of_any_size(entries: Entries, marker: Path) -> None:
    class Wide:
        def __reduce__(self) -> Any:
            return torch.FloatTensor, (2 * 10**9,)

    entries[EXAMPLES] = saved(((Wide(),), {}))


def list_that_is_repeated(entries: Entries, marker: Path) -> None:
    chain(entries, "mul", 1, {"as_ints": [1]}, {"as_int": 7 * 10**8})


def op_that_prints(entries: Entries, marker: Path) -> None:
    text = [{"name": "s", "arg": {"as_string": "\x1b]0;mine\x07"}, "kind": 1}]
    changed(entries, MODEL, lambda data: relu(data).update(target="torch.ops.aten._print.default", inputs=text))


def text_that_is_filled(entries: Entries, marker: Path) -> None:
    """`inspect` retraces the program, and so runs it."""
    inputs = [
        {"name": name, "arg": arg, "kind": 1}
        for name, arg in (("self", {"as_string": "a"}), ("width", {"as_int": 6 * 10**9}))
    ]
    changed(entries, MODEL, lambda data: relu(data).update(target="torch.ops.aten.zfill.default", inputs=inputs))


NUMBERS = "it has an input check that computes with L['"
ARGUMENTS = "its example inputs are not the arguments that its program takes"
ENDLESS: list[tuple[Callable[[Entries, Path], None], str]] = [
    (guard_with_a_library, f"{MODEL} has an input check that is not a plain comparison: "),
    (guard_that_reads_the_environment, f"{MODEL} has an input check that is not a plain comparison: "),
    (guard_without_end, f"{MODEL} has an input check that is not a plain comparison: '9**9**9 > 1'"),
    (size_without_end, f"{MODEL} has a size that is not a plain expression: '9**9**9'"),
    (quotient_without_end, f"{MODEL} has a size that is not a plain expression: "),
    (number_without_end, f"{MODEL} has a size that is not a plain expression: "),
    (underscores_without_end, f"{MODEL} has a size that is not a plain expression: "),
    (divisor_without_end, f"{MODEL} has a size that is not a plain expression: "),
    (digits_without_end, f"{MODEL} has a size that is not a plain expression: "),
    (guard_that_repeats_a_list, f"{MODEL} has an input check that is not a plain comparison: "),
    (guard_that_repeats_a_text, NUMBERS),
    (guard_that_repeats_the_larger_text, NUMBERS),
    (guard_that_repeats_inputs, NUMBERS),
    (maxima_without_end, f"{MODEL} has a size that is not a plain expression: "),
    (sum_without_end, f"{MODEL} has a size that is not a plain expression: "),
    (rounding_without_end, f"{MODEL} has an input check that is not a plain comparison: "),
    (examples_without_end, ARGUMENTS),
    (bytes_without_end, f"{EXAMPLES} needs a pickle that may create an object of any size ("),
    (names_without_end, f"{MODEL} makes torch count up to a size's name: 'u99999999999'"),
    (power_without_end, f"{MODEL} computes a number that is too large, by '_operator.pow'"),
    (power_by_a_computed_number, f"{MODEL} computes a number that is too large, by '_operator.pow'"),
    (power_by_what_is_called_a_float, f"{MODEL} computes a number that is too large, by '_operator.pow'"),
    (shift_by_a_computed_number, f"{MODEL} computes a number that is too large, by '_operator.lshift'"),
    (roundings_of_a_sum, f"{MODEL} has a size that is not a plain expression: "),
    (hint_without_end, f"{MODEL} has a number that is too large: '1000"),
    (range_without_end, f"{MODEL} has a number that is too large: '1000"),
    (guards_with_many_parts, NUMBERS),
    (power_not_to_be_evaluated, f"{MODEL} has a size that is not a plain expression: 'Pow(9, 9999999999, 1)'"),
    (exponent_by_name, f"{MODEL} has a size that is not a plain expression: "),
    (divisor_of_remainders, f"{MODEL} has a size that is not a plain expression: "),
    (absolutes_in_one_another, f"{MODEL} has a size that is not a plain expression: "),
    (index_of_fractions, f"{MODEL} has a size that is not a plain expression: "),
    (chain_of_powers, f"{MODEL} computes a number that is too large, by '_operator.pow'"),
    (chain_of_products, f"{MODEL} computes a number that is too large, by '_operator.mul'"),
    (text_that_is_repeated, f"{MODEL} computes with text: '_operator.mul'"),
    (text_that_is_formatted, f"{MODEL} computes with text: '_operator.mod'"),
    (guard_that_formats_a_text, NUMBERS),
    (powers_that_cancel, f"{MODEL} has a size that is not a plain expression: "),
    (text_that_doubles, f"{EXAMPLES} needs a pickle that may create an object of any size (_codecs.encode)"),
    (tensor_of_any_size, f"{EXAMPLES} needs a pickle that may create an object of any size (torch.FloatTensor)"),
    (list_that_is_repeated, f"{MODEL} computes with lists: '_operator.mul'"),
    (op_that_prints, f"{MODEL} calls an op that prints: 'torch.ops.aten._print.default'"),
    (
        text_that_is_filled,
        f"{MODEL} calls one of TorchScript's own ops, without a tensor: 'torch.ops.aten.zfill.default'",
    ),
    (examples_in_a_row, ARGUMENTS),
]
