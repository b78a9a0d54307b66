"""How the names and shapes of published checkpoints become a model's: transformers' own table, read as data."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Read = Callable[[str], torch.Tensor]
Shape = tuple[int, ...]
Steps = tuple[tuple[str, int], ...]
STEPS = {"MergeModulelist": "stack", "Concatenate": "cat"}  # transformers' names of them


@dataclass(frozen=True)
class Recipe:
    """A parameter made of tensors of a checkpoint: lists of them (of one, or one per expert), put together in steps."""

    sources: tuple[tuple[str, ...], ...]
    steps: Steps = ()

    def names(self) -> list[str]:
        return [name for part in self.sources for name in part]

    def make(self, read: Read) -> torch.Tensor:
        """The parameter; one tensor as it is, mapped."""
        if not self.steps:
            return read(self.sources[0][0])
        parts: list[Any] = [[read(name) for name in part] for part in self.sources]
        for step, dim in self.steps:
            if step == "stack":
                parts = [torch.stack(part, dim) for part in parts]
            elif step == "cat":
                parts = [torch.cat([part if isinstance(part, torch.Tensor) else part[0] for part in parts], dim)]
        (made,) = parts
        value: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
        return value

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Of what it makes."""
        made: torch.Tensor = self.make(lambda name: torch.empty(shapes[name], device="meta"))
        return tuple(made.shape)


def recipes_of(model_type: str, names: Sequence[str]) -> dict[str, Recipe]:
    """For the names of a checkpoint of this type, what parameters they make; those that are what they are called, too.

    A conversion that has a step which is not known here makes nothing: its parameters are missing, by name.
    """
    mapping = _table(model_type)
    renamings = [(old, new) for olds, new, steps in mapping if steps is None for old in olds]
    found: dict[str, dict[int, dict[str, str]]] = {}
    steps_of: dict[str, Steps] = {}
    made: dict[str, Recipe] = {}
    for name in names:
        own = name
        for old, new in renamings:
            own = re.sub(old, new, own)  # as transformers does: a pattern
        for patterns, target, steps in mapping:
            at = next((i for i, pattern in enumerate(patterns) if steps is not None and _matches(pattern, own)), None)
            if at is not None and steps is not None:
                whole, number = _put(patterns[at], target, own)
                found.setdefault(whole, {}).setdefault(at, {})[number] = name
                steps_of[whole] = steps
                break
        else:
            made[own] = Recipe(((name,),))
    for whole, parts in found.items():
        sources = tuple(tuple(parts[at][n] for n in sorted(parts[at], key=_number)) for at in sorted(parts))
        made[whole] = Recipe(sources, steps_of[whole])
    return made


def _number(text: str) -> int:
    return int(text or 0)


def _pattern(source: str) -> str:
    return re.escape(source).replace(r"\*", r"(\d+)")


def _matches(source: str, name: str) -> bool:
    return re.search(_pattern(source), name) is not None


def _put(source: str, target: str, name: str) -> tuple[str, str]:
    """The name with the target in the place of the source, and the number that stood at the star."""
    found = re.search(_pattern(source), name)
    assert found is not None
    return name[: found.start()] + target + name[found.end() :], found[1] if found.groups() else ""


def _table(model_type: str) -> list[tuple[list[str], str, Steps | None]]:
    """(source patterns, target, steps) of transformers' conversions; the steps of a mere renaming are None."""
    if not model_type or importlib.util.find_spec("transformers") is None:
        return []
    from transformers import conversion_mapping

    conversions: Any = conversion_mapping
    out: list[tuple[list[str], str, Steps | None]] = []
    for each in conversions.get_checkpoint_conversion_mapping(model_type) or ():
        operations = list(getattr(each, "operations", ()))
        known = [(STEPS[type(o).__name__], int(o.dim)) for o in operations if type(o).__name__ in STEPS]
        if len(known) == len(operations) and len(each.target_patterns) == 1:
            out.append((list(each.source_patterns), each.target_patterns[0], tuple(known) if known else None))
    return out
