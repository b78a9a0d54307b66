"""What of a rank's program is worth a line: its graph, contracted to inputs, ops, collectives and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.claims import Claim, read_claim, records_of
from tpcompiler.ir.text import op_name, value_text
from tpcompiler.runtime.artifact import Manifest

# They move values and compute nothing; so does every op whose schema returns a view.
COPIES = frozenset(("_to_copy", "_unsafe_view", "clone", "getitem", "lift_fresh_copy", "repeat", "wait_tensor"))
CUT_COLORS = 5  # that tell the dims that are cut apart
# Beside the pointwise ops, what is not worth a box of its own where it stands among others of its kind.
SMALL = frozenset(
    (
        "all", "any", "amax", "amin", "arange", "argmax", "argmin", "cat", "cumsum", "eye", "full", "full_like",
        "index", "isin", "max", "mean", "min", "ones", "ones_like", "scalar_tensor", "stack", "sum", "tril", "triu",
        "var", "zeros", "zeros_like"
    )
)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """A parameter, buffer or constant, beside the op that uses it; the shape is global."""

    name: str
    sharding: str
    shape: str
    tied_to: str | None = None

    def named_in(self, *modules: str) -> str:
        """Its name as it is said inside of the innermost of the modules that hold it."""
        name = min((seen_from(module, self.name) for module in modules), key=len)
        return f"{name} (tied to {self.tied_to})" if self.tied_to else name


Came = dict[str | Leaf, None]  # the items and leaves that a value is made of, as an ordered set


class Module(NamedTuple):
    """A module's FQN, and which call of it (`@1` for the second, as torch.export counts)."""

    path: str
    call: str


