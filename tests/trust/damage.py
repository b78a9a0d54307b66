"""What damages are made of: an artifact in memory, a register of the kinds, and where in a graph a kind applies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx
from torch.export import ExportedProgram

import tpcompiler
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import CLAIM, read_claim
from tpcompiler.ir.shares import mesh_of
from tpcompiler.judge.sound.written import WrittenRank, written
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import TensorRecord

T = TypeVar("T")
aten = torch.ops.aten


@dataclass
class Artifact:
    """All ranks' programs and the manifest, as the files would hold them."""

    ranks: list[ExportedProgram]
    manifest: Manifest

    @classmethod
    def of(cls, program: tpcompiler.ParallelProgram) -> Artifact:
        return cls([program.rank_program(rank) for rank in range(program.world_size)], program.manifest())

    def copied(self) -> Artifact:
        """One to damage: nothing that a damage writes to is shared with this one."""
        return Artifact([_copied(program) for program in self.ranks], copy.deepcopy(self.manifest))

    def written(self) -> list[WrittenRank]:
        """As the files would have them: ranks with equal graphs share a program."""
        ranks = [written(program) for program in self.ranks]
        first: dict[tuple[object, ...], WrittenRank] = {}
        return [replace(first.setdefault(_text(each.program), each), state=each.state) for each in ranks]

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.manifest)

    @property
    def last(self) -> ExportedProgram:
        """Of the last rank: where a damage is done on one rank, it is done there."""
        return self.ranks[-1]

    def each(self, where: Callable[[fx.Node], bool]) -> list[tuple[fx.Node, ...]]:
        """The nodes that answer to it, those of all ranks beside each other; none where ranks have not as many."""
        found = [[node for node in edit.calls(program.graph) if where(node)] for program in self.ranks]
        return list(zip(*found, strict=True)) if len({len(nodes) for nodes in found}) == 1 else []

    def leaf(self, rank: int, name: str) -> torch.Tensor:
        program = self.ranks[rank]
        return program.state_dict[name] if name in program.state_dict else program.constants[name]

    def put(self, rank: int, name: str, value: torch.Tensor) -> None:
        program = self.ranks[rank]
        held = program.state_dict if name in program.state_dict else program.constants
        value = value.detach().clone()
        held[name] = torch.nn.Parameter(value, False) if isinstance(held[name], torch.nn.Parameter) else value


def _text(program: ExportedProgram) -> tuple[object, ...]:
    """What a file says of a program: every node with its value and its claim, and the signature."""
    told = [
        (node.name, str(node.target), str((node.args, node.kwargs)), str(node.meta.get("custom")), *_layouts(node))
        for node in program.graph.nodes
    ]
    bodies = [str(part.graph) for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    signature = program.graph_signature
    rest = (
        signature.input_specs,
        signature.output_specs,
        program.range_constraints,
        program._guards_code,
        program.module_call_graph,
    )
    return (*told, *bodies[1:], *map(str, rest))


def _layouts(node: fx.Node) -> list[str]:
    values = edit.outputs(node) or [node.meta.get("val")]
    return [
        f"{each.dtype}{list(each.shape)}{list(each.stride())}{each.storage_offset()}"
        if torch.is_tensor(each)
        else str(each)
        for each in values
    ]


def _copied(program: ExportedProgram) -> ExportedProgram:
    graph = edit.copy_graph(program.graph)
    for node in graph.nodes:
        node.meta["custom"] = copy.deepcopy(node.meta.get("custom") or {})
    made = ExportedProgram(
        root=fx.GraphModule(program.graph_module, graph),
        graph=graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=dict(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        constants=dict(program.constants),
        verifiers=[program.verifier],
    )
    made._guards_code = list(program._guards_code)  # torch would read them off sizes that a damage may have compared
    return made


# A damage is done to a copy, at the nth place where the kind applies; false where there is none.
Damage = Callable[[Artifact, int], bool]
KINDS: dict[str, Damage] = {}


def kind(damage: Damage) -> Damage:
    """Register a kind of damage under its name."""
    KINDS[damage.__name__.replace("_", " ")] = damage
    return damage


# A change is done at a node or a row that it names, in one small model, and `check` says the same of it every time.
Change = Callable[[Artifact], None]
CHANGES: list[tuple[str, Change]] = []


def on(model: str) -> Callable[[Change], Change]:
    """Register a change of this model."""

    def register(change: Change) -> Change:
        CHANGES.append((model, change))
        return change

    return register


def nodes(artifact: Artifact, name: str) -> list[fx.Node]:
    """Of all ranks, by name."""
    return [next(node for node in program.graph.nodes if node.name == name) for program in artifact.ranks]


def row(artifact: Artifact, field: str, name: str) -> Any:
    return next(row for row in getattr(artifact.manifest, field) if row.name == name)


def damaged(name: str, artifact: Artifact, nth: int = 0) -> Artifact | None:
    """The artifact with this damage at the nth place; None where the kind does not apply there."""
    made = artifact.copied()
    return made if KINDS[name](made, nth) else None


def at(places: Sequence[T], nth: int) -> T | None:
    """The first, the last, one between: places alike, such as layers, need not all be tried."""
    order = list(dict.fromkeys(i for i in (0, len(places) - 1, len(places) // 2) if 0 <= i < len(places)))
    return places[order[nth]] if nth < len(order) else None


def claim(node: fx.Node) -> dict[str, Any]:
    """The claim on a node itself, to write to (`read_claim` finds a getitem's on its source)."""
    found: dict[str, Any] = node.meta.setdefault("custom", {}).setdefault(CLAIM, {})
    return found


def region(node: fx.Node) -> str | None:
    """What the node belongs to with others."""
    return read_claim(node).region


def members(node: fx.Node) -> list[fx.Node]:
    return [other for other in edit.calls(node.graph) if region(other) == region(node)]


def inserted(before: fx.Node, target: Any, args: Sequence[Any], like: fx.Node) -> fx.Node:
    """A new call before a node, that says of itself what `like` says."""
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, tuple(args))
    new.meta = {**like.meta, "custom": copy.deepcopy(like.meta.get("custom") or {})}
    return new


def tensors(node: fx.Node) -> list[torch.Tensor]:
    return list(edit.outputs(node))


def shape(node: fx.Node) -> list[Any]:
    return list(edit.outputs(node)[0].shape) if edit.outputs(node) else []


def static(node: fx.Node) -> bool:
    return bool(edit.outputs(node)) and all(isinstance(size, int) for size in shape(node))


def rows(artifact: Artifact, kinds: Sequence[str] = ("parameter", "buffer")) -> Iterator[TensorRecord]:
    """The manifest's rows of tensors that are held here and are not another's."""
    for row in artifact.manifest.tensors:
        if row.kind in kinds and row.tied_to is None and row.stored_in is None:
            yield row
