"""The checked-in results: `shardable.txt`, `results.json`, and docs/ops.md, which `make docs` makes of them and of the rules."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from tests.op_db.reasons import reason_of
from tests.rules.sample import node_of
from tests.rules.samples import SAMPLES, written_of
from tools.measured import measured_line
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import _RULES

HERE = Path(__file__).parent
LINES, RESULTS, PAGE = HERE / "shardable.txt", HERE / "results.json", HERE.parents[1] / "docs" / "ops.md"
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Entry:
    """A row of the page: what the rule of one op says of its samples."""

    op: str
    texts: tuple[str, ...]
    shards: str
    options: str

    @property
    def stamp(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]


@cache
def registry() -> tuple[Entry, ...]:
    """The rules as the samples of tests/rules show them, by op."""
    texts: dict[Any, dict[str, None]] = defaultdict(dict)
    options: dict[Any, dict[str, None]] = defaultdict(dict)
    for sample in SAMPLES:
        if sample.text is not None and sample.target in _RULES:
            written = written_of(node_of(sample))
            assert written is not None
            texts[sample.target][_plain(written.text)] = None
            options[sample.target].update(dict.fromkeys(_options(written, _RULES[sample.target].relayout)))
    return tuple(
        Entry(str(target), tuple(texts[target]), _RULES[target].shards, "; ".join(options[target]))
        for target in sorted(texts, key=str)
    )


def _options(written: RuleText, relayout: bool) -> list[str]:
    options = ["relayout"] * relayout
    options += ["linear in " + " and ".join(map(str, group)) for group in written.linear]
    options += [f"leaves P({written.reduce})"] * (written.reduce != "sum")
    options += ["own body"] * bool(written.local)
    return options + [f"sizes {argument}" for argument in (*written.sizes, *written.counts)]


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace(" ,", ",")


@cache
def fingerprint() -> str:
    """Of all that the rules say of their samples: figures that were measured with other rules are stale."""
    return hashlib.sha256("".join(entry.stamp for entry in registry()).encode()).hexdigest()[:12]


def lines_of(rows: Rows) -> tuple[dict[str, str], dict[str, Any]]:
    """(line -> why it is not offered or "", for every line that is shardable in all calls; figures)."""
    found = {(row["call"], *cut) for row in rows["shardable"] for cut in map(tuple, row["sound"])}
    total: Counter[str] = Counter()
    sound: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    why: dict[str, Counter[str]] = defaultdict(Counter)
    measured = {row["call"] for row in rows["shardable"]}
    for row in rows["rules"]:
        for line, operand, dim, declined in row.get("declined", ()) if row.get("call") in measured else ():
            total[line] += 1
            if (row["call"], line, operand, dim) in found:
                sound[line] += 1
                kept[line] += not declined
                why[line][declined] += bool(declined)
    always = {line: +why[line] for line in sorted(total) if sound[line] == total[line]}
    cuts = {"shardable": sound.total(), "offered": kept.total()}
    return {line: reasons.most_common(1)[0][0] if reasons else "" for line, reasons in always.items()}, cuts


def figures(rows: Rows) -> dict[str, Any]:
    """What is checked in of a run."""
    lines, cuts = lines_of(rows)
    per_op: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for line, why in lines.items():
        per_op[line.split()[0]][0] += not why
        per_op[line.split()[0]][1] += 1
    judged = [row for row in rows["rules"] if "verdict" in row]
    stamps = {entry.op: entry.stamp for entry in registry()}
    return {
        "measured": measured_line("make ops"),
        "torch": torch.__version__.split("+")[0],
        "calls": dict(sorted(Counter(row["verdict"] for row in judged).items())),
        "ops": dict(sorted(Counter(what for _, what in {(row["op"], row["verdict"]) for row in judged}).items())),
        "whole": dict(sorted(Counter(row["what"] for row in rows["whole"]).items())),
        "lines": {"shardable": len(lines), "offered": sum(not why for why in lines.values())},
        "cuts": cuts,
        "no rule": sorted({row["op"] for row in judged if row["verdict"] == "no rule"}),
        "pointwise": len({row["op"] for row in judged if row["verdict"] == "right"} - stamps.keys()),
        "stamps": stamps,
        "per_op": dict(sorted(per_op.items())),
    }


def lines_text(lines: Mapping[str, str]) -> str:
    """shardable.txt: those that the rules offer, then the others by reason."""
    sections: dict[str, list[str]] = defaultdict(list)
    for line, why in lines.items():
        sections[f"not offered: {reason_of(why)}" if why else "offered"].append(line)
    text = (
        "# Dims of operands that can be cut, as <op> <operand> <dim from the last; `dim`: the one that the call names>.\n"
        "# Found by running all of torch's sample inputs on shards. Written by tools/op_coverage.py.\n"
    )
    for title in sorted(sections, key=lambda title: (title != "offered", title)):
        text += f"\n[{title}]\n" + "".join(f"{line}\n" for line in sections[title])
    return text


def read_lines() -> dict[str, str]:
    """line -> the section that it stands in."""
    section, found = "", {}
    for line in LINES.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            found[line] = section
    return found


def page(results: Mapping[str, Any]) -> str:
    """Return docs/ops.md. A figure that was measured with another rule of its op is left out."""
    lines, cuts, calls, whole = (Counter(results[name]) for name in ("lines", "cuts", "calls", "whole"))
    judged = calls["right"] + calls["wrong"] + calls["crash"]
    text = f"""# Ops

