"""Find the smallest piece of a program, and the fewest placements, that still come out wrong."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler.api import parallelize
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.errors import InternalError, TpCompilerError, explaining
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh, MeshLike
from tpcompiler.ir.node_placement import origin_of, placement_of
from tpcompiler.ir.placements import format_spec
from tpcompiler.ir.program import PlacedProgram, reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import row_sharding
from tpcompiler.ir.text import op_name
from tpcompiler.parallel.converted_program import ConvertedProgram
from tpcompiler.plan.plan import Plan
from tpcompiler.runtime.inputs import flatten_inputs
from tpcompiler.runtime.target import refuse_strange_name, replacing

MOST_STEPS = 12  # number of ops before the first wrong one that a piece may reach back
UNUSABLE = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    TpCompilerError,
    InternalError,
)  # of pieces
SCRIPT = '''"""{title}"""

import pathlib

import torch

import tpcompiler

program = torch.export.load(pathlib.Path(__file__).with_name("piece.pt2"))
made = tpcompiler.parallelize(
    program,
    {mesh!r},
    {plan!r},
    inputs={inputs!r},
)
print(program.graph)
report = made.verify(*program.example_inputs)
print(report)
raise SystemExit(not report.ok)
'''


@dataclass(frozen=True)
class WrongPiece:
    """A wrong piece: its program, the placements of leaves and inputs that make it wrong, and its ops, in order."""

    program: ExportedProgram
    mesh: Mesh
    plan: Mapping[str, Any]
    inputs: Sequence[Any]
    ops: tuple[str, ...]


def bisect(
    model: ExportedProgram,
    mesh: MeshLike,
    plan: Plan | Mapping[str, object] | str | os.PathLike[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
) -> WrongPiece | None:
    """Shrink a wrong conversion: ops first, then placements. Return None if a new conversion is right.

    The first wrong value is converted alone, with its shardings in the whole program, on operands that the model
    computes from these inputs; if that is right, with the ops before it, one step more at a time. Placements that the
    error does not need are removed (Zeller, "Yesterday, my program worked", 1999).

    Raises:
        TpCompilerError: the model cannot be converted, or does not run on these inputs.
    """
    program = parallelize(model, mesh, plan, inputs=inputs, outputs=outputs)
    report = program.verify(args, kwargs or {})
    if report.ok:
        return None
    name = re.match(r"'([^']+)'", report.first_diverging or "")
    wrong = _origin(program.converted, name[1] if name else "")
    for piece in _pieces(program.converted.resharded, wrong, args, kwargs or {}):
        if _is_wrong(piece):
            return _fewest(piece)
    return WrongPiece(model, program.mesh, Plan.of(plan).to_data(), [], ("the whole program",))


def bisect_artifact(
    artifact: ArtifactProgram,
    model: ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | os.PathLike[str],
) -> str:
    """Convert the model again as the artifact specifies, `bisect` that, and return the finding as a sentence."""
    manifest = artifact.manifest
    mesh = Mesh.of(manifest.mesh)
    boundary = [
        {
            row.name: _spec(sharding, mesh)
            for row in rows
            for sharding, whole in [row_sharding(row, artifact.mesh).join_factors(artifact.mesh)]
            if sharding.axes and whole == mesh  # else the search found it
        }
        for rows in (manifest.inputs, manifest.outputs)
    ]
    piece = bisect(model, mesh, manifest.plan, args, kwargs, inputs=boundary[0] or None, outputs=boundary[1] or None)
    if piece is None:
        return f"converted again, the model is right, so the files in {artifact.title} are not what was written"
    return f"{', '.join(piece.ops)}: run {write_piece(piece, target)}"


def write_piece(piece: WrongPiece, directory: str | os.PathLike[str]) -> Path:
    """Write `piece.pt2` and `repro.py`, which exits with 1 as long as the piece is wrong; return the script.

    Raises:
        ArtifactError: the files cannot be written.
    """
    target = Path(directory)
    refuse_strange_name(target)
    title = f"Wrong on {piece.mesh}: {', '.join(piece.ops)}."
    text = SCRIPT.format(title=title, mesh=piece.mesh.written, plan=dict(piece.plan), inputs=list(piece.inputs))
    help = "choose a directory that can be written"
    # torch raises a RuntimeError for an OSError
    with explaining(f"cannot write the piece to {target}", help, OSError, RuntimeError):
        target.mkdir(parents=True, exist_ok=True)
        with replacing(target / "piece.pt2") as temporary:
            torch.export.save(piece.program, temporary)
        with replacing(target / "repro.py") as temporary:
            temporary.write_text(text, encoding="utf-8")
    return target / "repro.py"


def _origin(made: ConvertedProgram, name: str) -> str:
    """Return the single-device op behind a value of the ranks' programs."""
    local = {node.name: node for node in made.partition.local_program(0).graph.nodes}
    return origin_of(local[name]) if name in local else name


