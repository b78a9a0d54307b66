"""Plans: patterns of names, each with a style, and the assignment of entries to a program's names."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tpcompiler.errors import PlanError, UnsupportedError, option
from tpcompiler.ir.names import fold_names, modules_around
from tpcompiler.plan.file import CONFIG, config_plan, is_config, read_plan_file
from tpcompiler.plan.styles import AUTO, REFUSED, Style, read_style

SHOWN = 4  # names of a program listed in an error
MAX_STARS = 100  # per pattern: module names are not that deep, and Python is slow with so many groups


@dataclass(frozen=True)
class PlanEntry:
    """One line of a plan: the style of every module, parameter or buffer whose name matches the pattern.

    In a pattern, `*` matches one component of the name or a part of one (`layer_*`), and `**` any number of components,
    including none.
    """

    pattern: str
    style: Style
    where: str = field(compare=False)  # 'plan.yaml line 4 ("*.up.weight": "S(0)")'

    def matches(self, fqn: str) -> bool:
        """Return True if the pattern matches the whole name."""
        return self._regex.fullmatch(fqn + ".") is not None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        # Match the name plus a trailing ".", so that every component ends in one and "**" needs no special cases. The
        # text between two stars is matched at its first fit only, so that many stars take no longer.
        groups = itertools.count()

        def first_fit(text: str) -> str:
            name = f"g{next(groups)}"
            return f"(?=(?P<{name}>{text}))(?P={name})"

        def component(part: str) -> str:
            begin, *rest = map(re.escape, re.split(r"\*+", part))
            middle, end = rest[:-1], "".join(f"[^.]*{last}" for last in rest[-1:])
            return "".join([begin, *(first_fit(f"[^.]*?{text}") for text in middle), end, r"\."])

        runs: list[list[str]] = [[]]
        for part in self.pattern.split("."):
            runs.append([]) if part == "**" else runs[-1].append(part)
        begin, *rest = ("".join(map(component, run)) for run in runs)
        any_number = r"(?:[^.]+\.)*"
        middle = [first_fit(f"{any_number}?{text}") for text in rest[:-1] if text]
        return re.compile("".join([begin, *middle, *(any_number + last for last in rest[-1:])]))

    @property
    def _generality(self) -> tuple[int, int, int]:
        """A sort key, smaller for more specific patterns: fewer `**`, then fewer `*`, then more literal text."""
        doubles, stars = self.pattern.count("**"), self.pattern.count("*")
        return doubles, stars - 2 * doubles, stars - len(self.pattern)


@dataclass(frozen=True)
class Plan:
    """A user's plan, independent of any program; `fitted` and `assign` apply it to a program's names.

    Attributes:
        of_config: True for the plan of a Hugging Face config, which serves all models of its kind: unmatched entries
            are noted, not refused.
        notes: the entries that were left out.
        gathers: the search may also gather weights and cut the batch ("auto:free").
    """

    entries: tuple[PlanEntry, ...] = ()
    of_config: bool = False
    notes: tuple[str, ...] = ()
    gathers: bool = False

    @property
    def searches(self) -> bool:
        """True if the search decides the layers that no entry names."""
        return any(entry.style == AUTO for entry in self.entries)

    def with_search(self) -> Plan:
        """Return the plan with all other layers left to the search."""
        return self if self.searches else replace(self, entries=(*self.entries, *Plan.of({"**": AUTO.name}).entries))

    @property
    def forms(self) -> Plan:
        """The entries that request another form of the program."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.style.is_form))

    def as_found(self) -> Plan:
        """Return the plan with form entries worded alike, no matter if a file or the search provided them."""
        here = (
            replace(e, where=f"the plan ({json.dumps(e.pattern)}: {json.dumps(e.style.to_data())})")
            if e.style.is_form
            else e
            for e in self.entries
        )
        return replace(self, entries=tuple(here))

    @classmethod
    def of(cls, plan: Plan | Mapping[str, object] | str | os.PathLike[str], *, skip_unsupported: bool = False) -> Plan:
        """Read a plan: a mapping of patterns to styles (see `read_style`), or the path of a YAML or JSON file.

        Also accepts a Hugging Face config, its `config.json`, or that file's directory, and reads its
        `base_model_tp_plan`.

        Args:
            skip_unsupported: leave out, and note, entries with a style that is not supported yet.

        Raises:
            PlanError: the file cannot be read, or an entry is no pattern with a style.
            UnsupportedError: styles that are recognised but not supported.
        """
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, str | os.PathLike):
            path = os.fsdecode(plan)
            path = os.path.join(path, CONFIG) if os.path.isfile(os.path.join(path, CONFIG)) else path
            name = os.path.basename(path)  # reasons in a written program must not name this machine's folders
            rows = read_plan_file(path)
            data: Any = {pattern: style for pattern, style, _ in rows}
            lines = {pattern: f"{name} line {line}" for pattern, _, line in rows}
        else:
            data, name, lines = plan, "the plan", {}
        if of_config := is_config(data):
            data, lines = config_plan(data, name), {}
        if not isinstance(data, Mapping):
            raise PlanError(
                f"{plan!r} is not a plan", help="give a mapping of names to styles, or the path of a YAML or JSON file"
            )
        where = {pattern: lines.get(pattern, name) for pattern in data}
        refused = {pattern: style for pattern, style in data.items() if isinstance(style, str) and style in REFUSED}
        if refused and (len(refused) > 1 or of_config or skip_unsupported):
            # Entries for a layer's own parameters belong to its style.
            inside = {p for p in data if any(p[:at] in refused for at, c in enumerate(p) if c == ".")}
            refused |= {pattern: style for pattern, style in data.items() if pattern in inside}
            if not skip_unsupported:
                names = ", ".join(f"{pattern!r} ({style})" for pattern, style in refused.items())
                raise UnsupportedError(
                    f"plan entries wait for styles that are not supported yet: {names}",
                    help=option("pass --skip-unsupported", "use Plan.of(plan, skip_unsupported=True)")
                    + " to leave their layers whole",
                    asked_by=name,
                )
            data = {pattern: style for pattern, style in data.items() if pattern not in refused}
        notes = tuple(
            f"{pattern!r}: {f'the style {style} is not supported yet' if style in REFUSED else 'left with its layer'}"
            for pattern, style in refused.items()
        )
        entries = tuple(_read_entry(pattern, style, where[pattern]) for pattern, style in data.items())
        return cls(entries, of_config, notes if skip_unsupported else ())

    def fitted(self, names: Iterable[str]) -> Plan:
        """Return the plan in a program's names, which may have a prefix such as `model.` that the plan lacks.

        The prefix is the one that most entries fit; entries that start with `**` fit any. Entries of a config that
        match nothing are left out and noted.

        Raises:
            PlanError: several prefixes fit equally many entries.
        """
        names = list(names)
        loose = [entry for entry in self.entries if not any(map(entry.matches, names))]
        anchored = [entry for entry in self.entries if not entry.pattern.startswith("**")]
        if not loose or not (self.of_config or loose == anchored):
            return self
        fits: dict[str, set[PlanEntry]] = {}
        for name in dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "0", name) for name in names):
            parts = name.split(".")
            for at in range(1, len(parts)):
                tail = ".".join(parts[at:])
                if entries_that_fit := {entry for entry in loose if entry.matches(tail)}:
                    fits.setdefault(".".join(parts[:at]), set()).update(entries_that_fit)
        if not fits:
            return self
        most = max(map(len, fits.values()))
        prefix, *others = (prefix for prefix, entries_that_fit in fits.items() if len(entries_that_fit) == most)
        if others:
            raise PlanError(
                f"the plan's names may be in {prefix!r} and in {others[0]!r}",
                help=f'write whole names, such as "{prefix}.{loose[0].pattern}"',
                asked_by=loose[0].where,
            )
        left = [entry for entry in loose if entry not in fits[prefix] and self.of_config]
        entries = tuple(
            replace(entry, pattern=f"{prefix}.{entry.pattern}") if entry in fits[prefix] else entry
            for entry in self.entries
            if entry not in left
        )
        notes = tuple(f"{entry.pattern!r} matches nothing" for entry in left)
        return Plan(entries, self.of_config, self.notes + notes)

    def assign(self, names: Iterable[str]) -> dict[str, PlanEntry]:
        """Return the most specific matching entry for each name. Names without an entry are absent.

        `names` are all module, parameter and buffer names of a program, without the root's "".

        Raises:
            PlanError: an entry matches nothing, or two equally specific entries request different styles for one name.
        """
        names = list(names)
        rivals: dict[str, list[PlanEntry]] = {}
        matched = {entry: [name for name in names if entry.matches(name)] for entry in self.entries}
        _refuse_unmatched(self.entries, [entry for entry, names_of_entry in matched.items() if names_of_entry], names)
        for entry, names_of_entry in matched.items():
            for name in () if entry.style.rests else names_of_entry:
                rivals.setdefault(name, []).append(entry)
        return {name: _most_specific(rivals[name], name) for name in names if name in rivals}

    def find_resting(self, fqn: str) -> PlanEntry | None:
        """Return the entry that says how a parameter is held between its uses, if there is one."""
        own = [e for e in self.entries if e.style.rests and any(map(e.matches, (fqn, *modules_around(fqn))))]
        return _most_specific(own, fqn) if own else None

    def completed(self, found: Mapping[str, str], names: Iterable[str]) -> Plan:
        """Return the plan with the search's styles for all layers that it does not name, equal ones under one pattern.

        Args:
            found: the search's style per layer, or per weight if a module has several.
            names: as `assign` takes them.
        """
        names, place = list(dict.fromkeys(names)), {name: at for at, name in enumerate(found)}
        named = {name: entry for name, entry in self.assign(names).items() if entry.style != AUTO}
        groups = fold_names({name: found.get(name) for name in names if name not in named})
        of_layers = sorted((place[group[0]], pattern, group) for pattern, group in groups if group[0] in place)
        additions: list[PlanEntry] = []
        for _, pattern, group in of_layers:
            entries = Plan.of({pattern: found[group[0]]}).entries
            others = [name for name in names if entries[0].matches(name) and name not in group]
            if any(name not in named or named[name]._generality >= entries[0]._generality for name in others):
                entries = Plan.of({name: found[name] for name in group}).entries
            additions += entries
        rest = (entry for entry in self.entries if entry.style != AUTO)
        return replace(self, entries=(*rest, *additions)).with_search()

    def to_data(self) -> dict[str, object]:
        """Return the plan as plain JSON data, which `Plan.of` reads back to an equal plan."""
        return {entry.pattern: entry.style.to_data() for entry in self.entries}


