"""Run a package's models instead of an artifact's programs."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import module_inputs, user_inputs
from tpcompiler.errors import ArtifactError, reason
from tpcompiler.runtime.artifact import SINGLE, open_known
from tpcompiler.runtime.inputs import check_tensor
from tpcompiler.runtime.model_file import check_pt2
from tpcompiler.runtime.package import AGAIN, Package, called_file
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import Weights, fill_rank, load_rank
from tpcompiler.runtime.target import COMPILED, RUNNER

_loaded: list[Path] = []


def read_called(
    directory: Path, package: Package, files: ProgramFiles, rank: int, weights: Weights | None
) -> ExportedProgram:
    """Read the parts of a rank's program that a model does not replace: inputs, outputs, and tensors with values.

    Raises:
        ArtifactError: as `read_rank`.
    """
    model = _model_of(directory, package, files.name, rank)
    again = AGAIN.format(directory)
    with (
        open_known(directory, package.files, called_file(model), again) as file,
        check_pt2(file, trust=files.trust) as pt2,
    ):
        program = load_rank(pt2, files.manifest)
    return fill_rank(program, files, rank, file.path, weights)


def _model_of(directory: str | os.PathLike[str], package: Package, name: str, rank: int) -> str:
    for model, ranks in package.models.get(name, {}).items():
        if rank in ranks:
            return model
    program = "the program" if name == SINGLE else name
    raise ArtifactError(
        f"the package in {os.fspath(directory)} has no model of {program} for rank {rank}",
        help=AGAIN.format(os.fspath(directory)),
    )


def packaged_module(
    directory: str | os.PathLike[str],
    package: Package,
    name: str,
    rank: int,
    program: ExportedProgram,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> fx.GraphModule:
    """Return one of a package's models, bound to the tensors of the rank's program.

    Args:
        renamed: the names of tensors in the program by those in the model, where they differ.

    Raises:
        ArtifactError: a file is missing or changed, or has another model or other tensors.
    """
    for file in (COMPILED, RUNNER):
        open_known(directory, package.files, file, AGAIN.format(directory)).close()
    _load_library(Path(directory) / RUNNER)
    path = Path(directory) / COMPILED
    device = torch.cuda.current_device() if package.device_type == "cuda" else -1
    tensors = {**program.constants, **program.state_dict}
    try:
        model = torch.classes.tpcompiler.Model(str(path), _model_of(directory, package, name, rank), device)
        names = {each: renamed.get(each, each) for each in model.constants()}
        lacks = [own for own in names.values() if own not in tensors]
    except RuntimeError as error:
        raise ArtifactError(f"{path} cannot be loaded: {reason(error)}", help=AGAIN.format(directory)) from error
    if lacks:
        raise ArtifactError(
            f"{path} takes the tensor {lacks[0]!r}, which its program does not", help=AGAIN.format(directory)
        )
    model.load({each: tensors[own].detach() for each, own in names.items()})
    return _call_model(program, model)


def _load_library(path: Path) -> None:
    """Load the library once per process, for all artifacts: for one torch it always has the same source."""
    if not _loaded:
        torch.classes.load_library(str(path))
        _loaded.append(path)


def _call_model(program: ExportedProgram, model: Any) -> fx.GraphModule:
    """Return a program's module, with its input checks, and the model instead of its ops."""
    module: Any = program.module()
    graph: fx.Graph = module.graph
    names = [spec.arg.name for spec in user_inputs(program)]
    pairs = zip(names, module_inputs(program, module), strict=True)
    taken = {name: pair for name, pair in pairs if isinstance(pair[1], torch.Tensor)}
    inputs, like = [node for node, _ in taken.values()], {name: value for name, (_, value) in taken.items()}
    written = {str(s.target) for s in program.graph_signature.output_specs if s.kind is OutputKind.USER_INPUT_MUTATION}

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        for (name, wanted), value in zip(like.items(), given, strict=True):
            check_tensor(name, value, wanted)
        own = [value.contiguous() for value in given]  # the layout it was compiled for
        results: list[torch.Tensor] = model.run(own)
        for name, value, rows in zip(like, given, own, strict=True):
            if rows is not value and name in written:
                value.copy_(rows)
        return results

    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        results = graph.call_function(run, tuple(inputs))
        numbered = itertools.count()
        output.args = fx.map_arg(
            output.args, lambda _: graph.call_function(operator.getitem, (results, next(numbered)))
        )
    needed = {"placeholder", "call_module", "output"}  # a module checks the inputs
    for node in reversed(graph.nodes):
        if node.op not in needed and not node.users and node is not results:  # an op without users may still write
            graph.erase_node(node)
    module.recompile()
    return cast(fx.GraphModule, module)
