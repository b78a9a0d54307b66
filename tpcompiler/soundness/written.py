"""The programs of an artifact as they lie in its files, each graph read once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload, guards_of, read_archive_state, tree_flatten
from tpcompiler.ir import edit
from tpcompiler.runtime.archive import TENSORS
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.rank_file import load_rank, open_rank

GRAPH = "models/model.json"
ARGUMENTS = ("as_int", "as_ints", "as_float", "as_tensor")  # what may differ where nothing else does


@dataclass(frozen=True)
class Written:
    """One rank's program beside the tensors that it holds; ranks with one graph may have one program.

    `guards`: what the file asserts of inputs, which what is made of the program loses.
    """

    program: ExportedProgram
    state: Mapping[str, Any]
    guards: Sequence[str]


def written(program: ExportedProgram) -> Written:
    return Written(program, {**program.constants, **program.state_dict}, guards_of(program))


def read_ranks(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    prepare: Callable[[ExportedProgram], ExportedProgram] = lambda program: program,
    *,
    trust: bool = False,
) -> list[Written]:
    """All ranks' programs, with their hashes compared.

    torch takes long to read a graph. Where files have equal ones, that of the first serves; where only arguments of
    calls differ, such as the first id of a rank's part of a vocabulary, a copy of it is given those.

    Raises:
        ArtifactError: a file that is missing, damaged, cannot be read, or, without `trust`, could run code.
    """
    known: dict[str, ExportedProgram] = {}
    first: tuple[Any, ExportedProgram] | None = None
    rests: list[Any] = []
    guards: dict[str, Sequence[str]] = {}
    found: list[Written] = []
    for rank in range(manifest.world_size):
        with open_rank(directory, manifest, rank, trust=trust) as file:
            graph = _graph(file)
            rests.append(_rest(file))
            if not _are_alike(rests[0], rests[-1]):
                graph = None  # only torch can say whether it reads that
            name = hashlib.sha256(graph).hexdigest() if graph is not None else str(file.path)
            text = json.loads(graph) if graph is not None and name not in known else None
            if text is not None and first is not None and (like := _like(first[1], first[0], text)) is not None:
                known[name], guards[name] = like, found[0].guards
            if name in known:
                found.append(Written(known[name], read_archive_state(file.path, file), guards[name]))
                continue
            whole = load_rank(file, manifest)
        known[name], guards[name] = prepare(whole), guards_of(whole)
        if first is None and text is not None:
            first = text, known[name]
        found.append(Written(known[name], {**whole.constants, **whole.state_dict}, guards[name]))
    return found


def _graph(file: Opened) -> bytes | None:
    """What says all of a program but its tensors; None for a file of another form."""
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.partition("/")[2] == GRAPH)
            return archive.read(name)
    except (zipfile.BadZipFile, ValueError, OSError):
        return None


def _rest(file: Opened) -> tuple[dict[str, bytes], dict[str, object]] | None:
    """What a file says beside its graph and its tensors, and which of these are parameters; None for another form."""
    entries, parameters = {}, {}
    try:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                entry = name.partition("/")[2]
                if entry.endswith("_config.json"):
                    rows = json.loads(archive.read(name))["config"].items()
                    parameters.update({tensor: row["is_param"] for tensor, row in rows})
                elif entry != GRAPH and not entry.startswith(".data/") and not TENSORS.fullmatch(entry):
                    # `.data/` has a hash of the whole. Of examples only the structure matters.
                    entries[entry] = archive.read(name)
                    if "sample_inputs" in entry:
                        entries[entry] = _structure(entries[entry])
        return entries, parameters
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OSError):
        return None


def _structure(pickled: bytes) -> bytes:
    examples = torch.load(io.BytesIO(pickled), weights_only=True) if pickled else None
    return str(tree_flatten(examples)[1]).encode()


def _are_alike(one: tuple[Any, Any] | None, other: tuple[Any, Any] | None) -> bool:
    """Whether torch reads both if it reads one; tensors that one of them lacks are found elsewhere."""
    if one is None or other is None or one[0] != other[0]:
        return False
    return all(one[1][name] == other[1][name] for name in one[1].keys() & other[1].keys())


def _like(program: ExportedProgram, text: Any, other: Any) -> ExportedProgram | None:
    """The program of `other`, made of that of `text`; None where more than arguments of calls differ."""
    nodes, others = _nodes(text), _nodes(other)
    if _text(_but(text, nodes)) != _text(_but(other, others)) or len(nodes) != len(others):
        return None
    graph = edit.copy_graph(program.graph)
    by_name = {node.name: node for node in graph.nodes}
    for one, two in zip(nodes, others, strict=True):
        if _text(one) == _text(two):
            continue
        same = [{**node, "inputs": [{**given, "arg": None} for given in node["inputs"]]} for node in (one, two)]
        node = by_name.get(_made(one))
        if (
            _text(same[0]) != _text(same[1])
            or node is None
            or not isinstance(node.target, OpOverload)
            or str(node.target) != str(one["target"]).removeprefix("torch.ops.")
        ):
            return None
        for before, after in zip(one["inputs"], two["inputs"], strict=True):
            if _text(before["arg"]) == _text(after["arg"]):
                continue
            name, old, new = str(before["name"]), _read(before["arg"], by_name), _read(after["arg"], by_name)
            # One that torch has read otherwise stands twice among them, or in another place.
            if old is None or new is None or type(old) is not type(new) or edit.bound(node).get(name) != old:
                return None
            if [each["name"] for each in one["inputs"]].count(name) != 1:
                return None
            edit.set_argument(node, name, new)
    return ExportedProgram(
        root=fx.GraphModule(program.graph_module, graph),
        graph=graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _read(argument: Any, by_name: Mapping[str, fx.Node]) -> Any:
    """What torch makes of an argument that may differ; None for one of another form."""
    ((form, value),) = argument.items()
    if form == "as_tensor":
        return by_name.get(value["name"])
    return value if form in ARGUMENTS else None


def _text(data: Any) -> str:
    """That tells apart what is equal in Python and another number to torch: 3, 3.0 and true, 0.0 and -0.0."""
    return json.dumps(data, sort_keys=True)


def _made(node: Any) -> str:
    """What torch calls the node, whatever name it has in the file: after what it makes."""
    outputs = node["outputs"]
    return str(outputs[0]["as_tensor"]["name"]) if len(outputs) == 1 and "as_tensor" in outputs[0] else ""


def _nodes(text: Any) -> list[Any]:
    found: list[Any] = text["graph_module"]["graph"]["nodes"]
    return found


def _but(text: Any, nodes: list[Any]) -> Any:
    """All of it but these nodes, and where in memory a slice would begin."""
    module = text["graph_module"]
    values = {name: {**value, "storage_offset": None} for name, value in module["graph"]["tensor_values"].items()}
    graph = {**module["graph"], "nodes": len(nodes), "tensor_values": values}
    return {**text, "graph_module": {**module, "graph": graph}}
