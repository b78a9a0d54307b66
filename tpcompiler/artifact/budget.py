"""Limits on the collectives that a program sends and the bytes that a rank holds, for CI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tpcompiler.checkpoint.leaves import held_per_rank
from tpcompiler.cost.amounts import read_bytes
from tpcompiler.cost.collective import KINDS
from tpcompiler.errors import BudgetError
from tpcompiler.ir.names import layer_around, split_layer
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective
from tpcompiler.terminal.printed import format_bytes, format_unequal_bytes
from tpcompiler.yaml_file import YamlError, compose, plain, read_small_text

MANY = ("collectives", "fallbacks")  # of all kinds
BYTES = ("sent", "held")
FILES = (".yaml", ".yml", ".json")
FORMS = 'write "2 all_reduce/layer", "0 fallbacks", "1MB sent" (per rank and call) or "24GB held" (by a rank)'
MOST_NAMED = 3  # collectives that an error names


class Limit(NamedTuple):
    """The most collectives of a kind, in the program or in each layer (`2 all_reduce/layer`); or the most bytes."""

    most: int
    kind: str
    by_layer: bool = False

    def __str__(self) -> str:
        return f"{self.most} {self.kind}{'/layer' if self.by_layer else ''}"

    def counts(self, record: Collective) -> bool:
        return self.kind in (record.kind, "collectives") or (self.kind, record.why) == ("fallbacks", "fallback")


def read_budget(limits: Sequence[str]) -> list[Limit]:
    """Read limits such as `2 all_reduce/layer`, `0 fallbacks`, `1MB sent` and `24GB held`, or YAML lists of them.

    Raises:
        BudgetError: a text that is not a limit, a file that cannot be read, or a limit below 0.
    """
    read: list[Limit] = []
    for text in limits:
        read += _read_file(text) if text.endswith(FILES) else [_read_limit(text)]
    return read


def check_budget(limits: Sequence[Limit], manifest: Manifest, title: str) -> None:
    """Raise BudgetError if a program exceeds a limit: which one, where, and by how much.

    `held` counts parameters, buffers (caches too) and constants, not activations.
    """
    if excesses := [*_excesses(limits, manifest)]:
        raise BudgetError(
            f"{title} is over its budget: {'; '.join(excesses)}",
            help="change the plan (tpcompiler explain gives the reason for each), or allow as much",
        )


def _excesses(limits: Sequence[Limit], manifest: Manifest) -> Iterator[str]:
    for limit in limits:
        if limit.kind in BYTES:
            yield from (_sent if limit.kind == "sent" else _held)(limit.most, manifest)
            continue
        found = [record for record in manifest.collectives if limit.counts(record)]
        if limit.by_layer:
            yield from _by_layer(limit, found)
        elif len(found) > limit.most:
            yield f"{len(found)} {limit.kind}, {len(found) - limit.most} more than {limit} ({_named(found)})"


def _sent(most: int, manifest: Manifest) -> Iterator[str]:
    total = sum(record.wire_bytes for record in manifest.collectives)
    if total > most:
        largest = sorted(manifest.collectives, key=lambda record: -record.wire_bytes)
        yield f"each rank sends {_more_than(most, total)} ({_named(largest)})"


def _held(most: int, manifest: Manifest) -> Iterator[str]:
    held = held_per_rank(manifest)
    rank = max(range(len(held)), key=held.__getitem__)
    if held[rank] > most:
        yield f"rank {rank} holds {_more_than(most, held[rank], ' of parameters, buffers and constants')}"


def _more_than(most: int, count: int, of: str = "") -> str:
    total, allowed = format_unequal_bytes(count, most)
    return f"{total}{of}, {format_bytes(count - most)} more than {allowed}"


def _read_file(name: str) -> Iterator[Limit]:
    try:
        root = compose(read_small_text(name))
        limits = None if root is None else plain(root)
    except (YamlError, OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or str(error).removeprefix("is ")
        line = f" line {error.line}" if isinstance(error, YamlError) and error.line else ""
        help = error.help if isinstance(error, YamlError) else "check the path"
        raise BudgetError(f"budget {name!r}{line} cannot be read: {reason}", help=help) from None
    if not isinstance(limits, list) or not all(isinstance(limit, str) for limit in limits):
        raise BudgetError(f"budget {name!r} is not a list of limits", help='write one limit per line: - "0 fallbacks"')
    yield from (_read_limit(limit, f" in {name!r}") for limit in limits)


def _read_limit(text: str, where: str = "") -> Limit:
    amount, _, kind = text.strip().rpartition(" ")
    if kind in BYTES:
        return Limit(read_bytes(amount), kind)
    found = re.fullmatch(rf"\s*(\d{{1,9}})\s+({'|'.join((*KINDS, *MANY))})\s*(/\s*layer)?\s*", text, re.ASCII)
    if found is None:
        kinds = ", ".join((*KINDS, *MANY))
        raise BudgetError(f"budget {text!r}{where} is not a limit", help=f"{FORMS}; kinds are {kinds}")
    return Limit(int(found[1]), found[2], found[3] is not None)


def _by_layer(limit: Limit, found: Sequence[Collective]) -> Iterator[str]:
    """Yield one text for all layers that exceed the limit alike."""
    layers: dict[str, list[Collective]] = {}
    for record in found:
        if layer := layer_around(record.module):
            layers.setdefault(layer, []).append(record)
    over: dict[tuple[int, str], list[str]] = {}
    for layer, records in layers.items():
        if len(records) > limit.most:
            over.setdefault((len(records), split_layer(layer)[0]), []).append(layer)
    for (count, _), names in over.items():
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        where = _named(layers[names[0]])
        yield f"{names[0]}{more}: {count} {limit.kind}, {count - limit.most} more than {limit} ({where})"


def _named(records: Sequence[Collective]) -> str:
    """`'all_reduce' in layers.0.down, 'all_reduce_1' in layers.1.down and 3 more`."""
    each = [f"'{row.node}' in {row.module or row.source or 'the model'}" for row in records[:MOST_NAMED]]
    more = f" and {len(records) - MOST_NAMED} more" if len(records) > MOST_NAMED else ""
    return ", ".join(each) + more
