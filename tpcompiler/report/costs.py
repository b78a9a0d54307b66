"""Cost of an artifact's collectives: formulas in its dynamic sizes, and figures at given sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]  # it ships no types

from tpcompiler._torch import sym_expr, sym_hint
from tpcompiler.artifact.collective_records import is_exchange, predict_call, record_seconds, sent_values, transfer_of
from tpcompiler.cost.collective import wire_bytes
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.cost.timeline import StepTime
from tpcompiler.errors import InputsError, option
from tpcompiler.ir import edit
from tpcompiler.ir.names import fold_names, layer_around, times
from tpcompiler.ir.node_placement import records_of
from tpcompiler.ir.shares import mesh_of
from tpcompiler.report.written import Written
from tpcompiler.runtime.records import Collective, Record
from tpcompiler.terminal.printed import format_bytes, format_microseconds
from tpcompiler.terminal.tables import Part, Shown, Table

NAMES = ("batch", "sequence")  # of dims 0 and 1 of the first input that is dynamic there
Expr = Any  # sympy.Expr, which has no types


class Size(Record, frozen=True):
    """A dynamic size by name: the dim of an input, and its range."""

    name: str  # as `--at` takes it
    input: str  # that has it
    dim: int  # of the input
    least: int  # the smallest
    most: int | None  # None where it has no end
    step: int  # what it must be a multiple of, counted from `least`
    value: int  # the one that numbers were computed for


class Cost(Record, frozen=True):
    """Collectives of one kind in one layer."""

    layer: str  # `layers.0`, or the module where none around it has a number
    kind: str  # of the collectives
    count: int  # their number
    formula: str  # wire bytes of one call and rank, of all `count`, in the names of sizes
    wire_bytes: int  # the same at the sizes' values
    seconds: float  # of these on the machine, one after the other

    def row(self) -> tuple[str, ...]:
        """Return the table cells."""
        amounts = format_bytes(self.wire_bytes), format_microseconds(self.seconds)
        return self.layer, self.kind, str(self.count), self.formula, *amounts


def fold_rows(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows that begin with a layer's name, those of repeated layers once, with their number."""
    layers: dict[str, tuple[tuple[str, ...], ...]] = {}
    for layer, *row in rows:
        layers[layer] = (*layers.get(layer, ()), tuple(row))
    return [(pattern, *row, times(names)) for pattern, names in fold_names(layers) for row in layers[names[0]]]


class CostTable(Record, Shown, frozen=True):
    """The collectives of one call by layer and kind, and all of them together."""

    machine: str  # whose seconds are meant
    sizes: list[Size]  # the dynamic ones
    costs: list[Cost]  # by layer and kind
    formula: str  # wire bytes of all, in the names of sizes
    wire_bytes: int  # the same at the sizes' values
    seconds: float  # of all collectives, one after the other
    step: StepTime  # of the whole call, with the sizes of the artifact's example

    def parts(self) -> Iterator[Part]:
        sizes = []
        for size in self.sizes:
            ends = f"{size.least} to {'any' if size.most is None else size.most}"
            sizes.append((size.name, size.input, str(size.dim), ends, str(size.step), str(size.value)))
        yield Table("dynamic sizes", ("name", "input", "dim", "range", "step", "value"), sizes)
        total = Cost("in all", "", sum(each.count for each in self.costs), self.formula, self.wire_bytes, self.seconds)
        rows = [*fold_rows([each.row() for each in self.costs]), (*total.row(), "")]
        headers = ("layer", "kind", "count", "formula", "wire bytes", "us", "")
        yield Table(f"collectives of one call of a rank, us on {self.machine}", headers, rows)
        yield f"one call{' with the sizes of the example' if self.sizes else ''} {self.step.text} on {self.machine}"


