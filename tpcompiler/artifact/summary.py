"""Summary of a conversion: bytes per rank, collectives by cause, fallbacks and notes, as data and as tables."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from msgspec import structs

from tpcompiler.artifact.collective_records import counted_kinds
from tpcompiler.checkpoint.leaves import bytes_per_rank, held_per_rank
from tpcompiler.cost.amounts import STATE_BYTES
from tpcompiler.errors import option
from tpcompiler.ir.shares import mesh_of
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import BoundaryRecord, Collective, Note, Record, TensorRecord, mesh_text
from tpcompiler.runtime.weights import dtype_of
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.tables import NUMBERS, Part, Table

NO_ADVICE: Mapping[str, str] = MappingProxyType({})
Key = TypeVar("Key")
MOST_RANKS = 16  # that a table lists one by one
NUMBER = re.compile(r"(?<=[a-z]_)\d+(?=')|(?<=[a-z]\.)\d+(?=\.[a-z])")  # of a node in quotes, or of a layer in a path
NOTE_TITLES = {  # kinds of `Note`, as people read them
    "plan": "plan entries that are left out",
    "untouched": "layers that no plan entry touches",
    "whole": "weights that stay whole in a layer that is cut",
    "dropped": "weights that no op uses any more, left out",
    "no rule": "ops without a rule",
    "size": "dynamic sizes that the mesh must divide",
    "random": "ops that draw random numbers",
    "mesh": "axes over which ranks share weights",
    "both": "conds of which both branches are computed",
    "shared": "weights that several ranks share",
    "attention": "heads of keys and values that several heads of queries share",
    "idle": "axes that cut nothing: their ranks repeat each other",
    "examples": "example inputs",
    "collectives": "collectives over symmetric memory",
    "overlap": "memory of collectives that run during other ops",
    "search": "the search for placements",
    "apart": "programs of another model, which share no tensors with this one",
    "stages": "stages of a pipeline",
    "uncut": "layers that stay whole, because a call would take longer with them cut",
    "cut": "weights cut in parts, blocks or whole heads, or unevenly",
}


class ModelLayer(Record, frozen=True, kw_only=True):
    """A layer that has a weight."""

    name: str  # its FQN
    type: str  # its class


class ModelTensor(Record, frozen=True, kw_only=True):
    """A parameter, a buffer or a constant of a model."""

    name: str  # its FQN
    kind: str  # `parameter`, `buffer` or `constant_tensor`
    shape: list[int]  # as in the model
    dtype: str  # such as `f32`
    bytes: int  # of the whole
    tied_to: str | None = None  # the name that it shares its memory with


class ModelValue(Record, frozen=True, kw_only=True):
    """An argument or a result of a model."""

    name: str  # of the argument, or of the output
    shape: list[int | str] | None = None  # of a tensor
    dtype: str | None = None  # of a tensor
    number: str | None = None  # of a number, maybe symbolic
    constant: str | None = None  # of what is fixed in the program


class ModelSummary(Record, frozen=True, kw_only=True):
    """A model."""

    kind: Literal["model"]  # `model`
    modules: list[ModelLayer]  # the layers that have a weight
    parameters: list[ModelTensor]  # parameters, buffers and constants
    inputs: list[ModelValue]  # the tensors and numbers that it takes
    outputs: list[ModelValue]  # those that it returns
    plan: str  # a plan file to begin with


class HeldTensor(TensorRecord, frozen=True, kw_only=True):
    """A parameter, a buffer or a constant, and its bytes."""

    bytes: int  # of the whole
    bytes_per_rank: list[int]  # what each rank holds of it


class TrafficTotal(Record, frozen=True, kw_only=True):
    """The collectives of one kind and cause."""

    kind: str  # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    why: str  # `inherent`, `plan-demanded` or `fallback`
    count: int  # their number
    payload_bytes: int  # of all of them
    wire_bytes: int  # of all of them


class TrainingBytes(Record, frozen=True, kw_only=True):
    """The bytes that training takes next to parameters."""

    gradients: int  # of parameters, on one device
    gradients_per_rank: list[int]  # the same on each rank
    optimizer: str  # `adamw`, with two float32 numbers for each element, `sgd`, with one, or `none`
    state: int  # of that optimizer, on one device
    state_per_rank: list[int]  # the same on each rank


class ArtifactSummary(Record, frozen=True, kw_only=True):
    """A conversion's result."""

    kind: Literal["artifact"]  # `artifact`
    mesh: dict[str, int | list[int]]  # axis -> degree, or the unequal shares of its ranks
    device_type: str  # `cpu` or `cuda`
    bytes: int  # of parameters, buffers and constants on one device
    bytes_per_rank: list[int]  # the same on each rank
    training: TrainingBytes | None  # of programs that return gradients
    tensors: list[HeldTensor]  # parameters, buffers and constants
    inputs: list[BoundaryRecord]  # the tensors that the programs take
    outputs: list[BoundaryRecord]  # the tensors that the programs return
    output_type: str | None  # the class that the model returned, where the programs return a dict instead
    collectives: list[TrafficTotal]  # of one call, by kind and cause
    fallbacks: list[Collective]  # the collectives that the plan did not ask for
    notes: list[Note]  # what was declined, or done otherwise
    plan: dict[str, Any]  # as a plan file has it
    versions: dict[str, str]  # of what wrote the artifact


