"""The form of a manifest's fields: checked once, so that readers can rely on the types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Form = Callable[[Any], bool]

PLACEMENT = r"(R|[SP]\([^()\[\]]*\))"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WHY = ("inherent", "plan-demanded", "fallback")
DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b8",
}  # by torch's names; torch's own text for all others
OTHERS = "complex32 complex64 complex128 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
DEEPEST = 8  # of a plan: a name's entry is a text, or a table of texts
MOST_PROGRAMS = 1_000
MOST_DIMS = 64  # of a tensor or a mesh, as in torch
MOST_SHARES = 1 << 22  # of all tensors on all ranks
LARGEST = 1 << 62  # elements or bytes: the largest size that a file can state


def nesting(value: Any) -> int:
    """Return how deep lists and dicts are nested, counted to one more than is allowed."""
    depth, level = 0, [value]
    while depth <= DEEPEST and (level := [part for part in level if isinstance(part, (dict, list))]):
        depth += 1
        level = [each for part in level for each in (part.values() if isinstance(part, dict) else part)]
    return depth


def text(value: Any) -> bool:
    return isinstance(value, str)


def number(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def whole(value: Any) -> bool:
    return type(value) is int and abs(value) < LARGEST


def end(value: Any) -> bool:
    """Accept the end of a range of sizes; None if it is unbounded."""
    return value is None or number(value)


def one_of(*values: str) -> Form:
    return lambda value: isinstance(value, str) and value in values


def some(form: Form) -> Form:
    return lambda value: isinstance(value, list) and all(map(form, value))


def table(key: Form, value: Form) -> Form:
    return lambda given: isinstance(given, dict) and all(key(k) and value(v) for k, v in given.items())


def row(required: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    forms = {**required, **(optional or {})}
    return lambda given: (
        isinstance(given, dict)
        and given.keys() >= required.keys()
        and all(name in forms and forms[name](value) for name, value in given.items())
    )


def sharding(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(rf"{PLACEMENT}|\[{PLACEMENT}(, {PLACEMENT})*\]", value))


def is_whole(text: str) -> bool:
    """Return True if every rank has the whole tensor: `R`, or `[R, R]` on two axes."""
    return not re.search("[SP]", text)


def dtype(value: Any) -> bool:
    return isinstance(value, str) and (value in DTYPES.values() or value in {f"torch.{o}" for o in OTHERS.split()})


def shape(value: Any) -> bool:
    """Accept a list of sizes, symbolic ones as text, with no more elements than a file could hold."""
    if not isinstance(value, list) or len(value) > MOST_DIMS or not all(number(size) or text(size) for size in value):
        return False
    return math.prod(int(size) for size in value if number(size)) < LARGEST


def sha256(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value))


def program(value: Any) -> bool:
    """Accept the name of a sibling directory, which leads nowhere else."""
    return isinstance(value, str) and value.isidentifier()


def static_shape(value: Any) -> bool:
    return shape(value) and all(map(number, value))


def mesh(value: Any) -> bool:
    degrees = table(lambda name: isinstance(name, str) and name.isidentifier(), lambda d: number(d) and d > 0)(value)
    return degrees and 0 < len(value) <= MOST_DIMS and math.prod(value.values()) <= 1 << 16


BOUNDARY = {"name": text, "shape": shape, "dtype": dtype, "sharding": sharding}
TENSOR = {**BOUNDARY, "shape": static_shape, "kind": text}
COLLECTIVE: dict[str, Form] = {
    "kind": one_of(*KINDS),
    "why": one_of(*WHY),
    **dict.fromkeys(("axis", "node", "module", "source", "reason", "reshard"), text),
    **dict.fromkeys(("payload_bytes", "wire_bytes"), number),
    "group_size": lambda value: number(value) and value > 0,
}
CALLING: dict[str, Form] = {
    "takes": text,
    "returns": text,
    "names": some(text),
    "ranges": table(text, lambda ends: isinstance(ends, list) and len(ends) == 2 and all(map(end, ends))),
    "asserted": some(text),
    "constants": some(text),
}
PLACED: Form = lambda value: text(value) or table(text, text)(value)  # noqa: E731


def boundaries(value: Any) -> bool:
    """Accept requested placements, by name or in order."""
    listed = some(lambda each: each is None or PLACED(each))
    return value is None or listed(value) or table(text, PLACED)(value)


PACKAGE: dict[str, Form] = {
    "files": table(lambda name: text(name) and bool(re.fullmatch(r"compiled(_\w+)?\.pt2|runner\.so", name)), sha256),
    "models": table(text, table(text, some(number))),
    "device_type": one_of("cpu", "cuda"),
    "torch": text,
    "compiler": text,
    "strides": table(text, some(number)),
    "capability": some(text),
    "threads": number,
}
PACKED: Form = lambda value: value == {} or row(PACKAGE)(value)  # noqa: E731
PLAN: Form = table(text, lambda value: nesting(value) <= DEEPEST)
ASKED: dict[str, Form] = {"mesh": mesh, "inputs": boundaries, "outputs": boundaries}
ASKED_TOO: dict[str, Form] = {
    "machine": text,
    "collectives": one_of("auto", "symm_mem"),
    "check_indices": lambda value: value is False,
    "plan": lambda value: value == "auto:free" or PLAN(value),
}
FIELDS: dict[str, Form] = {
    "mesh": mesh,
    "groups": table(text, some(some(number))),
    "device_type": one_of("cpu", "cuda"),
    "plan": PLAN,
    "tensors": some(row(TENSOR, {"tied_to": text, "stored_in": program, "persistent": lambda value: value is False})),
    "inputs": some(row(BOUNDARY, {"values": lambda value: some(whole)(value) and len(value) == 2})),
    "outputs": some(row(BOUNDARY)),
    "collectives": some(row(COLLECTIVE)),
    "calling": lambda value: value == {} or row(CALLING)(value),
    "rank_numbers": table(text, some(some(number))),
    "symm_mem": table(text, text),
    "programs": table(lambda name: text(name) and bool(re.fullmatch(r"program(_\d+)?\.pt2", name)), some(number)),
    "asked": lambda value: value == {} or row(ASKED, ASKED_TOO)(value),
    "compiled": PACKED,
    "notes": some(row({"kind": text, "text": text})),
    "output_type": lambda value: value is None or text(value),
    "versions": table(text, text),
    "files": table(text, sha256),
    "format": number,
}


def malformed(data: Mapping[str, Any]) -> str | None:
    """Return the first field with an invalid form, or None."""
    wrong = next((name for name, form in FIELDS.items() if not form(data[name])), None)
    if wrong is None and len(data["tensors"]) * math.prod(data["mesh"].values()) > MOST_SHARES:
        return "tensors"
    if wrong is None and not all(_is_partition(groups, data["mesh"]) for groups in data["groups"].values()):
        return "groups"
    if wrong is None and not _has_rows(data["rank_numbers"], math.prod(data["mesh"].values())):
        return "rank_numbers"
    if wrong is None and data["programs"] and not _is_partition(list(data["programs"].values()), data["mesh"]):
        return "programs"
    return wrong


def malformed_set(data: Mapping[str, Any]) -> bool:
    """Return True if the list of programs is invalid."""
    names = data["programs"]
    listed = some(program)(names) and len(names) <= MOST_PROGRAMS
    return not (listed and PACKED(data.get("compiled", {})) and data.keys() <= {"format", "programs", "compiled"})


def _has_rows(numbers: Mapping[str, Sequence[Sequence[int]]], world: int) -> bool:
    """Return True if there is at most one constant, with a row for every rank and all rows equally long."""
    return len(numbers) <= 1 and all(len(rows) == world and len(set(map(len, rows))) == 1 for rows in numbers.values())


def _is_partition(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> bool:
    """Return True if every rank is in exactly one group."""
    return sorted(rank for ranks in groups for rank in ranks) == list(range(math.prod(mesh.values())))