def count_costs(
    written: Written, at: Mapping[str, int] | None = None, machine: str | os.PathLike[str] | None = None
) -> CostTable:
    """Count the bytes that a rank sends, as formulas in the dynamic sizes and as numbers (`ParallelProgram.cost`).

    Raises:
        InputsError: a name of no size, or a value that it cannot have.
        MachineError: the description of the machine cannot be read.
    """
    described = machine_of(written.manifest.asked, machine)
    sizes, meant = _sizes(written, dict(at or {}))
    mesh = mesh_of(written.manifest)
    values = {sympy.Symbol(size.name): size.value for size in sizes}
    found: dict[tuple[str, str], list[tuple[Expr, int, float]]] = {}
    for node, record in records_of(written.graph, written.manifest).items():
        sent_each = [edit.fake(value) for value in sent_values(node)]
        whole = sum(math.prod(map(sym_expr, value.shape)) * value.element_size() for value in sent_each)
        ranks, payload = record.group_size, sympy.sympify(whole).xreplace(meant)
        is_known = payload.free_symbols <= values.keys()  # what depends on data is as in the example
        sent = wire_bytes(record.kind, int(payload.xreplace(values)) if is_known else record.payload_bytes, ranks)
        share = payload * sympy.Rational(ranks - 1, ranks) * (2 if record.kind == "all_reduce" else 1)
        if is_exchange(node):  # as the rank that sends most does; all sizes grow alike
            share = sympy.Integer(record.wire_bytes)
            if own := transfer_of(node, mesh).payload_bytes:
                share = payload * sympy.Rational(record.wire_bytes, own)
            sent = int(share.xreplace(values)) if is_known else record.wire_bytes
        seconds = record_seconds(record, sent, described, mesh)
        found.setdefault((layer_of_record(record), record.kind), []).append((share, sent, seconds))
    costs = [Cost(layer, kind, len(each), *_summed(each)) for (layer, kind), each in found.items()]
    summed = _summed([one for each in found.values() for one in each])
    step = predict_call(written.graph, written.manifest, described).total
    return CostTable(described.name, sizes, costs, *summed, step)


def layer_of_record(record: Collective) -> str:
    """`layers.0`, or the module where none around it has a number."""
    return layer_around(record.module) or record.module or "the model"


def _summed(each: list[tuple[Expr, int, float]]) -> tuple[str, int, float]:
    shares, sent, seconds = zip(*each, strict=True) if each else ((), (), ())
    return str(sympy.expand(sum(shares, sympy.Integer(0)))), sum(sent), math.fsum(seconds)


def _sizes(written: Written, at: dict[str, int]) -> tuple[list[Size], dict[Expr, Expr]]:
    """The sizes that the user gives, and what each of the program's symbols is in their names."""
    found, meant, mesh = list[Size](), dict[Expr, Expr](), mesh_of(written.manifest)
    ranges = written.manifest.calling.ranges
    for name, value, sharding in written.inputs():
        for dim, size in enumerate(value.shape):
            ranks = mesh.size(sharding.dims[dim].axes)  # each has as much of a dynamic dim
            expr = sympy.expand(sym_expr(size) * ranks)
            if len(expr.free_symbols) != 1 or expr.free_symbols <= meant.keys():
                continue
            (symbol,) = expr.free_symbols
            step, start = expr.coeff(symbol), expr.subs(symbol, 0)
            if expr != step * symbol + start:
                continue
            taken = {each.name for each in found}
            called = NAMES[dim] if dim < len(NAMES) and NAMES[dim] not in taken else f"{name}.{dim}"
            given = at.pop(called, None)
            low, high = ranges.get(str(symbol), (0, None))
            one = Size(
                called,
                name,
                dim,
                least=int(step * low + start),
                most=None if high is None else int(step * high + start),
                step=int(step),
                value=sym_hint(size) * ranks if given is None else given,
            )
            _refuse_outside(one)
            found.append(one)
            meant[symbol] = (sympy.Symbol(called) - start) / step
    if at:
        known = ", ".join(size.name for size in found)
        raise InputsError(
            f"the program has no dynamic size {next(iter(at))!r}",
            help=f"its sizes are {known}" if known else f"all of its sizes are fixed: leave {option('--at', 'at')} out",
        )
    return found, meant


def _refuse_outside(size: Size) -> None:
    ends = f"from {size.least} to {size.most}" if size.most is not None else f"from {size.least}"
    fits = size.least <= size.value and (size.most is None or size.value <= size.most)
    if not fits or (size.value - size.least) % size.step:
        multiple = f" in steps of {size.step}" if size.step > 1 else ""
        raise InputsError(
            f"{size.name} is {size.value}, and dim {size.dim} of '{size.input}' can be {ends}{multiple}",
            help="give such a number: " + option(f"--at {size.name}=N", f"at={{{size.name!r}: N}}"),
        )
