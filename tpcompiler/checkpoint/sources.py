"""Which tensors of a checkpoint each leaf of a program is made of."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tpcompiler.checkpoint.conversion import Recipe, recipes_of
from tpcompiler.checkpoint.leaves import Leaf
from tpcompiler.checkpoint.ranks import Source
from tpcompiler.errors import ArtifactError

SHOWN = 6


def find_sources(leaves: Sequence[Leaf], checkpoint: Source, *, partial: bool = False) -> dict[str, Recipe]:
    """A recipe for every leaf: of its name, of that with a prefix more or less, or by transformers' conversions.

    A leaf that has a value gets none where the checkpoint has nothing for it.

    `partial`: leave out what no leaf takes.

    Raises:
        ArtifactError: a leaf without a tensor, one of another dtype or shape, a tensor that no leaf takes; all at once.
    """
    wanted = [name for leaf in leaves for name in (leaf.name, *leaf.aliases)]
    made = {name: Recipe(((name,),)) for name in checkpoint.tensors}
    rename = _find_prefix(wanted, made)
    names_of = [[n for own in (leaf.name, *leaf.aliases) for n in (own, rename(own))] for leaf in leaves]
    pairs = zip(leaves, names_of, strict=True)
    if any(
        made.keys().isdisjoint(names) and not leaf.has_value for leaf, names in pairs
    ):  # only then: transformers takes seconds to import
        made = recipes_of(str(checkpoint.config.get("model_type", "")), list(checkpoint.tensors))
        rename = _find_prefix(wanted, made)
    found: dict[str, Recipe] = {}
    wrong: list[str] = []
    shapes = {name: stored.shape for name, stored in checkpoint.tensors.items()}
    for leaf in leaves:
        names = [n for own in (leaf.name, *leaf.aliases) for n in (own, rename(own)) if n in made]
        if not names and leaf.has_value:
            continue
        if not names:
            near = difflib.get_close_matches(rename(leaf.name), made, 1)
            wrong.append(f"it has no {leaf.name!r}" + (f" (it has {near[0]!r})" if near else ""))
            continue
        recipe = found[leaf.name] = made[names[0]]
        dtypes = {checkpoint.tensors[name].dtype for name in recipe.names()}
        shape = recipe.shape(shapes)
        if shape != leaf.shape:
            wrong.append(f"{names[0]!r} is {list(shape)}, the program takes {list(leaf.shape)}")
        elif dtypes != {leaf.dtype}:
            wrong.append(f"{names[0]!r} is of {' and '.join(map(str, dtypes))}, the program takes {leaf.dtype}")
    used = {name for recipe in found.values() for name in recipe.names()}
    used |= {n for leaf in leaves for own in (leaf.name, *leaf.aliases) for n in (own, rename(own)) if n in made}
    more = [] if partial else sorted(checkpoint.tensors.keys() - used)
    wrong += [f"it has {name!r}, which the program does not take" for name in more]
    if wrong:
        rest = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        only_more = len(wrong) == len(more)
        raise ArtifactError(
            f"{checkpoint.path} does not fit the program: {'; '.join(wrong[:SHOWN])}{rest}",
            help="take what the program names with --partial" if only_more else "give the checkpoint of the same model",
        )
    return found


def _find_prefix(names: Iterable[str], made: Mapping[str, object]) -> Callable[[str], str]:
    """What a name of the program is in the checkpoint: with a prefix less, or more, by which most names are found."""
    own = set(names)
    more: Counter[tuple[str, str]] = Counter()
    for name in own - made.keys():
        more.update((name[: -len(rest)], "") for rest in _ends(name) if rest in made)
    for name in made.keys() - own:
        more.update(("", name[: -len(rest)]) for rest in _ends(name) if rest in own)
    drop, add = max(more, key=lambda pair: (more[pair], pair)) if more else ("", "")
    return lambda name: add + name[len(drop) :] if name.startswith(drop) else name


def _ends(name: str) -> list[str]:
    """`b.c` and `c` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[at:]) for at in range(1, len(parts))]
