"""Read a rank's file; its tensors, inputs and outputs must match its graph and the manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from tpcompiler._torch import RETURNED_KINDS, tree_flatten, tree_names
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import VALUES, Manifest, lacks_weights, program_file
from tpcompiler.runtime.model_file import check_pt2, load_program
from tpcompiler.runtime.place import memory_of
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.pt2 import Pt2
from tpcompiler.runtime.records import ON_AXIS, PLACEMENT
from tpcompiler.runtime.weights import laid_out, read_all, refuse_unlike

Tensors = Mapping[str, torch.Tensor]
# Reads the weights of a rank that are not cut yet: (manifest, tensors with values, rank, program) -> tensors by name.
Weights = Callable[[Manifest, Tensors, int, ExportedProgram], dict[str, torch.Tensor]]
AGAIN = "copy the artifact again, or convert the model again"
NEUTRAL = {"P(sum)": 0, "P(product)": 1}


def read_rank(files: ProgramFiles, rank: int, weights: Weights | None = None) -> ExportedProgram:
    """Read a rank's program; compare its hash, its tensors, and the names of its inputs and outputs.

    torch compares none of them: it would spread a bias of one element over all features, and the numbers would be
    wrong.

    Raises:
        ArtifactError: as `read_graph`; a tensor is extra, missing, or of another shape or dtype; inputs or outputs
            differ from the manifest.
    """
    program = read_graph(files, rank)
    return fill_rank(program, files, rank, files.folder / program_file(files.manifest, rank), weights)


def fill_rank(
    program: ExportedProgram, files: ProgramFiles, rank: int, path: Path, weights: Weights | None = None
) -> ExportedProgram:
    """Put a rank's weights into a program, and compare it with the manifest.

    Raises:
        ArtifactError: as `read_rank`; `path` is the program's file.
    """
    if weights is not None and rank in lacks_weights(files.manifest):
        put_state(program, weights(files.manifest, read_values(files), rank, program))
    else:
        put_state(program, read_state(files, rank, program))
    _check_tensors(program, files.manifest, rank, path)
    _check_boundary(program, files.manifest, path)
    return program


def read_graph(files: ProgramFiles, rank: int) -> ExportedProgram:
    """Read a rank's program; its weights may have no values.

    Raises:
        ArtifactError: as `read_program` and `load_rank`; the rank is outside the world.
    """
    with files.open_program(rank) as file, check_pt2(file, trust=files.trust) as pt2:
        return load_rank(pt2, files.manifest)


def read_program(files: ProgramFiles, name: str) -> ExportedProgram:
    """Read a program that ranks were made from, without its weights.

    Raises:
        ArtifactError: the artifact has none, the file has changed or, without trust, could run code.
    """
    with files.open(name) as file, check_pt2(file, trust=files.trust) as pt2:
        return load_program(pt2)


def load_rank(file: Pt2, manifest: Manifest) -> ExportedProgram:
    """Load a rank's program from a file that `check_pt2` checked.

    Raises:
        ArtifactError: as `load_program`; the program names another device than the manifest.
    """
    program = load_program(file)
    devices: set[str] = set()
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            named = tree_flatten([(node.args, node.kwargs) for node in part.graph.nodes])[0]
            devices |= {value.type for value in named if isinstance(value, torch.device)}
    if other := sorted(devices - {manifest.device_type}):
        raise ArtifactError(
            f"{file.path} names the device {other[0]!r}, and the manifest says {manifest.device_type!r}", help=AGAIN
        )
    tensors = {*manifest.rank_numbers, *(row.name for row in manifest.tensors)}
    if both := sorted(tensors.intersection(manifest.symm_mem)):  # a tensor would be replaced by memory without values
        raise ArtifactError(f"the manifest has {both[0]!r} as a tensor and as symmetric memory", help=AGAIN)
    if lacking := sorted(manifest.symm_mem.keys() - program.constants.keys()):
        raise ArtifactError(
            f"{file.path} has no symmetric memory {lacking[0]!r}, and the manifest names it", help=AGAIN
        )
    if strange := sorted({*manifest.symm_mem.values()} - manifest.groups.keys()):
        raise ArtifactError(f"the manifest has symmetric memory of {strange[0]!r}, which is not a group", help=AGAIN)
    return program


def read_state(files: ProgramFiles, rank: int, program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Map the tensors of a rank from the file with its weights, by name.

    Raises:
        ArtifactError: as `map_weights`; the file has other tensors than the program takes.
    """
    manifest = files.manifest
    here = [row.name for row in manifest.tensors if row.is_own]
    taken = taken_by(program)
    wanted = {name: value for name in (*here, *manifest.rank_numbers) if (value := taken.get(name)) is not None}
    path, state = map_weights(files, rank)
    refuse_unlike(path, state, wanted)
    if manifest.layout == "shared":  # the file has no strides
        state = {name: laid_out(value, wanted[name]) for name, value in state.items()}
    return with_tied(state, manifest)