class SearchedPlan(Record, frozen=True, kw_only=True):
    """The plan of the search, where the given one leaves much whole that none of its entries names."""

    bytes: int  # of parameters, buffers and constants on one device, of all models
    held_bytes: int  # of them on the rank that holds most
    whole_bytes: int  # of them whole on every rank, without an entry of the plan that makes them so
    searched_bytes: int  # what that rank would hold by the plan of the search
    optimize: Literal["latency", "memory"]  # the goal of the search
    command: str = ""  # converts by it

    @property
    def text(self) -> str:
        """The line of a report."""
        held, whole, searched = (
            f"{100 * part / self.bytes:.1f}%" for part in (self.held_bytes, self.whole_bytes, self.searched_bytes)
        )
        words, arguments = "--plan auto", 'plan="auto"'
        if self.optimize == "memory":
            words, arguments = f"{words} --optimize memory", f'{arguments}, optimize="memory"'
        return (
            f"a rank holds {held} of all bytes: {whole} are whole, and no plan entry names them; "
            f"with {option(words, arguments)} it would hold {searched}"
            f"{f': {self.command}' if self.command else ''}"
        )


class ConvertedArtifact(ArtifactSummary, frozen=True, kw_only=True):
    """The conversion of one model."""

    out: str | None  # the directory that was written; null with `--dry-run`
    searched_plan: SearchedPlan | None  # null unless the plan leaves more than a quarter whole without a word


class ConvertedPrograms(Record, frozen=True, kw_only=True):
    """The conversion of several models."""

    out: str | None  # the directory that was written; null with `--dry-run`
    programs: dict[str, ArtifactSummary]  # of each model
    searched_plan: SearchedPlan | None  # null unless the plan leaves more than a quarter whole without a word


def summarize(manifest: Manifest) -> ArtifactSummary:
    """Return mesh, bytes per rank, tensors, boundary, collectives by kind and cause, notes, versions of an artifact."""
    mesh = mesh_of(manifest)
    tensors = [
        HeldTensor(
            **structs.asdict(row),
            bytes=math.prod(row.shape) * dtype_of(row.dtype).itemsize,
            bytes_per_rank=bytes_per_rank(row, mesh),
        )
        for row in manifest.tensors
    ]
    return ArtifactSummary(
        kind="artifact",
        mesh=manifest.mesh,
        device_type=manifest.device_type,
        bytes=sum(row.bytes for row in tensors if row.tied_to is None),
        bytes_per_rank=held_per_rank(manifest),
        training=_training_bytes(manifest, tensors),
        tensors=tensors,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        output_type=manifest.output_type,
        collectives=_by_cause(manifest.collectives),
        fallbacks=[row for row in manifest.collectives if row.why == "fallback"],
        notes=manifest.notes,
        plan=manifest.plan,
        versions=manifest.versions,
    )


def describe(manifest: Manifest) -> str:
    """Return mesh, bytes and collectives of an artifact in a line."""
    whole, per_rank, sent = summarize(manifest).bytes, held_per_rank(manifest), manifest.collectives
    return (
        f"mesh {mesh_of(manifest)} on {manifest.device_type}: {format_bytes(max(per_rank))} of "
        f"{format_bytes(whole)} of weights on a rank; {counted_kinds(each.kind for each in sent)}, "
        f"{format_bytes(sum(each.wire_bytes for each in sent))} sent per rank and call"
    )


