"""What each page of measurements is about, and when which part of it was measured with which versions.

    python -m tools.measured PAGE [PART ...]       record that these parts, or all, were measured just now

`tools/measured.json` holds a stamp of every part's subject: the config of a model, the shapes of a benchmark, the name
of a step. tests/test_measured_pages.py fails where the subject is another one by now, where a part was never measured,
where the figures are those of an earlier minor version, and where a page has a date and no record. The tools that write
a page record themselves what they measured; for a page that is written by hand, this command does it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpcompiler import __version__

ROOT = Path(__file__).parents[1]
DOCS, RECORD = ROOT / "docs", Path(__file__).with_name("measured.json")
LINE = re.compile(r"^Measured on \d{4}-\d\d-\d\d.*: `.*`\.$", re.MULTILINE)


class Measured(NamedTuple):
    """One part of a page."""

    subject: str
    date: str
    tpcompiler: str
    torch: str


class Page(NamedTuple):
    """The command that measures a page's parts, and the subject of each by name."""

    command: str
    parts: Callable[[], Mapping[str, Any]]


def _accuracy() -> Mapping[str, Any]:
    from tools.bench_published import subjects

    return subjects()


def _architectures() -> Mapping[str, Any]:
    from tools.hf_models import ROWS

    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^transformers==(\d+\.\d+).*>=", pins, re.MULTILINE)
    return {row.model_type: [row.head, row.sizes, version] for row in ROWS}


def _compat() -> Mapping[str, Any]:
    from tools.compat import cases

    return {case.part: None for case in cases()}


def _decisions() -> Mapping[str, Any]:
    from tools.bench_cost import NAMES
    from tools.bench_decisions import subject

    return {"bench_auto": None, "bench_cost": NAMES, "bench_decisions": subject()}


def _decoding() -> Mapping[str, Any]:
    from tools.decode_bytes import LATENT, NAMES, ROOM, SIZES

    return {name: [ROOM, SIZES, LATENT] for name in NAMES}


def _gpu() -> Mapping[str, Any]:
    from tools.gpu_check import DTYPES, PLAN
    from tools.gpu_steps import PHASES, SHAPES

    return {"gpu_zoo": None, "gpu_check": [PLAN, DTYPES], "gpu_steps": [SHAPES, PHASES]}


def _ops() -> Mapping[str, Any]:
    from tools.op_coverage import PARTS

    return dict.fromkeys(PARTS)


def _scale() -> Mapping[str, Any]:
    from tools.bench_cut import SMALL
    from tools.scale import DEGREES, MODELS

    return {**{name: [config, DEGREES] for name, config in MODELS.items()}, "memory": SMALL}


def _trust() -> Mapping[str, Any]:
    from tests.runtime.faults import FAULTS
    from tests.trust.kinds import KINDS

    kinds = {"mutants": sorted(KINDS), "faults": sorted(FAULTS)}
    return {**dict.fromkeys(("large", "kills", "zoo", "random")), **kinds}


PAGES = {
    "accuracy.md": Page("python -m tools.bench_published --auto --write", _accuracy),
    "architectures.md": Page("python -m tools.hf_table --write", _architectures),
    "compat.md": Page("make compat", _compat),
    "decisions.md": Page("python -m tools.bench_auto", _decisions),
    "decoding.md": Page("python -m tools.decode_bytes --write", _decoding),
    "gpu.md": Page("make gpu-check", _gpu),
    "ops.md": Page("make ops", _ops),
    "scale.md": Page("python -m tools.scale", _scale),
    "trust.md": Page("make trust", _trust),
}


def stamp(subject: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(subject, sort_keys=True, default=str).encode()).hexdigest()[:8]


def read() -> dict[str, dict[str, Measured]]:
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return {page: {part: Measured(*row) for part, row in parts.items()} for page, parts in found.items()}


def front_line(page: str, found: Mapping[str, Measured] | None = None) -> str:
    """The line that the page carries."""
    rows = (read().get(page, {}) if found is None else found).values()

    def span(values: Iterable[str], key: Callable[[str], Any] = str) -> str:
        ordered = sorted(set(values), key=key)
        return ordered[0] + (f" to {ordered[-1]}" if len(ordered) > 1 else "")

    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    when = span(row.date for row in rows)
    ours, torches = (span((getattr(row, each) for row in rows), numbers) for each in ("tpcompiler", "torch"))
    return f"Measured on {when} with tpcompiler {ours} and torch {torches}: `{PAGES[page].command}`."


def record(page: str, parts: Iterable[str], torch_version: str = torch.__version__) -> None:
    """Note that parts of a page were measured today, forget those that are gone, and write the page's line."""
    found, subjects = read(), PAGES[page].parts()
    rows = {part: row for part, row in found.get(page, {}).items() if part in subjects}
    version = torch_version.partition("+")[0]
    rows |= {part: Measured(stamp(subjects[part]), f"{date.today()}", __version__, version) for part in parts}
    found[page] = {part: rows[part] for part in subjects if part in rows}
    lines = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(part)}: {json.dumps(row)}" for part, row in found[name].items())
        + "\n }"
        for name in sorted(found)
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    if not (DOCS / page).exists():  # `make docs` writes it, with this line
        return
    text = (DOCS / page).read_text(encoding="utf-8")
    (DOCS / page).write_text(LINE.sub(lambda _: front_line(page), text, count=1), encoding="utf-8")


def faults(page: str, text: str, rows: Mapping[str, Measured]) -> list[str]:
    """Why a page is not what its tool would write of its subject today."""
    subjects, minor = PAGES[page].parts(), __version__.rpartition(".")[0]
    found = [f"{part}: never measured" for part in subjects if part not in rows]
    found += [f"{part}: is no longer measured" for part in rows if part not in subjects]
    for part, row in rows.items():
        if part in subjects and row.subject != stamp(subjects[part]):
            found.append(f"{part}: changed since {row.date}")
        if row.tpcompiler.rpartition(".")[0] != minor:
            found.append(f"{part}: measured with tpcompiler {row.tpcompiler}")
    if front_line(page, rows) not in text:
        found.append(f"lacks the line {front_line(page, rows)!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--torch", default=torch.__version__, help="the version of torch, if not this one")
    asked = parser.parse_args()
    known = PAGES[asked.page].parts()
    if unknown := sorted(set(asked.parts) - known.keys()):
        parser.error(f"{asked.page} has no part {unknown[0]!r}; it has {', '.join(known)}")
    record(asked.page, asked.parts or known, asked.torch)


if __name__ == "__main__":
    main()