def _pieces(program: PlacedProgram, wrong: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[WrongPiece]:
    """Yield the wrong op alone, then with the ops up to so many steps before it."""
    last = next((node for node in program.graph.nodes if node.name == wrong), None)
    if last is None:
        return
    values = _values(program, args, kwargs)
    inside, before = {last}, 0
    for _ in range(MOST_STEPS):
        inside |= {node for node in map(_plain, _used(inside)) if node.target is operator.getitem}
        inside |= {_plain(node.all_input_nodes[0]) for node in inside if node.target is operator.getitem}
        if len(inside) > before:
            before = len(inside)
            with contextlib.suppress(*UNUSABLE):
                yield _piece(program, [node for node in program.graph.nodes if node in inside], last, values)
        inside |= {node for node in map(_plain, _used(inside)) if node.op == "call_function"}


def _used(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {used for node in nodes for used in node.all_input_nodes}


def _plain(node: fx.Node) -> fx.Node:
    """Return the value before any change of sharding."""
    while node.target is reshard:
        node = node.all_input_nodes[0]
    return node


def _values(program: PlacedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[fx.Node, Any]:
    """Return every node's value on one device."""
    feed = iter(flatten_inputs(program.source, args, kwargs))
    env: dict[fx.Node, Any] = {}
    for node, spec in program.inputs():
        env[node] = next(feed) if spec.kind is InputKind.USER_INPUT else program.state(str(spec.target))
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "call_function":
                given, named = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
                env[node] = node.target(*given, **named)
    return env


def _piece(
    program: PlacedProgram, nodes: Sequence[fx.Node], last: fx.Node, values: Mapping[fx.Node, Any]
) -> WrongPiece:
    """Export these ops as a separate program: leaves keep their names, other operands become inputs."""
    names, mesh = dict(program.leaves()), _apart(program.mesh)
    graph, root = fx.Graph(), torch.nn.Module()
    env: dict[fx.Node, Any] = {}
    plan: dict[str, Any] = {}
    inputs: list[fx.Node] = []
    wants: dict[fx.Node, Sharding] = {}
    for node in nodes:
        for operand, want in zip(edit.operands(node), placement_of(node).wants, strict=True):
            wants.setdefault(_plain(operand), want)
    for used in dict.fromkeys(_plain(used) for node in nodes for used in node.all_input_nodes):
        if used in names and edit.is_tensor(used):
            _put(root, names[used], values[used])
            if not (sharding := placement_of(used).shardings[0]).partial:
                plan[names[used]] = _spec(sharding, program.mesh, mesh)
        elif used not in nodes and edit.is_tensor(used):
            inputs.append(used)
    for used in inputs:
        env[used] = graph.placeholder(f"{used.name}_in")
    for node in nodes:
        for used in map(_plain, node.all_input_nodes):
            if used in names and used not in env:
                env[used] = graph.get_attr(names[used])
        env[node] = graph.node_copy(node, lambda n: env[_plain(n)] if _plain(n) in env else values[n])
    result = env[last]
    graph.output(result)
    module = fx.GraphModule(root, graph)
    exported = torch.export.export(module, tuple(values[node] for node in inputs))
    given = [_spec(wants[node].without_partial, program.mesh, mesh) for node in inputs]
    return WrongPiece(exported, mesh, plan, given, tuple(f"{op_name(node)} ('{node.name}')" for node in nodes))


def _put(root: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    if isinstance(value, torch.nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value)


def _apart(mesh: Mesh) -> Mesh:
    """Return a mesh that has the factors of axes as axes, so that a plan can name them."""
    names = {name: name if name.isidentifier() else f"factor_{at}" for at, name in enumerate(mesh.names)}
    return Mesh(tuple((names[name], degree) for name, degree in mesh.parts), shares=mesh.shares)


def _spec(sharding: Sharding, mesh: Mesh, names: Mesh | None = None) -> Any:
    """Return a sharding in the form of a plan: one placement, or one for each axis, by its name in `names`."""
    placements = dict(zip((names or mesh).names, sharding.placements(mesh), strict=True))
    return format_spec(placements if len(placements) > 1 else next(iter(placements.values())))


def _is_wrong(piece: WrongPiece) -> bool:
    assert piece.program.example_inputs is not None
    try:
        program = parallelize(piece.program, piece.mesh, dict(piece.plan), inputs=list(piece.inputs))
        return not program.verify(*piece.program.example_inputs).ok
    except (TpCompilerError, InternalError):  # another fault than the one that is searched for
        return False


def _fewest(piece: WrongPiece) -> WrongPiece:
    """Remove the placements that the piece does not need to be wrong."""
    for name in piece.plan:
        without = replace(piece, plan={n: spec for n, spec in piece.plan.items() if n != name})
        piece = without if _is_wrong(without) else piece
    for at in range(len(piece.inputs)):
        without = replace(piece, inputs=[None if i == at else spec for i, spec in enumerate(piece.inputs)])
        piece = without if _is_wrong(without) else piece
    return piece
