"""A plan: patterns of names, each with a style, and which of them rules which name."""

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
from tpcompiler.plan.config import config_plan, is_config
from tpcompiler.plan.file import read_plan_file
from tpcompiler.plan.fold import folded
from tpcompiler.plan.styles import AUTO, REFUSED, Style, read_style

CONFIG = "config.json"
SHOWN = 4  # names of a program in an error
MAX_STARS = 100  # in a pattern: a name of a module is not so deep, and Python takes long over so many groups


@dataclass(frozen=True)
class PlanEntry:
    """One line of a plan: the style of every module, parameter or buffer whose name matches the pattern.

    In a pattern `*` stands for one component of the name or a part of one (`layer_*`), `**` for any number of
    components, zero included.
    """

    pattern: str
    style: Style
    where: str = field(compare=False)  # 'plan.yaml line 4 ("*.up.weight": "S(0)")'

    def matches(self, fqn: str) -> bool:
        """Whether the pattern stands for this name, all of it."""
        return self._regex.fullmatch(fqn + ".") is not None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        # Over the name plus a last ".", so that every component ends in one and "**" needs no special cases. What lies
        # between two stars is matched where it first fits, and nowhere else, so that many stars take no longer.
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
        """Smaller is more specific: fewer `**`, then fewer `*`, then more literal text."""
        doubles, stars = self.pattern.count("**"), self.pattern.count("*")
        return doubles, stars - 2 * doubles, stars - len(self.pattern)