def map_weights(files: ProgramFiles, rank: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """Map the tensors in the file with a rank's weights; return its path, too.

    Raises:
        ArtifactError: as `ProgramFiles.open_weights`; the file is damaged, or has another program than the ranks run.
    """
    manifest = files.manifest
    with files.open_weights(rank) as file:
        if manifest.layout == "shared":
            return file.path, read_all(file)
        with files.open_program(rank) as other, check_pt2(file, trust=files.trust, known=Pt2(other)) as whole:
            tensors = whole.state()
            trees = () if files.trust else (tree_flatten(each.examples())[1] for each in (whole, Pt2(other)))
            if len(set(map(str, trees))) > 1:  # torch's own checks of inputs are made from them
                raise ArtifactError(f"{file.path} has examples of other arguments than {other.path}", help=AGAIN)
    for row in (row for row in manifest.tensors if row.name in tensors):
        if isinstance(tensors[row.name], torch.nn.Parameter) != (row.kind == "parameter"):
            raise ArtifactError(f"{file.path}: {row.name!r} is no {row.kind}, as the manifest calls it", help=AGAIN)
    tensors = {name: value.detach() for name, value in tensors.items()}
    for name, first in ((row.name, row.tied_to) for row in manifest.tensors if row.stored_in is None):
        both = [tensors[each] for each in (name, first) if each in tensors and tensors[each].numel()]
        # torch's file has a tensor twice that is both in the state and a constant.
        if len(set(map(memory_of, both))) > 1 and not torch.equal(*(each.flatten().view(torch.uint8) for each in both)):
            raise ArtifactError(f"{file.path}: {name!r} is not {first!r}, to which it is tied", help=AGAIN)
    apart = {row.name for row in manifest.tensors if not row.is_own} | manifest.symm_mem.keys()
    return file.path, {name: value for name, value in tensors.items() if name not in apart}


def read_values(files: ProgramFiles) -> dict[str, torch.Tensor]:
    """Read the tensors that have values in a model that was exported without weights; empty for others.

    Raises:
        ArtifactError: as `ProgramFiles.open`.
    """
    if VALUES not in files.manifest.files:
        return {}
    with files.open(VALUES) as file:
        return read_all(file)


def with_tied(state: dict[str, torch.Tensor], manifest: Manifest) -> dict[str, torch.Tensor]:
    """Add the tied names of tensors."""
    tied = {row.name: row.tied_to for row in manifest.tensors if row.tied_to in state}
    return {**state, **{name: state[first] for name, first in tied.items()}}


def put_state(program: ExportedProgram, state: Mapping[str, torch.Tensor]) -> None:
    """Replace the tensors of a program by these."""
    parameters: dict[int, torch.Tensor] = {}
    for target in (program.state_dict, program.constants):
        for name in target.keys() & state.keys():
            value, old = state[name], target[name]
            if isinstance(old, torch.nn.Parameter):  # tied parameters stay one object
                value = parameters.setdefault(id(value), torch.nn.Parameter(value, requires_grad=old.requires_grad))
            target[name] = value


def _check_tensors(program: ExportedProgram, manifest: Manifest, rank: int, path: Path) -> None:
    held = {**program.constants, **program.state_dict}
    for name in manifest.symm_mem:
        held.pop(name, None)
    for name, rows in manifest.rank_numbers.items():
        numbers = held.pop(name, None)
        found = numbers.tolist() if isinstance(numbers, torch.Tensor) and numbers.dtype == torch.int64 else numbers
        if found != [rows[rank]]:
            raise ArtifactError(
                f"{path}: rank {rank} has the numbers {found}, and the manifest says {[rows[rank]]}", help=AGAIN
            )
    held = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    named = {row.name for row in manifest.tensors}
    if missing := sorted(named - held.keys()):
        raise ArtifactError(f"{path} has no tensor {missing[0]!r}, and the manifest names it", help=AGAIN)
    wanted = {name: value for name, value in taken_by(program).items() if isinstance(value, torch.Tensor)}
    taken = {name: value for name, value in wanted.items() if name in held}
    refuse_unlike(path, {name: held[name] for name in held.keys() - (named - taken.keys())}, taken)
    elsewhere = {row.name for row in manifest.tensors if row.stored_in is not None}
    for row in manifest.tensors:
        neutral = _neutral(row.sharding, manifest.degrees, rank)
        if neutral is not None and row.name not in elsewhere and not bool((held[row.name] == neutral).all()):
            raise ArtifactError(
                f"{path}: {row.name!r} is {row.sharding}, another rank holds all of it, and it is not {neutral} "
                f"everywhere on rank {rank}",
                help=AGAIN,
            )
    for name in sorted(taken.keys() - elsewhere):
        if (found := strides_of(held[name])) != (said := strides_of(taken[name])):
            raise ArtifactError(f"{path}: {name!r} has the strides {found}, its program takes {said}", help=AGAIN)


def _neutral(sharding: str, degrees: Mapping[str, int], rank: int) -> int | None:
    """Return the neutral number in every element of a pending leaf on ranks other than the first; None on the first."""
    apart = None
    axes = zip(degrees.values(), re.findall(ON_AXIS, sharding), strict=False)
    each = [(n, *part) for n, text in axes for part in re.findall(rf"(?:(\d+)x)?({PLACEMENT})", text)]
    for degree, factor, placement in reversed(each):
        degree = int(factor or degree)
        rank, here = divmod(rank, degree)
        if here and placement in NEUTRAL:
            apart = NEUTRAL[placement]
    return apart


def taken_by(program: ExportedProgram) -> dict[str, Any]:
    """Return the (fake) value in the graph of each parameter, buffer and constant, by name."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return {spec.target: values[spec.arg.name] for spec in specs if spec.target is not None}


def strides_of(value: torch.Tensor) -> list[int]:
    """Return the strides of dims with more than one element: others do not matter, even for writes."""
    if value.layout is not torch.strided or not value.numel():
        return []
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


def _check_boundary(program: ExportedProgram, manifest: Manifest, path: Path) -> None:
    signature, tree = program.graph_signature, program.call_spec.out_spec
    inputs = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs = [spec.arg for spec in signature.output_specs if spec.kind in RETURNED_KINDS]
    takes = [arg.name for arg in inputs if isinstance(arg, TensorArgument)]
    names = zip(tree_names(tree) if tree is not None else (), outputs, strict=True)
    gives = [name for name, arg in names if isinstance(arg, TensorArgument)]
    for does, has, rows in (("takes", takes, manifest.inputs), ("returns", gives, manifest.outputs)):
        if (said := [row.name for row in rows]) != has:
            both = f"{', '.join(has) or 'nothing'}, the manifest says {', '.join(said) or 'nothing'}"
            raise ArtifactError(f"{path}: its program {does} {both}", help=AGAIN)
