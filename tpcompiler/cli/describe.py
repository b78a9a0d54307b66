"""What `tpcompiler inspect` and `convert` say, as plain data: of a model, of an artifact, and a plan to begin with."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler.errors import TpCompilerError
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import Program, tied
from tpcompiler.ir.shares import row_sharding
from tpcompiler.ir.text import DTYPES
from tpcompiler.pipeline import find_styles
from tpcompiler.plan.styles import STYLES
from tpcompiler.printed import one_line
from tpcompiler.runtime.artifact import Manifest

DEEPEST = 8  # numbers in a name that are starred
EXPLAINED = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicate")
SKELETON_HEAD = f"""\
# A plan: what is cut, and how. Change the styles; "replicate" leaves a layer whole on every rank.
#   colwise                cut output features: the next layer takes them cut (rowwise) or they are gathered
#   rowwise                cut input features: the results are summed over the ranks
#   colwise_gather_output  cut output features, and gather them right away
#   embedding_rowwise      cut the vocabulary of an embedding
# Also: {", ".join(style for style in STYLES if style not in EXPLAINED)}; for one parameter a placement, such as S(0).
"""


def model_data(program: ExportedProgram) -> dict[str, Any]:
    """Modules, parameters, inputs, outputs and a plan skeleton of a single-device program, as JSON."""
    program = with_plain_weights(program)
    read = Program(program, program.graph)
    kinds = {spec.target: spec.kind.name.lower() for _, spec in read.inputs()}
    names = {node.name: fqn for node, fqn in read.leaves()}
    first_of = tied(read)
    parameters = []
    for node, fqn in read.leaves():
        value = read.state(fqn)
        row = {"name": fqn, "kind": kinds[fqn], **_described(value), "bytes": value.numel() * value.element_size()}
        if first_of[node.name] != node.name:
            row["tied_to"] = names[first_of[node.name]]
        parameters.append(row)
    return {
        "kind": "model",
        "modules": [{"name": name, "type": kind} for name, kind in _modules(program).items()],
        "parameters": parameters,
        "inputs": _inputs(program),
        "outputs": _outputs(program),
        "plan": plan_skeleton(program),
    }


def plan_skeleton(program: ExportedProgram) -> str:
    """A plan file for every weight of two or more dims, repeated layers folded: what the search finds for 2 ranks."""
    styles = _found(program)
    types = _modules(program)
    weights: dict[str, list[str]] = {}  # what the plan names -> its weights
    parts: dict[str, tuple[int, str]] = {}  # weight -> the largest of its parts: elements, shape
    read = Program(program, program.graph)
    first_of = tied(read)  # the plan names the first of tied ones, which places all of them
    parameters = dict.fromkeys(
        str(spec.target)
        for node, spec in read.inputs()
        if spec.kind is InputKind.PARAMETER and first_of[node.name] == node.name
    )
    layers = {weight_of(fqn): layer_of(fqn) for fqn in parameters}
    for fqn in parameters:
        if (value := read.state(fqn)).ndim >= 2:
            sized = (value.numel(), str(list(value.shape)))
            parts[weight_of(fqn)] = max(parts.get(weight_of(fqn), sized), sized)
    for weight, (_, shape) in parts.items():
        owner = layers[weight]
        named = f"{weight.rpartition('.')[2]} {shape}"
        weights.setdefault(weight if weight in styles or not owner else owner, []).append(named)
    lines = []
    for pattern, names in folded({name: (types.get(name), *own, styles.get(name)) for name, own in weights.items()}):
        kind = "parameter" if names[0] in layers else types.get(names[0], "layer").rpartition(".")[2]
        times = f", {len(names)} times" if len(names) > 1 else ""
        style = styles.get(names[0], "R" if names[0] in layers else "replicate")
        comment = f"{kind}: {', '.join(weights[names[0]])}{times}"
        lines.append((one_line(f"{json.dumps(pattern)}: {style}"), one_line(comment)))
    width = max((len(line) for line, _ in lines), default=0)
    return SKELETON_HEAD + "".join(f"{line:<{width}}  # {comment}\n" for line, comment in lines)


def _found(program: ExportedProgram) -> dict[str, str]:
    try:
        return find_styles(program, Mesh.of(2))
    except TpCompilerError:  # `convert` says why it cannot take the program
        return {}


def folded(signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Names that differ in numbers only, under one pattern with `*`: as far as all under it have one signature.

    `layers.0.up` and `layers.1.up` are `layers.*.up`; in `seq.0` and `seq.2` of two shapes the numbers stay.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in signatures:
        alike.setdefault(_starred(name, ()), []).append(name)  # names of as many parts, numbers in the same places
    place = {name: index for index, name in enumerate(signatures)}
    entries = [entry for names in alike.values() for entry in _split(names, signatures)]
    return sorted(entries, key=lambda entry: place[entry[1][0]])


def _split(names: Sequence[str], signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Star as many numbers as leave one signature in each group; the outer ones first, as inner ones tell more apart.

    To star one more makes groups larger, so that each number needs to be tried once.
    """
    numbers = [i for i, part in enumerate(names[0].split(".")) if part.isdigit()]
    kept, groups = set(numbers), {_starred(name, numbers): [name] for name in names}
    for number in numbers[:DEEPEST]:
        fewer = _grouped(names, kept - {number})
        if all(len({signatures[name] for name in group}) == 1 for group in fewer.values()):
            kept, groups = kept - {number}, fewer
    return [(".".join(key) if len(group) > 1 else group[0], group) for key, group in groups.items()]


