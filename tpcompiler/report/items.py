"""The parts of a rank's program that views show: its graph, contracted to inputs, ops, collectives and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import RETURNED_KINDS, OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import NO_CLAIM, Claim, claims_of, records_of
from tpcompiler.ir.text import op_name, value_text
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective, PlacedRecord, TensorRecord

# They move values without computing; so does every op whose schema returns a view.
COPIES = frozenset(("_to_copy", "_unsafe_view", "clone", "getitem", "lift_fresh_copy", "repeat", "wait_tensor"))
CUT_COLORS = 5  # distinct colours for cut dims
# Ops, other than pointwise ones, that share a box with neighbours of their kind.
SMALL = frozenset(
    (
        "all", "any", "amax", "amin", "arange", "argmax", "argmin", "cat", "cumsum", "eye", "full", "full_like",
        "index", "isin", "max", "mean", "min", "ones", "ones_like", "scalar_tensor", "stack", "sum", "tril", "triu",
        "var", "zeros", "zeros_like"
    )
)  # fmt: skip


@dataclass(frozen=True)
class LeafItem:
    """A parameter, buffer or constant of the op that uses it; the shape is global."""

    name: str
    sharding: str
    shape: str
    tied_to: str | None = None

    def named_in(self, *modules: str) -> str:
        """Return its name relative to the innermost of these modules that contains it."""
        name = min((seen_from(module, self.name) for module in modules), key=len)
        return f"{name} (tied to {self.tied_to})" if self.tied_to else name


Came = dict[str | LeafItem, None]  # the items and leaves that a value comes from, as an ordered set


class Module(NamedTuple):
    """A module's FQN, and the call of it (`@1` for the second, as torch.export counts)."""

    path: str
    call: str


@dataclass(frozen=True)
class Item:
    """One line or box.

    Attributes:
        name: its first node.
        ops: its ops, or the names of the inputs or outputs.
        sharding: the sharding of its value; for a collective, the change.
        value: dtype and local shape.
        sources: the items that it reads.
        writes: the buffers and inputs that its value is written back to, such as caches.
        modules: the enclosing modules, outermost first, without the root.
        record: a collective's record in the manifest.
        note: the reason and the user's line of code.
        small: True if it may join its neighbours.
        joined: the nodes of items that have joined it.
        origin: the node of the single-device program whose value it makes or, as a collective, changes.
        before: its counterpart in the other program of a comparison (`report/outline.py`), or None.
    """

    name: str
    kind: Literal["input", "op", "collective", "gone", "output"]
    ops: tuple[str, ...]
    sharding: str
    value: str
    sources: tuple[str, ...] = ()
    leaves: tuple[LeafItem, ...] = ()
    writes: tuple[LeafItem, ...] = ()
    modules: tuple[Module, ...] = ()
    record: Collective | None = None
    note: str = ""
    small: bool = False
    joined: tuple[str, ...] = ()
    origin: str = ""
    before: Item | None = None

    @property
    def module(self) -> str:
        return self.modules[-1].path if self.modules else ""

    @property
    def label(self) -> str:
        """The op, or the number of ops."""
        if len(self.ops) <= 3:
            return ", ".join(self.ops)
        return f"{len(self.ops)} {'small op' if self.kind == 'op' else self.kind}s"

    @property
    def was(self) -> str:
        """Its sharding in the other program, if that differs."""
        return self.before.sharding if self.before and self.before.sharding != self.sharding else ""

    @property
    def detail(self) -> list[str]:
        """The ops that the label does not name."""
        return list(dict.fromkeys(self.ops)) if len(self.ops) > 3 else []


def items_of(exported: ExportedProgram, manifest: Manifest) -> list[Item]:
    """Return the items in program order. Layout ops, casts and all of a reshard except its collective become edges.

    Raises:
        ArtifactError: the manifest does not list the program's collectives.
    """
    return _with_writes(list(_contracted(exported, manifest)))


def numbered(path: str) -> tuple[str, int]:
    """Split `encoder.layer.3` into ("encoder.layer", 3); -1 if the last part is not a number."""
    name, _, number = path.rpartition(".")
    return (name, int(number)) if number.isdecimal() else (path, -1)


def _with_writes(items: Sequence[Item]) -> list[Item]:
    """Move written-back values from outputs to the items that make them."""
    written: dict[str, tuple[LeafItem, ...]] = {}
    others = []
    for item in items:
        if item.writes and item.sources:
            written[item.sources[-1]] = (*written.get(item.sources[-1], ()), *item.writes)
        else:
            others.append(item)
    return [replace(item, writes=(*item.writes, *written.get(item.name, ()))) for item in others]