def _training_bytes(manifest: Manifest, tensors: Sequence[HeldTensor]) -> TrainingBytes | None:
    returned, optimizer = {row.name for row in manifest.outputs}, manifest.asked.optimizer
    graded = [row for row in tensors if row.kind == "parameter" and f"gradients.{row.name}" in returned]
    if not graded:
        return None
    per_rank = [[row.bytes, *row.bytes_per_rank] for row in graded]
    factors = [STATE_BYTES[optimizer] / dtype_of(row.dtype).itemsize for row in graded]
    gradients = [sum(own) for own in zip(*per_rank, strict=True)]
    state = [round(sum(map(operator.mul, own, factors))) for own in zip(*per_rank, strict=True)]
    return TrainingBytes(
        gradients=gradients[0],
        gradients_per_rank=gradients[1:],
        optimizer=optimizer,
        state=state[0],
        state_per_rank=state[1:],
    )


def _by_cause(collectives: Iterable[Collective]) -> list[TrafficTotal]:
    """Add up collectives to the rows of the report."""
    totals = add_up(collectives, lambda each: (each.kind, each.why))
    return [
        TrafficTotal(kind=kind, why=why, count=count, payload_bytes=payload, wire_bytes=wire)
        for (kind, why), (count, payload, wire) in totals.items()
    ]


def add_up(collectives: Iterable[Collective], key: Callable[[Collective], Key]) -> dict[Key, tuple[int, int, int]]:
    """Return the number, the payload bytes and the wire bytes of the collectives with each key, in order."""
    totals: dict[Key, tuple[int, int, int]] = {}
    for each in collectives:
        count, payload, wire = totals.get(key(each), (0, 0, 0))
        totals[key(each)] = count + 1, payload + each.payload_bytes, wire + each.wire_bytes
    return totals


def summary_parts(data: ArtifactSummary, advice: Mapping[str, str] = NO_ADVICE) -> Iterator[Part]:
    """Report a conversion: bytes per rank, collectives by cause, fallbacks with advice, and notes.

    `advice`: the change of the plan that avoids a fallback, by the name of its reshard; empty for none.
    """
    if len(data.bytes_per_rank) > 1 and data.bytes and min(data.bytes_per_rank) >= data.bytes:
        cut = option("--plan PLAN.yaml, or --optimize memory", 'a plan, or optimize="memory"')
        yield f"every rank holds the whole model: no layer is cut (to cut it all the same: {cut})"
    yield f"mesh {mesh_text(data.mesh)}, {len(data.bytes_per_rank)} ranks, {data.device_type}"
    whole, training = data.bytes, data.training
    shown = [[data.bytes, *data.bytes_per_rank]]
    if training is not None:
        shown += [[training.gradients, *training.gradients_per_rank], [training.state, *training.state_per_rank]]
    alone, *ranks = zip(*shown, strict=True)
    rows = [
        (name, format_bytes(held), f"{100 * held / max(whole, 1):.1f}%", *map(format_bytes, more))
        for name, (held, *more) in [("one device", alone), *_alike(ranks)]
    ]
    more = ("gradients", f"{training.optimizer} state") if training is not None else ()
    yield Table("parameters, buffers and constants", ("on", "bytes", "share", *more), rows, right=(*NUMBERS, *more))
    collectives = [
        (row.why, row.kind, str(row.count), format_bytes(row.payload_bytes), format_bytes(row.wire_bytes))
        for row in data.collectives
    ]
    headers = ("why", "kind", "count", "payload bytes", "wire bytes per rank")
    yield Table("collectives of one call", headers, collectives)
    lines = [*_fallbacks(data.fallbacks, advice)]
    for kind, title in NOTE_TITLES.items():
        texts = [note.text for note in data.notes if note.kind == kind]
        if texts:
            lines += [f"{title}:", *(f"  {text}" for text in texts)]
    if lines:
        yield from (*lines, "")


def _fallbacks(rows: Iterable[Collective], advice: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each fallback, and what avoids it; one for those that differ in the numbers of nodes alone."""
    alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row in rows:
        where, help = row.source or row.module or row.node, advice.get(row.reshard, "")
        text = f"{row.kind} of {format_bytes(row.payload_bytes)} at {where}: {row.reason}"
        key = NUMBER.sub("*", text), NUMBER.sub("*", help)
        alike.setdefault(key, []).append((text, help))
    for folded, own in alike.items():
        text, help = own[0] if len(own) == 1 else folded
        yield f"fallback: {text}" if len(own) == 1 else f"fallback: {len(own)} {text}"
        yield from [f"  help: {help}"] if help else []


def _alike(per_rank: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each rank, or of a large mesh the neighbours that hold equally much, with what they hold."""
    first = 0
    for held, equal in itertools.groupby(per_rank):
        last = first + len(list(equal)) - 1
        if first == last or len(per_rank) <= MOST_RANKS:
            yield from ((f"rank {rank}", held) for rank in range(first, last + 1))
        else:
            yield f"ranks {first} to {last}", held
        first = last + 1
