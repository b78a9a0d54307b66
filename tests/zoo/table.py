"""Convert the zoo's models and print measured next to expected values."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tests.zoo.case import OUTSIDE, Case
from tests.zoo.each import in_processes
from tests.zoo.index import CASES
from tests.zoo.measure import FALLBACK, WORLDS, Measured, measured, strain, unseen_parameters
from tpcompiler.ir import edit

SHORT = {"all_reduce": "R", "all_gather": "G", "reduce_scatter": "S", "all_to_all": "A"}
SHORT |= {f"{kind} ({FALLBACK})": f"{letter}?" for kind, letter in SHORT.items()}
COLUMNS = ("model", "shapes", "nodes", "worlds", "rel err / allowed", "bytes cut / least", "flops cut / least")
COLUMNS += ("per layer", "outside", "gathers by plan", "fallback bytes", "check", "s", "")
CAPTION = (
    "One device against all ranks in one process; the worst of all worlds and sizes. Collectives found = by hand: "
    "R all_reduce, G all_gather, S reduce_scatter, A all_to_all, ? one that the plan does not need; one entry per kind "
    "of layer. FLOPs: of matrix products and convolutions."
)


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]
    ok: bool
    error: str = ""  # why nothing was measured, what was not seen, or what check says
    checked: int = 0
    refused: int = 0  # by check


def row(case: Case, dynamic: bool) -> Row:
    """One export of a case, on all worlds."""
    shapes = "dynamic" if dynamic else "static"
    try:
        found = [measured(case, dynamic, world) for world in WORLDS]
        unseen = set() if dynamic else unseen_parameters(case)
    except Exception as error:  # torch's own, when exporting, too: the other rows are wanted all the same
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return Row(
            (case.name, shapes, *[""] * (len(COLUMNS) - 3), _verdict("FAILS", False)),
            False,
            f"{case.name}, {shapes}: {said}",
        )
    worst = max((m.worst for m in found), key=strain)
    ok = all(m.ok and not m.alarms for m in found) and not unseen
    last = found[-1]
    collectives = last.program.collectives()
    cells = (
        case.name,
        shapes,
        str(sum(1 for _ in edit.calls(last.program.only.original().graph))),
        ", ".join(str(m.world) for m in found),
        _verdict(f"{worst.rel:.1e} / {worst.tolerance:.1e}", all(m.equal for m in found)),
        _verdict(f"{min(m.cut for m in found):.3f} / {case.cut}", all(m.cut_enough for m in found)),
        _verdict(f"{min(m.flops for m in found):.3f} / {case.flops}", all(m.flops_enough for m in found)),
        *(_verdict(text, all(m.counted for m in found)) for text in _collectives(found)),
        str(sum(c.why == "plan-demanded" for c in collectives)),
        f"{sum(c.wire_bytes for c in collectives if c.why == FALLBACK):,}",
        _verdict(f"{sum(not m.alarms for m in found)} sound", not any(m.alarms for m in found)),
        f"{sum(m.seconds for m in found):.0f}",
        _verdict(("pending" if case.pending else "ok") if ok else "FAILS", ok),
    )
    said = [f"{case.name}: whether these matter is not as stated: {', '.join(sorted(unseen))}"] if unseen else []
    said += [f"{case.name}, {shapes}, {m.world} ranks: {alarm}" for m in found for alarm in m.alarms]
    return Row(cells, ok, "\n".join(said), len(found), sum(bool(m.alarms) for m in found))


def _verdict(text: str, ok: bool) -> str:
    return text if ok else f"[red]{text}[/]"


def _collectives(found: Sequence[Measured]) -> tuple[str, str]:
    """`2R 3R = 2R 3R` per kind of layer, and outside of layers; worlds that differ stand side by side."""
    case = found[0].case
    each = (" ".join(_layers(case, m.found)) for m in found)
    inside = f"{_joined(each)} = {' '.join(_layers(case, case.by_hand()))}" if case.layers else ""
    outside = (_kinds(m.found, OUTSIDE) for m in found)
    return inside, f"{_joined(outside)} = {_kinds(case.by_hand(), OUTSIDE)}"


def _layers(case: Case, counts: Counter[tuple[str, str]]) -> list[str]:
    return [
        _joined(_kinds(counts, layers.path.replace("*", str(i))) for i in range(layers.count)) for layers in case.layers
    ]


def _kinds(counts: Mapping[tuple[str, str], int], where: str) -> str:
    made = (f"{n}{SHORT[kind]}" for (place, kind), n in sorted(counts.items()) if place == where)
    return "+".join(made) or "0"


def _joined(texts: Iterable[str]) -> str:
    return "|".join(dict.fromkeys(texts))


def _rows(name: str) -> list[Row]:
    case = CASES[name]
    return [row(case, dynamic) for dynamic in ((False, True) if case.dims else (False,))]


def main(names: Sequence[str], processes: int = 2) -> int:
    """Print the table; 1 if any row fails, 2 for a name that is no case. No processes: all is done in this one."""
    console = Console(width=None if sys.stdout.isatty() else 230)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        console.print(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
        return 2
    table = Table(*COLUMNS, caption=CAPTION)
    rows = []
    asked = list(names or CASES)
    for name, made in zip(asked, in_processes(_rows, asked, processes), strict=True):
        rows += made
        for each in made:
            table.add_row(*each.cells)
        print(f"{name}: {', '.join(each.cells[-1] for each in made)}", file=sys.stderr, flush=True)
        if not CASES[name].dims:
            table.add_row("", f"static: {CASES[name].static_because}")
    console.print(table)
    console.print(f"check: {sum(r.checked for r in rows)} conversions, {sum(r.refused for r in rows)} of them refused")
    for case in (CASES[name] for name in asked if CASES[name].pending):
        console.print(f"{case.name} is pending: {case.pending}", markup=False, soft_wrap=True)
    for text in (r.error for r in rows if r.error):
        console.print(text, style="red", markup=False, soft_wrap=True)
    return 0 if all(r.ok for r in rows) else 1