{results["measured"]}

Written by `make ops` from the rules and from runs over torch {results["torch"]}'s own op database, which holds sample inputs
of every op that torch tests. [write-a-rule.md](write-a-rule.md) explains rules, their notation and their options. An op
[without a rule](#ops-without-a-rule) is correct too: its operands are gathered, and the report says so.

- **The rules by themselves**: {judged:,} distinct calls that have a rule were run on the shards of 2 and 3 ranks in every way
  that the rule offers: {calls["right"]:,} right, {calls["wrong"]} wrong, {calls["crash"]} crashes. {calls["no rule"]:,} calls have no rule.
- **Through the whole compiler**: samples exported, one dim of one input sharded over 2 ranks, converted, run, compared:
  {whole["right"]:,} right without a fallback, {whole["gathered"]:,} right with a reported one, {whole["refused"]} refused by name, {whole["wrong"]} wrong, {whole["crash"]} crashes.
- **Dims that can be sharded**: {lines["shardable"]:,} dims of operands can be sharded, by execution of every sample
  (`tests/op_db/shardable.txt`); the rules offer {lines["offered"]:,} of them ({_percent(lines)}).
  Counted by call, {cuts["offered"]:,} of {cuts["shardable"]:,} ({_percent(cuts)}).

In addition to the ops below, the overloads that torch tags as pointwise share one rule ({results["pointwise"]} of them are among the calls):
operands broadcast, every dim may be sharded.
The last column counts the dims of operands that the rule offers, of those that can be sharded. It is empty if torch has no
sample, and `?` if the rule is newer than the measurement: the next `make ops` (hours) replaces it.

| op | rule, as its samples show it | shards | options | offered |
|---|---|---|---|---|
"""
    for entry in registry():
        count = "{} of {}".format(*results["per_op"][entry.op]) if entry.op in results["per_op"] else ""
        count = count if results["stamps"].get(entry.op) == entry.stamp else "?"
        texts = "<br>".join(f"`{rule}`" for rule in entry.texts[:3]) + ("<br>.." if len(entry.texts) > 3 else "")
        op = entry.op.removeprefix("aten.")
        text += f"| {op} | {texts} | {entry.shards} | {entry.options} | {count} |\n"
    without = [op for op in results["no rule"] if op not in {entry.op for entry in registry()}]
    names = fill(" ".join(op.removeprefix("aten.") for op in without), 120, break_on_hyphens=False)
    return f"{text}\n## Ops without a rule\n\nOf the ops above, a rule may decline a call. These have no rule at all:\n\n```\n{names}\n```\n"


def _percent(counted: Mapping[str, int]) -> str:
    return f"{100 * counted['offered'] / max(counted['shardable'], 1):.1f}%"


def write(rows: Rows) -> None:
    """Put a run's results into the repository."""
    LINES.write_text(lines_text(lines_of(rows)[0]), encoding="utf-8")
    RESULTS.write_text(json.dumps(figures(rows), indent=1) + "\n", encoding="utf-8")


def write_page() -> None:
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