@dataclass(frozen=True)
class Item:
    """One line or box.

    Attributes:
        name: the first node that it stands for.
        ops: the ops that it stands for, or the names of the inputs or outputs.
        sharding: of what it makes; of a collective, the change.
        value: dtype and local shape.
        sources: the items that it reads.
        writes: the buffers and inputs that its value is written back to, such as caches.
        modules: those around it, outermost first, without the root.
        record: a collective's record in the manifest.
        note: the reason and the user's line of code.
        small: whether it may join its neighbours.
        joined: the nodes of those that have joined it.
        origin: the node of the single-device program whose value it makes; of a collective, that it changes.
        before: what it is in the program that this one is compared with (`views/before.py`); None for nothing.
    """

    name: str
    kind: Literal["input", "op", "collective", "gone", "output"]
    ops: tuple[str, ...]
    sharding: str
    value: str
    sources: tuple[str, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    writes: tuple[Leaf, ...] = ()
    modules: tuple[Module, ...] = ()
    record: Mapping[str, Any] | None = None
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
        """The op, or how many there are."""
        if len(self.ops) <= 3:
            return ", ".join(self.ops)
        return f"{len(self.ops)} {'small op' if self.kind == 'op' else self.kind}s"

    @property
    def was(self) -> str:
        """What it makes before, where that is placed otherwise."""
        return self.before.sharding if self.before and self.before.sharding != self.sharding else ""

    @property
    def detail(self) -> list[str]:
        """What the label does not name."""
        return list(dict.fromkeys(self.ops)) if len(self.ops) > 3 else []


def items_of(exported: ExportedProgram, manifest: Manifest) -> list[Item]:
    """The items in program order. Layout ops, casts and what a reshard does beside its collective become edges.

    Raises:
        ArtifactError: the manifest does not know the program's collectives.
    """
    return _with_writes(list(_contracted(exported, manifest)))


def _with_writes(items: Sequence[Item]) -> list[Item]:
    """Let the item that makes a value that is written back say so, in place of an output."""
    written: dict[str, tuple[Leaf, ...]] = {}
    kept = []
    for item in items:
        if item.writes and item.sources:
            written[item.sources[-1]] = (*written.get(item.sources[-1], ()), *item.writes)
        else:
            kept.append(item)
    return [replace(item, writes=(*item.writes, *written.get(item.name, ()))) for item in kept]


def _contracted(exported: ExportedProgram, manifest: Manifest) -> Iterator[Item]:
    leaves = _leaves(exported, manifest)
    records = records_of(exported.graph, manifest)
    results = _results(exported)
    shardings = {row["name"]: str(row["sharding"]) for row in manifest.inputs}
    came: dict[fx.Node, Came] = {}
    numbers = {s.arg.name for s in exported.graph_signature.input_specs if s.target in manifest.rank_numbers}
    bodies: set[str] = set()  # ops of which a local body stands in the graph
    for node in exported.graph.nodes:
        claim = read_claim(node)
        origin = claim.get("origin", "")
        found = dict.fromkeys(x for operand in node.all_input_nodes for x in came[operand])
        came[node] = {node.name: None} if edit.outputs(node) and node.name not in numbers else {}
        if node.name in leaves:
            came[node] = {leaves[node.name]: None}
        elif node.op == "output":
            yield from _outputs(exported, manifest, node, came)
        elif not came[node]:
            continue
        elif node.op == "placeholder":
            value = value_text(node.meta["val"])
            yield Item(node.name, "input", (node.name,), shardings.get(node.name, ""), value, origin=node.name)
        elif node in records:
            result = results.get(claim.get("reshard", ""), node)
            yield replace(_collective(node, claim, records[node], result), **_split(found))
        elif _is_layout(node) or "reshard" in claim:
            came[node] = found
        elif origin and "sharding" not in claim:
            came[node] = found
            bodies.add(origin)
        else:
            item = _op(node, claim)
            if origin in bodies:
                item = replace(item, ops=(re.sub(r"_\d+$", "", origin),), small=False)
            yield replace(item, **_split(found))


def _collective(node: fx.Node, claim: Claim, record: Mapping[str, Any], result: fx.Node) -> Item:
    return Item(
        name=node.name,
        kind="collective",
        ops=(record["kind"],),
        sharding=claim.get("change", ""),
        value=value_text(result.meta["val"]),
        modules=_modules(node),
        record=record,
        note=f"{record['reason']}\n{record['source']}".strip(),
        origin=read_claim(result).get("origin", ""),
    )


def _op(node: fx.Node, claim: Claim) -> Item:
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return Item(
        name=node.name,
        kind="op",
        ops=(op_name(node),),
        sharding=_one(claim.get("sharding", [])),
        value=_one([value_text(value) for value in edit.outputs(node)]),
        modules=_modules(node),
        note="\n".join(filter(None, (claim.get("reason"), edit.source_line(node)))),
        small=pointwise or op_name(node) in SMALL,
        origin=claim.get("origin", ""),
    )


def _outputs(
    exported: ExportedProgram, manifest: Manifest, output: fx.Node, came: Mapping[fx.Node, Came]
) -> Iterator[Item]:
    rows = iter(manifest.outputs)
    held = {row["name"]: _leaf(row) for row in (*manifest.inputs, *manifest.tensors)}
    specs = exported.graph_signature.output_specs
    for position, (spec, value) in enumerate(zip(specs, output.args[0], strict=True)):  # type: ignore[arg-type]
        if not isinstance(value, fx.Node) or not edit.is_tensor(value):
            continue
        leaf = None if spec.kind is OutputKind.USER_OUTPUT else held.get(spec.target or "")
        row = next(rows) if spec.kind is OutputKind.USER_OUTPUT else {"name": f"{spec.target} (written back)"}
        name, sharding = str(row["name"]), leaf.sharding if leaf else str(row.get("sharding", ""))
        item = Item(f"output {position}", "output", (name,), sharding, value_text(value.meta["val"]), origin=name)
        yield replace(item, **_split(came[value]), writes=(leaf,) if leaf else ())


def _split(found: Came) -> dict[str, Any]:
    return {
        "sources": tuple(x for x in found if isinstance(x, str)),
        "leaves": tuple(x for x in found if isinstance(x, Leaf)),
    }


def _leaves(exported: ExportedProgram, manifest: Manifest) -> dict[str, Leaf]:
    """Placeholder name -> the leaf behind it."""
    rows = {row["name"]: row for row in manifest.tensors}
    out = {}
    for spec in exported.graph_signature.input_specs:
        if spec.target in rows:
            out[spec.arg.name] = _leaf(rows[spec.target])
    return out


def _leaf(row: Mapping[str, Any]) -> Leaf:
    """The leaf, or the input, of a row of the manifest."""
    shape = f"{row['dtype']}[{', '.join(map(str, row['shape']))}]" if "shape" in row else ""
    return Leaf(row["name"], str(row.get("sharding", "")), shape, row.get("tied_to"))


def _results(exported: ExportedProgram) -> dict[str, fx.Node]:
    """The node that ends each reshard."""
    claims = ((node, read_claim(node)) for node in edit.calls(exported.graph))
    return {claim["reshard"]: node for node, claim in claims if "reshard" in claim and "sharding" in claim}


def joined(items: Sequence[Item]) -> list[Item]:
    """Let small items of one module and one sharding share one; as neighbours in program order they make no cycle."""
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
    """What a sharding is drawn as: by what it says first beside R, `cut 0` to `cut 4` for a dim, or `pending`."""
    if found := re.search(r"S\((\d+)", sharding):
        return f"cut {int(found[1]) % CUT_COLORS}"
    return "pending" if "P(" in sharding else "whole" if sharding else "unknown"


def seen_from(module: str, name: str) -> str:
    """A dotted name as it is said inside of a module; empty for the module itself."""
    return "" if name == module else name.removeprefix(f"{module}.")


def _one(texts: list[str]) -> str:
    """One text where all outputs agree, else all of them."""
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
