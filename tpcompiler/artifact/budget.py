"""What a program may send and hold, as CI says it, and where it does more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpcompiler.checkpoint.leaves import held_per_rank
from tpcompiler.cost.amounts import read_bytes
from tpcompiler.cost.collective import KINDS
from tpcompiler.errors import BudgetError
from tpcompiler.ir.names import layer_around, split_layer
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective
from tpcompiler.terminal.printed import format_bytes, format_unequal_bytes

MANY = ("collectives", "fallbacks")  # of all kinds
MOST_NAMED = 3  # collectives that an error names


class Limit(NamedTuple):
    """`2 all_reduce/layer`: the most collectives of a kind in the whole program, or in each repeated module."""

    most: int
    kind: str
    by_layer: bool

    def __str__(self) -> str:
        return f"{self.most} {self.kind}{'/layer' if self.by_layer else ''}"

    def counts(self, record: Collective) -> bool:
        return self.kind in (record.kind, "collectives") or (self.kind, record.why) == ("fallbacks", "fallback")


@dataclass(frozen=True)
class Budget:
    """What a program may send in one call, and what a rank may hold.

    Attributes:
        wire_bytes: that a rank sends.
        memory: bytes of parameters, buffers (caches too) and constants. Activations do not count.
    """

    limits: tuple[Limit, ...] = ()
    wire_bytes: int | None = None
    memory: int | None = None

    @classmethod
    def read(cls, limits: Sequence[str] = (), wire_bytes: int | None = None, memory: int | str | None = None) -> Budget:
        """A budget as people write it: `2 all_reduce/layer`, `1 all_gather`, `0 fallbacks`; memory as `24GB` or bytes.

        Raises:
            BudgetError: a text that says no limit, or a limit below 0.
        """
        if wire_bytes is not None and wire_bytes < 0:
            raise BudgetError(f"a budget of {wire_bytes} wire bytes is below 0", help="give a number of bytes from 0")
        return cls(tuple(map(_read_limit, limits)), wire_bytes, None if memory is None else read_bytes(memory))

    def check(self, manifest: Manifest, title: str = "the program") -> None:
        """Raises BudgetError where a program does more than this: what, where, and by how much."""
        if said := [*self._excesses(manifest)]:
            raise BudgetError(
                f"{title} is over its budget: {'; '.join(said)}",
                help="change the plan (tpcompiler explain says why each is there), or allow as much",
            )

    def _excesses(self, manifest: Manifest) -> Iterator[str]:
        for limit in self.limits:
            found = [record for record in manifest.collectives if limit.counts(record)]
            yield from _by_layer(limit, found) if limit.by_layer else _in_all(limit, found)
        sent = sum(record.wire_bytes for record in manifest.collectives)
        if self.wire_bytes is not None and sent > self.wire_bytes:
            most = sorted(manifest.collectives, key=lambda record: -record.wire_bytes)
            total, allowed = format_unequal_bytes(sent, self.wire_bytes)
            over = f"{format_bytes(sent - self.wire_bytes)} more than {allowed}"
            yield f"each rank sends {total}, {over} ({_named(most)})"
        if self.memory is not None:
            held = held_per_rank(manifest)
            rank = max(range(len(held)), key=held.__getitem__)
            if held[rank] > self.memory:
                total, allowed = format_unequal_bytes(held[rank], self.memory)
                over = f"{format_bytes(held[rank] - self.memory)} more than {allowed}"
                yield f"rank {rank} holds {total} of parameters, buffers and constants, {over}"


def _read_limit(text: str) -> Limit:
    found = re.fullmatch(rf"\s*(\d{{1,9}})\s+({'|'.join((*KINDS, *MANY))})\s*(/\s*layer)?\s*", text, re.ASCII)
    if found is None:
        raise BudgetError(
            f"budget {text!r} says no limit",
            help=f'write "2 all_reduce/layer", or "0 fallbacks" of the whole model; of {", ".join((*KINDS, *MANY))}',
        )
    return Limit(int(found[1]), found[2], found[3] is not None)


def _in_all(limit: Limit, found: Sequence[Collective]) -> Iterator[str]:
    if len(found) > limit.most:
        yield f"{len(found)} {limit.kind}, {len(found) - limit.most} more than {limit} ({_named(found)})"


def _by_layer(limit: Limit, found: Sequence[Collective]) -> Iterator[str]:
    """Layers alike are told once."""
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
