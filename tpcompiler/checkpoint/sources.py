"""Find the tensors of a checkpoint that make each leaf of a program."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tpcompiler.checkpoint.conversion import Recipe, base_prefix, recipes_of
from tpcompiler.checkpoint.ranks import Source
from tpcompiler.errors import ArtifactError, explaining, option
from tpcompiler.runtime.weights import TensorEntry

SHOWN = 6
SAME = "give the checkpoint of the same model"
Rename = Callable[[str], str]  # a name in the program -> the name in the checkpoint


def find_sources(leaves: Sequence[TensorEntry], checkpoint: Source, *, partial: bool = False) -> dict[str, Recipe]:
    """Return a recipe for every leaf: by its name, by its name with another prefix, or by transformers' conversions.

    An optional leaf has no recipe if the checkpoint has nothing for it. `partial`: ignore tensors that no leaf uses.

    Raises:
        ArtifactError: a leaf has no tensor, or one of another dtype or shape, names of a tied leaf have different
            values,
            or no leaf uses a tensor; all faults at once. Or transformers' conversions make two names equal.
    """
    recipes = {name: Recipe(((name,),)) for name in checkpoint.tensors}
    rename = _find_renaming(leaves, recipes, checkpoint.config)
    if any(recipes.keys().isdisjoint(_names(leaf, rename)) and not leaf.is_optional for leaf in leaves):
        # only if names are missing: transformers takes seconds to import
        with explaining(f"{checkpoint.path} does not fit the program", SAME, ValueError):
            recipes = recipes_of(checkpoint.config, list(checkpoint.tensors))
        rename = _find_renaming(leaves, recipes, checkpoint.config)
    chosen: dict[str, Recipe] = {}
    wrong: list[str] = []
    buffers = 0  # that the checkpoint lacks
    for leaf in leaves:
        names = [name for name in _names(leaf, rename) if name in recipes]
        if not names and leaf.is_optional:
            continue
        if not names:
            near = _find_near(leaf.name, rename, recipes)
            buffers += leaf.is_buffer
            wrong.append(f"it has no {leaf.name!r}" + (f" (it has {near!r})" if near else ""))
            continue
        chosen[leaf.name] = recipes[names[0]]
        misfits = [each for name in names if (each := _misfit(name, recipes[name], leaf, checkpoint))]
        if not misfits:  # a checkpoint may store all names of a tied leaf
            first = names[0]
            misfits = [
                f"{first!r} and {other!r} have different values, and the program ties them"
                for other in names[1:]
                if not _are_equal(recipes[first].make(checkpoint.read), recipes[other].make(checkpoint.read))
            ]
        wrong += misfits
    used = {
        part for leaf in leaves for name in _names(leaf, rename) if name in recipes for part in recipes[name].names()
    }
    more = [] if partial else sorted(checkpoint.tensors.keys() - used)
    wrong += [f"it has {name!r}, which the program does not take" for name in more]
    if wrong:
        rest = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        help = SAME
        if len(wrong) == len(more):
            help = f"ignore the other tensors with {option('--ignore-unused', 'partial=True')}"
        elif len(wrong) == buffers:
            help += ", or export it with persistent=False for a buffer that keeps the constructor's value"
        raise ArtifactError(f"{checkpoint.path} does not fit the program: {'; '.join(wrong[:SHOWN])}{rest}", help=help)
    return chosen


def _names(leaf: TensorEntry, rename: Rename) -> list[str]:
    return list(dict.fromkeys(map(rename, (leaf.name, *leaf.aliases))))


def _misfit(name: str, recipe: Recipe, leaf: TensorEntry, checkpoint: Source) -> str:
    """Return the reason why a tensor of the checkpoint cannot be the leaf; empty if it can."""
    dtypes = {checkpoint.tensors[part].dtype for part in recipe.names()}
    try:
        shape = recipe.shape({part: checkpoint.tensors[part].shape for part in recipe.names()})
    except (RuntimeError, IndexError):  # torch's, for parts that cannot be stacked
        return f"the parts of {name!r} differ in shape"
    if shape != leaf.shape:
        return f"{name!r} is {list(shape)}, the program takes {list(leaf.shape)}"
    if dtypes != {leaf.dtype}:
        return f"{name!r} is of {' and '.join(sorted(map(str, dtypes)))}, the program takes {leaf.dtype}"
    return ""


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits, so that NaN equals itself."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))


def _find_renaming(leaves: Sequence[TensorEntry], stored: Mapping[str, object], config: Mapping[str, object]) -> Rename:
    """Find the prefix that the checkpoint's names have and the program's lack, or the reverse.

    Either all names of the program differ by it, or transformers declares it for the model's base. A prefix that fits
    only some names would fill `model.a` from another tensor `a`.
    """
    own = {name for leaf in leaves for name in (leaf.name, *leaf.aliases)}
    lacking = [leaf for leaf in leaves if stored.keys().isdisjoint((leaf.name, *leaf.aliases))]
    if len(lacking) == len(leaves):
        ends: dict[str, list[str]] = {}
        for name in stored:
            for end in _ends(name):
                ends.setdefault(end, []).append(name)
        votes = Counter(pair for leaf in leaves for pair in _prefixes(leaf, stored, ends))
        best = [pair for pair in votes if votes[pair] == max(votes.values())]
        if len(best) == 1 and not _is_of_others(best[0][0], own, stored):
            drop, add = best[0]
            return lambda name: add + name[len(drop) :] if name.startswith(drop) else name
    if lacking and (prefix := base_prefix(config)):
        if not _has_prefix(stored, prefix):
            short = {name: name.removeprefix(prefix) for name in own}
            if len(set(short.values())) == len(short):
                return lambda name: name.removeprefix(prefix)
        elif not _has_prefix(own, prefix) and not any(name in stored and prefix + name in stored for name in own):
            return lambda name: name if name in stored else prefix + name
    return lambda name: name


def _has_prefix(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _is_of_others(drop: str, own: Iterable[str], stored: Iterable[str]) -> bool:
    """Return True if only tensors that the program does not use have the prefix that its own names would lose."""
    return bool(drop) and _has_prefix(stored, drop) and not _has_prefix(own, drop + drop)


def _prefixes(leaf: TensorEntry, stored: Mapping[str, object], ends: Mapping[str, list[str]]) -> set[tuple[str, str]]:
    """Return the prefixes (to drop, to add) that turn one of a leaf's names into one of the checkpoint's."""
    names = (leaf.name, *leaf.aliases)
    less = {(name[: -len(rest)], "") for name in names for rest in _ends(name) if rest in stored}
    return less | {("", longer[: -len(name)]) for name in names for longer in ends.get(name, ())}


def _ends(name: str) -> list[str]:
    """Return `b.c` and `c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[at:]) for at in range(1, len(parts))]


def _find_near(name: str, rename: Rename, stored: Mapping[str, object]) -> str:
    same = [each for each in stored if each.endswith(f".{name}") or name.endswith(f".{each}")]
    return next(iter([*same, *difflib.get_close_matches(rename(name), stored, 1)]), "")