def _read_entry(pattern: object, style: object, source: str) -> PlanEntry:
    if not isinstance(pattern, str):
        raise PlanError(
            f"plan pattern {pattern!r} is not text", help='write the name of a layer, such as "*.up"', asked_by=source
        )
    if pattern.count("*") > MAX_STARS:
        raise PlanError(
            f"plan pattern {pattern!r} has {pattern.count('*')} stars",
            help=f"write at most {MAX_STARS}; '**' stands for any number of parts of a name",
            asked_by=source,
        )
    if isinstance(style, type):
        style_text = style.__name__
    else:
        style_text = json.dumps(style) if isinstance(style, str) else repr(style)
    where = f"{source} ({json.dumps(pattern)}: {style_text})"
    parsed = read_style(style, where=where)
    if parsed == AUTO and pattern != "**":
        raise PlanError(
            f"plan entry {pattern!r} is 'auto', which is for '**' alone",
            help='write "**": auto, which leaves to the search what no other entry names',
            asked_by=where,
        )
    return PlanEntry(pattern, parsed, where)


def _refuse_unmatched(entries: Sequence[PlanEntry], matched: Collection[PlanEntry], names: Sequence[str]) -> None:
    """Raise a PlanError if an entry matches none of these names, or the whole plan is for another model."""
    requested = [entry for entry in entries if entry.style != AUTO]  # AUTO may leave nothing to the search
    unmatched = [entry for entry in requested if entry not in matched]
    if not unmatched:
        return
    first = unmatched[0]
    if len(unmatched) < len(requested) or len(requested) == 1:
        raise PlanError(
            f"plan entry {first.pattern!r} matches nothing", help=_nearest(first.pattern, names), asked_by=first.where
        )
    starred = list(dict.fromkeys(_with_stars(name) for name in names))
    layers = [name for name in starred if f"{name}.weight" in starred] or starred
    raise PlanError(
        f"none of the plan's {len(requested)} entries matches: this program has {', '.join(map(repr, layers[:SHOWN]))}"
        f"{', ..' * (len(layers) > SHOWN)}",
        help="give a plan of this model, or " + option("--plan auto", '"auto"') + ", which finds one",
        asked_by=first.where,
    )


