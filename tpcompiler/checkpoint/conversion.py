"""Map the names and shapes of published checkpoints to a model's: transformers' own table, read as data."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpcompiler.runtime.weightless import weightless

Read = Callable[[str], torch.Tensor]
Shape = tuple[int, ...]
Steps = tuple[tuple[str, int], ...]
STEPS = {"MergeModulelist": "stack", "Concatenate": "cat"}  # transformers' names of the steps


@dataclass(frozen=True)
class Recipe:
    """A parameter made from a checkpoint: lists of tensors (of one, or one per expert) and the steps that join them."""

    sources: tuple[tuple[str, ...], ...]
    steps: Steps = ()

    def names(self) -> list[str]:
        return [name for part in self.sources for name in part]

    def make(self, read: Read) -> torch.Tensor:
        """Make the parameter; a single tensor stays mapped."""
        if not self.steps:
            return read(self.sources[0][0])
        parts: list[Any] = [[read(name) for name in part] for part in self.sources]
        for step, dim in self.steps:
            if step == "stack":
                parts = [torch.stack(part, dim) for part in parts]
            elif step == "cat":
                parts = [torch.cat([part if isinstance(part, torch.Tensor) else part[0] for part in parts], dim)]
        (parameter,) = parts
        value: torch.Tensor = parameter if isinstance(parameter, torch.Tensor) else parameter[0]
        return value

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the parameter."""
        value: torch.Tensor = self.make(lambda name: torch.empty(shapes[name], device="meta"))
        return tuple(value.shape)


def recipes_of(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Recipe]:
    """Return the parameters that a checkpoint's tensors make, by name, including those that keep their names.

    A conversion with an unknown step makes nothing: its parameters are missing, by name.

    Raises:
        ValueError: two names become one, or the parts of a parameter are not numbered 0, 1, ...
    """
    transforms = _transforms(config)
    renamings = [each for each in transforms if not getattr(each, "operations", ())]
    mapping = _table(transforms)
    pieces: dict[str, dict[int, dict[str, str]]] = {}
    steps_of: dict[str, Steps] = {}
    recipes: dict[str, Recipe] = {}
    for name in names:
        own = name
        for renaming in renamings:
            own = renaming.rename_source_key(own)[0]
        for patterns, target, steps in mapping:
            at = next((i for i, pattern in enumerate(patterns) if _matches(pattern, own)), None)
            if at is not None:
                whole, number = _put(patterns[at], target, own)
                parts = pieces.setdefault(whole, {}).setdefault(at, {})
                if (other := parts.setdefault(number, name)) != name:
                    raise ValueError(f"{other!r} and {name!r} are the same part of {whole!r}")
                steps_of[whole] = steps
                break
        else:
            if (one := recipes.setdefault(own, Recipe(((name,),)))).names() != [name]:
                raise ValueError(f"{one.names()[0]!r} and {name!r} are both {own!r}")
    for whole, lists in pieces.items():
        for numbers in lists.values():
            if sorted(map(_number, numbers)) != list(range(len(numbers))):
                have = ", ".join(sorted(numbers, key=_number))
                raise ValueError(f"the parts of {whole!r} are numbered {have}, not 0 to {len(numbers) - 1}")
        if whole in recipes:
            raise ValueError(f"{recipes[whole].names()[0]!r} is {whole!r}, which has parts too")
        sources = tuple(tuple(lists[at][n] for n in sorted(lists[at], key=_number)) for at in sorted(lists))
        recipes[whole] = Recipe(sources, steps_of[whole])
    return recipes


def _number(text: str) -> int:
    return int(text or 0)


def _pattern(source: str) -> str:
    return re.escape(source).replace(r"\*", r"(\d+)")


def _matches(source: str, name: str) -> bool:
    return re.search(_pattern(source), name) is not None


def _put(source: str, target: str, name: str) -> tuple[str, str]:
    """Replace the source by the target in a name; return it with the number at the star."""
    match = re.search(_pattern(source), name)
    assert match is not None
    return name[: match.start()] + target + name[match.end() :], match[1] if match.groups() else ""


def base_prefix(config: Mapping[str, Any]) -> str:
    """Return the prefix that transformers declares for the base of a model, such as `model.`, or an empty text.

    A checkpoint of the base lacks the prefix, and a base model reads checkpoints of a whole model.
    """
    prefix = getattr(_architecture(config), "base_model_prefix", "")
    return f"{prefix}." if isinstance(prefix, str) and prefix else ""


def _architecture(config: Mapping[str, Any]) -> Any:
    """Return the class of transformers that a config names first; None without one."""
    match config.get("architectures"):
        case [str(name), *_] if name.isidentifier() and importlib.util.find_spec("transformers") is not None:
            import transformers

            return getattr(transformers, name, None)
    return None


def _transforms(config: Mapping[str, Any]) -> list[Any]:
    """Return transformers' conversions for a model, including those of its submodels."""
    if not config.get("model_type") or importlib.util.find_spec("transformers") is None:
        return []
    import transformers
    from transformers import conversion_mapping

    conversions: Any = conversion_mapping
    build = _architecture(config)
    if build is not None and hasattr(conversions, "get_model_conversion_mapping"):
        with contextlib.suppress(Exception), weightless():  # else use the conversions of its type
            model = build._from_config(transformers.AutoConfig.for_model(**config))
            return list(conversions.get_model_conversion_mapping(model))
    return list(conversions.get_checkpoint_conversion_mapping(str(config["model_type"])) or ())


def _table(transforms: Sequence[Any]) -> list[tuple[list[str], str, Steps]]:
    """Return (source patterns, target, steps) of the conversions whose steps are all known."""
    out: list[tuple[list[str], str, Steps]] = []
    for each in transforms:
        operations = list(getattr(each, "operations", ()))
        known = [(STEPS[type(o).__name__], int(o.dim)) for o in operations if type(o).__name__ in STEPS]
        if known and len(known) == len(operations) and len(each.target_patterns) == 1:
            out.append((list(each.source_patterns), each.target_patterns[0], tuple(known)))
    return out