@dataclass(frozen=True)
class Plan:
    """What the user asks for, independent of any program; `fitted` and `assign` apply it to the names of one.

    Attributes:
        of_config: whether a Hugging Face config brought it, for all models of its kind: what matches nothing is noted.
        notes: what is left out of it.
    """

    entries: tuple[PlanEntry, ...] = ()
    of_config: bool = False
    notes: tuple[str, ...] = ()

    @property
    def searches(self) -> bool:
        """Whether what it does not name is for the search."""
        return any(entry.style == AUTO for entry in self.entries)

    def with_search(self) -> Plan:
        """The plan with the rest left to the search."""
        return self if self.searches else replace(self, entries=(*self.entries, *Plan.of({"**": AUTO.name}).entries))

    @property
    def forms(self) -> Plan:
        """Its entries that ask for another form of the program."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.style.is_form))

    def as_found(self) -> Plan:
        """The plan with the same words for these entries whether a file has them or the search found them."""
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

        Or a Hugging Face config, its `config.json` or the directory of that, of which it is the `base_model_tp_plan`.

        Args:
            skip_unsupported: leave out, and note, entries whose style is not supported yet.

        Raises:
            PlanError: the file cannot be read, or an entry is no pattern with a style.
            UnsupportedError: styles that are recognised but not supported.
        """
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, str | os.PathLike):
            path = os.fsdecode(plan)
            path = os.path.join(path, CONFIG) if os.path.isfile(os.path.join(path, CONFIG)) else path
            name = os.path.basename(path)  # the reasons in a written program name no folder of this machine
            written = read_plan_file(path)
            data: Any = {pattern: style for pattern, style, _ in written}
            lines = {pattern: f"{name} line {line}" for pattern, _, line in written}
        else:
            data, name, lines = plan, "the plan", {}
        if of_config := is_config(data):
            data, lines = config_plan(data, name), {}
        if not isinstance(data, Mapping):
            raise PlanError(
                f"{plan!r} is not a plan", help="give a mapping of names to styles, or the path of a YAML or JSON file"
            )
        where = {pattern: lines.get(pattern, name) for pattern in data}
        waiting = {pattern: style for pattern, style in data.items() if isinstance(style, str) and style in REFUSED}
        if waiting and (len(waiting) > 1 or of_config or skip_unsupported):
            # What is said of a layer's own parameters is meant for its style.
            inside = {p for p in data if any(p[:at] in waiting for at, c in enumerate(p) if c == ".")}
            waiting |= {pattern: style for pattern, style in data.items() if pattern in inside}
            if not skip_unsupported:
                said = ", ".join(f"{pattern!r} ({style})" for pattern, style in waiting.items())
                raise UnsupportedError(
                    f"plan entries wait for styles that are not supported yet: {said}",
                    help=option("pass --skip-unsupported", "use Plan.of(plan, skip_unsupported=True)")
                    + " to leave their layers whole",
                    asked_by=name,
                )
            data = {pattern: style for pattern, style in data.items() if pattern not in waiting}
        notes = tuple(
            f"{pattern!r}: {f'the style {style} is not supported yet' if style in REFUSED else 'left with its layer'}"
            for pattern, style in waiting.items()
        )
        entries = tuple(_read_entry(pattern, style, where[pattern]) for pattern, style in data.items())
        return cls(entries, of_config, notes if skip_unsupported else ())

    def fitted(self, names: Iterable[str]) -> Plan:
        """The plan in the names of a program, whose own names may begin with more than the plan's, such as `model.`.

        The prefix is the one that most entries fit; those that begin with `**` fit any. Entries of a config that fit
        nothing are left out, and noted.

        Raises:
            PlanError: prefixes that as many entries fit.
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
                if found := {entry for entry in loose if entry.matches(tail)}:
                    fits.setdefault(".".join(parts[:at]), set()).update(found)
        if not fits:
            return self
        most = max(map(len, fits.values()))
        prefix, *others = (prefix for prefix, found in fits.items() if len(found) == most)
        if others:
            raise PlanError(
                f"the plan's names may lie in {prefix!r} and in {others[0]!r}",
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
        """The entry that rules each name: the most specific of those that match it. Names without one are absent.

        `names` are all module, parameter and buffer names of a program, without the root's "".

        Raises:
            PlanError: an entry matches nothing, or two equally specific entries want different styles of one name.
        """
        names = list(names)
        rivals: dict[str, list[PlanEntry]] = {}
        matched = {entry: [name for name in names if entry.matches(name)] for entry in self.entries}
        refuse_unmatched(self.entries, [entry for entry, found in matched.items() if found], names)
        for entry, found in matched.items():
            for name in found:
                rivals.setdefault(name, []).append(entry)
        return {name: _most_specific(rivals[name], name) for name in names if name in rivals}

    def completed(self, found: Mapping[str, str], names: Iterable[str]) -> Plan:
        """The plan with what the search found for the layers that it does not name, those alike under one pattern.

        Args:
            found: layer, or weight of several in a module -> style.
            names: as `assign` takes them.
        """
        names, place = list(dict.fromkeys(names)), {name: at for at, name in enumerate(found)}
        ruled = {name: entry for name, entry in self.assign(names).items() if entry.style != AUTO}
        groups = folded({name: found.get(name) for name in names if name not in ruled})
        of_layers = sorted((place[group[0]], pattern, group) for pattern, group in groups if group[0] in place)
        made: list[PlanEntry] = []
        for _, pattern, group in of_layers:
            entries = Plan.of({pattern: found[group[0]]}).entries
            others = [name for name in names if entries[0].matches(name) and name not in group]
            if any(name not in ruled or ruled[name]._generality >= entries[0]._generality for name in others):
                entries = Plan.of({name: found[name] for name in group}).entries
            made += entries
        rest = (entry for entry in self.entries if entry.style != AUTO)
        return replace(self, entries=(*rest, *made)).with_search()

    def to_data(self) -> dict[str, object]:
        """The plan as plain JSON data, from which `Plan.of` makes an equal one."""
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
        written = style.__name__
    else:
        written = json.dumps(style) if isinstance(style, str) else repr(style)
    where = f"{source} ({json.dumps(pattern)}: {written})"
    read = read_style(style, where=where)
    if read == AUTO and pattern != "**":
        raise PlanError(
            f"plan entry {pattern!r} is 'auto', which is for '**' alone",
            help='write "**": auto, which leaves to the search what no other entry names',
            asked_by=where,
        )
    return PlanEntry(pattern, read, where)


def refuse_unmatched(entries: Sequence[PlanEntry], matched: Collection[PlanEntry], names: Sequence[str]) -> None:
    """Raises PlanError where an entry, or all of a plan of another model, match none of these names."""
    asked = [entry for entry in entries if entry.style != AUTO]  # which may leave nothing to the search
    unmatched = [entry for entry in asked if entry not in matched]
    if not unmatched:
        return
    first = unmatched[0]
    if len(unmatched) < len(asked) or len(asked) == 1:
        raise PlanError(
            f"plan entry {first.pattern!r} matches nothing", help=_nearest(first.pattern, names), asked_by=first.where
        )
    known = list(dict.fromkeys(_with_stars(name) for name in names))
    layers = [name for name in known if f"{name}.weight" in known] or known
    raise PlanError(
        f"none of the plan's {len(asked)} entries matches: this program has {', '.join(map(repr, layers[:SHOWN]))}"
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
    """Offer names in the pattern's own form: with "*" for layer numbers, with "**." before a tail."""
    known = dict.fromkeys(map(_with_stars, names))
    if pattern.startswith("**.") or "." not in pattern:
        length = len(pattern.removeprefix("**.").split("."))
        known |= dict.fromkeys(".".join(["**", *name.split(".")[-length:]]) for name in known)
    if "*" not in pattern:
        known |= dict.fromkeys(names)
    nearest = difflib.get_close_matches(pattern, known, n=3) or list(known)[:3]
    if not nearest:
        return "the program has no module and no parameter to name"
    return f"use a name of the program, such as {', '.join(map(repr, nearest))}"