def _with_stars(name: str) -> str:
    """Return a name with "*" for layer numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _most_specific(rivals: list[PlanEntry], name: str) -> PlanEntry:
    best, *others = sorted(rivals, key=lambda entry: entry._generality)
    for other in others:
        if other._generality == best._generality and other.style != best.style:
            raise PlanError(
                f"plan entries {best.pattern!r} and {other.pattern!r} ask different styles of {name!r}",
                help=f"add an entry for {name!r}, or make one of the two more specific",
                asked_by=f"{best.where} and {other.where}",
            )
    return best


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Suggest names in the pattern's own form: with "*" for layer numbers, with "**." before a tail."""
    candidates = dict.fromkeys(map(_with_stars, names))
    if pattern.startswith("**.") or "." not in pattern:
        length = len(pattern.removeprefix("**.").split("."))
        candidates |= dict.fromkeys(".".join(["**", *name.split(".")[-length:]]) for name in candidates)
    if "*" not in pattern:
        candidates |= dict.fromkeys(names)
    nearest = difflib.get_close_matches(pattern, candidates, n=3) or list(candidates)[:3]
    if not nearest:
        return "the program has no module and no parameter to name"
    return f"use a name of the program, such as {', '.join(map(repr, nearest))}"


def share_plan(plans: Sequence[Plan], held: Sequence[Collection[str]], used: Sequence[Collection[str]]) -> list[Plan]:
    """Return the plan of each program, without the entries that only other programs use.

    An entry must match in at least one program, and `"**": auto` may leave nothing to the search. A program that holds
    the named weights without using them, as a decoder step holds its encoder's weights, leaves the entry to the
    programs that use them.

    Args:
        plans: one plan in the names of each program.
        held: the names in each program that a plan may use.
        used: the subset that the program's ops use.

    Raises:
        PlanError: an entry matches in no program.
    """
    matched, busy = ([_matches(*both) for both in zip(plans, names, strict=True)] for names in (held, used))
    every = [name for names in held for name in names]
    for plan in plans:
        matching = [entry for entry in plan.entries if any(entry.where in matches for matches in matched)]
        _refuse_unmatched(plan.entries, matching, every)
    elsewhere = set[str]().union(*busy)
    notes = set(plans[0].notes).intersection(*(plan.notes for plan in plans))
    return [
        replace(
            plan,
            entries=tuple(e for e in plan.entries if e.style == AUTO or e.where in own or e.where in has - elsewhere),
            notes=tuple(note for note in plan.notes if note in notes),
        )
        for plan, has, own in zip(plans, matched, busy, strict=True)
    ]


def join_plans(plans: Sequence[Plan]) -> Plan:
    entries = {entry.pattern: entry for plan in plans for entry in plan.entries}
    return replace(plans[0], entries=tuple(entries.values()))


def _matches(plan: Plan, names: Collection[str]) -> set[str]:
    return {entry.where for entry in plan.entries if any(map(entry.matches, names))}