def _grouped(names: Sequence[str], kept: Iterable[int]) -> dict[tuple[str, ...], list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(_starred(name, kept), []).append(name)
    return groups


def _starred(name: str, kept: Iterable[int]) -> tuple[str, ...]:
    return tuple("*" if part.isdigit() and i not in kept else part for i, part in enumerate(name.split(".")))


def artifact_data(manifest: Manifest) -> dict[str, Any]:
    """Mesh, bytes per rank, tensors, boundary, collectives by kind and cause, notes, versions of an artifact."""
    mesh = Mesh.of(manifest.mesh)
    tensors = []
    whole, per_rank = 0, [0] * mesh.world_size
    for row in manifest.tensors:
        sharding = row_sharding(row, mesh)
        size = _itemsize(row["dtype"])
        local = [
            torch.Size(sharding.local_shape(row["shape"], mesh, mesh.coordinate(rank))).numel() * size
            for rank in range(mesh.world_size)
        ]
        tensors.append({**row, "bytes": torch.Size(row["shape"]).numel() * size, "bytes_per_rank": local})
        if "tied_to" not in row:
            whole += tensors[-1]["bytes"]
            per_rank = [a + b for a, b in zip(per_rank, local, strict=True)]
    return {
        "kind": "artifact",
        "mesh": manifest.mesh,
        "device_type": manifest.device_type,
        "bytes": whole,
        "bytes_per_rank": per_rank,
        "tensors": tensors,
        "inputs": manifest.inputs,
        "outputs": manifest.outputs,
        "output_type": manifest.output_type,
        "collectives": _collectives(manifest.collectives),
        "fallbacks": [row for row in manifest.collectives if row["why"] == "fallback"],
        "notes": manifest.notes,
        "plan": manifest.plan,
        "versions": manifest.versions,
    }


def _collectives(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["kind"], row["why"])
        new = {"kind": key[0], "why": key[1], "count": 0, "payload_bytes": 0, "wire_bytes": 0}
        total = sums.setdefault(key, new)
        total["count"] += 1
        for part in ("payload_bytes", "wire_bytes"):
            total[part] += row[part]
    return list(sums.values())


def _modules(program: ExportedProgram) -> dict[str, str]:
    """Module FQN -> class, of every module that an op came from, in order of first use; nested graphs included."""
    found: dict[str, str] = {}
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            for name, kind in (node.meta.get("nn_module_stack") or {}).values():
                if name and name != edit.NO_MODULE:
                    found.setdefault(name, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
    return found


def _inputs(program: ExportedProgram) -> list[dict[str, Any]]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    out: list[dict[str, Any]] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, ConstantArgument):
                out.append({"name": spec.arg.name, "constant": repr(spec.arg.value)})
            else:
                out.append({"name": spec.arg.name, **_described(values[spec.arg.name])})
    return out


def _outputs(program: ExportedProgram) -> list[dict[str, Any]]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = Program(program, program.graph).output_names()
    user = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    out: list[dict[str, Any]] = []
    for name, spec in zip(names, user, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            out.append({"name": name, "constant": repr(spec.arg.value)})
        else:
            out.append({"name": name, **_described(values[spec.arg.name])})
    return out


def _described(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"number": str(value)}  # one that the program takes or makes, maybe symbolic
    shape = [s if isinstance(s, int) else str(s) for s in value.shape]
    return {"shape": shape, "dtype": DTYPES.get(value.dtype, str(value.dtype))}


def _itemsize(text: str) -> int:
    by_text = {short: dtype for dtype, short in DTYPES.items()}
    dtype: torch.dtype = by_text[text] if text in by_text else getattr(torch, text.removeprefix("torch."))
    return dtype.itemsize