def _contracted(exported: ExportedProgram, manifest: Manifest) -> Iterator[Item]:
    leaves = _leaves(exported, manifest)
    records = records_of(exported.graph, manifest)
    claims = dict(claims_of(exported.graph))
    ends = {claim.reshard: node for node, claim in claims.items() if claim.reshard and claim.sharding is not None}
    shardings = {row.name: row.sharding for row in manifest.inputs}
    came: dict[fx.Node, Came] = {}
    numbers = {s.arg.name for s in exported.graph_signature.input_specs if s.target in manifest.rank_numbers}
    bodies: set[str] = set()  # ops with a local body in the graph
    for node in exported.graph.nodes:
        claim = claims.get(node, NO_CLAIM)
        origin = claim.origin or ""
        origins = dict.fromkeys(x for operand in node.all_input_nodes for x in came[operand])
        came[node] = {node.name: None} if edit.outputs(node) and node.name not in numbers else {}
        if node.name in leaves:
            came[node] = {leaves[node.name]: None}
        elif node.op == "output":
            yield from _outputs(exported, manifest, node, came)
        elif not came[node]:
            continue
        elif node.op == "placeholder":
            value = value_text(edit.fake(node))
            yield Item(node.name, "input", (node.name,), shardings.get(node.name, ""), value, origin=node.name)
        elif node in records:
            end = ends.get(claim.reshard or "", node)
            item = _collective(node, claim, records[node], edit.fake(end))
            yield replace(item, origin=claims.get(end, NO_CLAIM).origin or "", **_split(origins))
        elif _is_layout(node) or claim.reshard is not None:
            came[node] = origins
        elif origin and claim.sharding is None:
            came[node] = origins
            bodies.add(origin)
        else:
            item = _op(node, claim)
            if origin in bodies:
                item = replace(item, ops=(re.sub(r"_\d+$", "", origin),), small=False)
            yield replace(item, **_split(origins))


def _collective(node: fx.Node, claim: Claim, record: Collective, result: torch.Tensor) -> Item:
    return Item(
        name=node.name,
        kind="collective",
        ops=(record.kind,),
        sharding=claim.change or "",
        value=value_text(result),
        modules=_modules(node),
        record=record,
        note=f"{record.reason}\n{record.source}".strip(),
    )


def _op(node: fx.Node, claim: Claim) -> Item:
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return Item(
        name=node.name,
        kind="op",
        ops=(op_name(node),),
        sharding=_one(claim.sharding or []),
        value=_one([value_text(value) for value in edit.outputs(node)]),
        modules=_modules(node),
        note="\n".join(filter(None, (claim.reason, edit.source_line(node)))),
        small=pointwise or op_name(node) in SMALL,
        origin=claim.origin or "",
    )


def _outputs(
    exported: ExportedProgram, manifest: Manifest, output: fx.Node, came: Mapping[fx.Node, Came]
) -> Iterator[Item]:
    rows = iter(manifest.outputs)
    held = {name: _leaf(row) for name, row in manifest.placed()}
    specs = exported.graph_signature.output_specs
    for position, (spec, value) in enumerate(zip(specs, output.args[0], strict=True)):  # type: ignore[arg-type]
        if not isinstance(value, fx.Node) or not edit.is_tensor(value):
            continue
        leaf = None if spec.kind in RETURNED_KINDS else held.get(spec.target or "")
        row = next(rows) if spec.kind in RETURNED_KINDS else None
        name = row.name if row else f"{spec.target} (written back)"
        sharding = leaf.sharding if leaf else row.sharding if row else ""
        item = Item(f"output {position}", "output", (name,), sharding, value_text(edit.fake(value)), origin=name)
        yield replace(item, **_split(came[value]), writes=(leaf,) if leaf else ())


def _split(origins: Came) -> dict[str, Any]:
    return {
        "sources": tuple(x for x in origins if isinstance(x, str)),
        "leaves": tuple(x for x in origins if isinstance(x, LeafItem)),
    }


def _leaves(exported: ExportedProgram, manifest: Manifest) -> dict[str, LeafItem]:
    rows = {row.name: row for row in manifest.tensors}
    out = {}
    for spec in exported.graph_signature.input_specs:
        if spec.target in rows:
            out[spec.arg.name] = _leaf(rows[spec.target])
    return out


def _leaf(row: PlacedRecord) -> LeafItem:
    tied_to = row.tied_to if isinstance(row, TensorRecord) else None
    return LeafItem(row.name, row.sharding, f"{row.dtype}[{', '.join(map(str, row.shape))}]", tied_to)


def joined(items: Sequence[Item]) -> list[Item]:
    """Merge small neighbours with one module and one sharding; as neighbours in program order they make no cycle."""
    out: list[Item] = []
    stands: dict[str, str] = {}  # item -> the item that it joined
    for item in items:
        last = out[-1] if out else item
        stands[item.name] = item.name
        sources = dict.fromkeys(stands[source] for source in item.sources)
        alike = (item.modules, item.sharding, item.was) == (last.modules, last.sharding, last.was)
        if out and item.small and last.small and alike:
            stands[item.name] = last.name
            sources.pop(last.name, None)
            out[-1] = replace(
                last,
                ops=last.ops + item.ops,
                joined=(*last.joined, item.name),
                value=item.value,
                sources=tuple(dict.fromkeys((*last.sources, *sources))),
                leaves=tuple(dict.fromkeys(last.leaves + item.leaves)),
                writes=tuple(dict.fromkeys(last.writes + item.writes)),
            )
        else:
            out.append(replace(item, sources=tuple(sources)))
    return out


def _modules(node: fx.Node) -> tuple[Module, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(Module(str(entry[0]), str(key).partition("@")[2]) for key, entry in stack.items() if entry[0])


def _is_layout(node: fx.Node) -> bool:
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else []
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    return is_view or op_name(node) in COPIES


def color_of(sharding: str) -> str:
    """Return a sharding's colour, by its first placement other than R: `cut 0` to `cut 4` for a dim, or `pending`."""
    if match := re.search(r"S\((\d+)", sharding):
        return f"cut {int(match[1]) % CUT_COLORS}"
    return "pending" if "P(" in sharding else "whole" if sharding else "unknown"


def seen_from(module: str, name: str) -> str:
    """Return a dotted name relative to a module; empty for the module itself."""
    return "" if name == module else name.removeprefix(f"{module}.")


def _one(texts: list[str]) -> str:
    """Return one text if all outputs agree, else all of them."""
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
