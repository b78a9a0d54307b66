"""What a parallel program costs, as records and as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import asdict
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.collective import KIND_OF, wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import split_layer
from tpcompiler.ir.program import RESHARD, LocalProgram, Note, Reshard
from tpcompiler.runtime.records import Collective as Collective
from tpcompiler.runtime.records import Transfer
from tpcompiler.terminal.printed import format_bytes

NOTE_TITLES = {  # kinds of `Note`, as people read them
    "plan": "plan entries that are left out",
    "untouched": "layers that no plan entry touches",
    "whole": "weights that stay whole in a layer that is cut",
    "dropped": "weights that no op uses any more, left out",
    "no rule": "ops without a rule",
    "size": "dynamic sizes that the mesh must divide",
    "random": "ops that draw random numbers",
    "mesh": "axes that run as two",
    "both": "conds of which both branches are computed",
    "shared": "weights that several ranks share",
    "idle": "axes that cut nothing: their ranks repeat each other",
    "examples": "example inputs",
    "collectives": "collectives over symmetric memory",
    "search": "the search for placements",
    "uncut": "layers that stay whole, because a call would take longer with them cut",
    "cut": "weights cut in parts, blocks or whole heads, or unevenly",
}


def collectives_of(program: LocalProgram) -> list[Collective]:
    """Every collective that the program calls, in order."""
    out = []
    for node in edit.calls(program.graph):
        if edit.is_collective(node):
            change: Reshard = node.meta[RESHARD]
            out.append(
                Collective(
                    **asdict(transfer_of(node, program.mesh)),
                    node=node.name,
                    module=edit.module_path(node),
                    source=edit.source_line(node),
                    why=change.why,
                    reason=change.reason,
                    reshard=change.name,
                )
            )
    return out


def transfer_of(node: fx.Node, mesh: Mesh) -> Transfer:
    """Count the bytes of a collective, with the sizes of the example."""
    kind = KIND_OF[str(node.target).split(".")[1]]
    axes = mesh.axes_of(str(node.args[-1]))
    payload, size = _bytes(sent_value(node).meta["val"]), mesh.size(axes)
    wire = wire_bytes(kind, payload, size)
    return Transfer(kind=kind, axis=".".join(axes), payload_bytes=payload, group_size=size, wire_bytes=wire)


def sent_value(node: fx.Node) -> fx.Node:
    """The value whose bytes are a collective's payload: what is gathered in all, or what is taken."""
    return node if "all_gather" in str(node.target) else edit.operands(node)[0]


def report_text(
    mesh: Mesh,
    whole: int,
    per_rank: Sequence[int],
    collectives: Sequence[Collective],
    notes: Sequence[Note],
    advice: Mapping[str, str],
) -> str:
    """Bytes of the leaves on one device and on each rank, collectives by cause and layer, and what was declined.

    `advice`: what would leave out a collective, by the name of its reshard; empty text for nothing.
    """
    shares = ", ".join(f"{format_bytes(b)} ({100 * b / max(whole, 1):.1f}%)" for b in per_rank)
    lines = [f"mesh {mesh}", f"parameters: {format_bytes(whole)} on one device; per rank {shares}"]
    for why in ("inherent", "plan-demanded", "fallback"):
        chosen = [c for c in collectives if c.why == why]
        total = sum(c.wire_bytes for c in chosen)
        lines.append(f"{why} collectives: {len(chosen)}, {format_bytes(total)} sent per rank and call")
        if why == "inherent":
            lines += _by_layer(chosen)
            continue
        for c in chosen:
            where = c.source or c.module
            lines.append(f"  {c.kind} of {format_bytes(c.payload_bytes)}, '{c.node}' at {where}: {c.reason}")
            if why == "fallback" and (help := advice.get(c.reshard)):
                lines.append(f"    help: {help}")
    for kind, title in NOTE_TITLES.items():
        texts = [note.text for note in notes if note.kind == kind]
        if texts:
            lines += [f"{title}:", *(f"  {text}" for text in texts)]
    return "\n".join(lines)


def _by_layer(collectives: Sequence[Collective]) -> list[str]:
    """`layers.*: 2 all_reduce in each of 6`: collectives counted per repeated layer."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for collective in collectives:
        stem, number = split_layer(collective.module.rpartition(".")[0])
        owner = f"{stem}*" if number else collective.module or "the model"
        counts.setdefault((owner, collective.kind), Counter())[number] += 1
    lines = []
    for (owner, kind), per_layer in counts.items():
        each = set(per_layer.values())
        spread = f" in each of {len(per_layer)}" if len(each) == 1 else f" in {len(per_layer)} layers"
        count = each.pop() if len(each) == 1 else per_layer.total()
        lines.append(f"  {owner}: {count} {kind}{spread if owner.endswith('*') else ''}")
    return lines


def _bytes(value: torch.Tensor) -> int:
    return torch.Size([sym_hint(s) for s in value.shape]).numel() * value.element_size()
