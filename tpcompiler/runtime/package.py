"""The compiled form of an artifact: one AOTInductor package for all ranks, for one kind of machine."""

from __future__ import annotations

import itertools
import operator
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import module_inputs, user_inputs
from tpcompiler.errors import ArtifactError, TpCompilerWarning, explaining, option
from tpcompiler.runtime.artifact import SINGLE, open_known, read_manifest, read_programs, write_record
from tpcompiler.runtime.inputs import check_tensor
from tpcompiler.runtime.model_file import check_pt2
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import Weights, fill_rank, load_rank
from tpcompiler.runtime.records import Package as Package
from tpcompiler.runtime.target import COMPILED, MANIFEST, RUNNER, SET, replacing

AGAIN = "package it again here: tpcompiler package {}"
# Extensions that `-march=native` may use and that not every CPU has.
EXTENSIONS = re.compile(
    "3dnow|adx|aes|amx|avx|bmi|f16c|fma|gfni|lzcnt|abm|movbe|pclmul|popcnt|rd|sha|ss?se|sve|vaes|vpclmul|bf16|i8mm|asimd"
)


def read_package(directory: str | os.PathLike[str]) -> Package | None:
    """Return the package of an artifact or of a set of programs; None if it has none.

    Raises:
        ArtifactError: as `read_manifest`.
    """
    listed = read_programs(directory)
    return (listed or read_manifest(directory)).compiled


def refuse_other_package(directory: str | os.PathLike[str]) -> None:
    """Compare the files of a package, if there is one, with their hashes.

    Raises:
        ArtifactError: a file is missing, not regular, a link to elsewhere, or has other content.
    """
    package = read_package(directory)
    files = package.files if package else {}
    for name in files:
        open_known(directory, files, name, AGAIN.format(os.fspath(directory))).close()


def called_file(model: str) -> str:
    """Return the name of the file with a model's inputs, outputs and tensors but no ops: it loads quickly."""
    return f"compiled_{model}.pt2"


def drop_package(directory: Path) -> None:
    """Delete a package and its entry in the listing; deleting first makes room on a full disk."""
    for name in _files_of(directory):
        (directory / name).unlink(missing_ok=True)
    record_package(directory, None)


def record_package(directory: Path, package: Package | None, files: Sequence[Path] = ()) -> None:
    """Record a package, or None, in the directory's listing, and move its files there in place of an earlier one's.

    Raises:
        OSError: the listing cannot be written; no file was moved.
    """
    listed, earlier = read_programs(directory), _files_of(directory)
    with replacing(directory / (SET if listed else MANIFEST)) as path:
        write_record(path, msgspec.structs.replace(listed or read_manifest(directory), compiled=package))
        for file in files:
            os.replace(file, directory / file.name)
        for name in earlier.difference(package.files if package else ()):
            (directory / name).unlink(missing_ok=True)


def _files_of(directory: Path) -> set[str]:
    package = read_package(directory)
    return set(package.files) if package else set()


def find_capability(device_type: str) -> list[str]:
    """Return the machine features that code compiled here may need: a GPU's generation, or the CPU's extensions."""
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return [f"sm_{major}{minor}"]
    return sorted(word for word in set(_cpu_flags()) if EXTENSIONS.match(word))


def _cpu_flags() -> Iterator[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                yield from words.split()
                return
    except OSError:
        return


def refuse_elsewhere(directory: str | os.PathLike[str], package: Package) -> None:
    """Check that this process can run the package.

    Raises:
        ArtifactError: another torch or thread count, or a CPU or GPU without a feature that the code uses.
    """
    at, again = os.fspath(directory), AGAIN.format(os.fspath(directory))
    if package.torch != torch.__version__:
        raise ArtifactError(f"the package in {at} is of torch {package.torch}, this is {torch.__version__}", help=again)
    if package.device_type == "cuda" and not torch.cuda.is_available():
        raise ArtifactError(f"the package in {at} is for CUDA, and torch finds no CUDA device here", help=again)
    here = find_capability(package.device_type)
    if lacks := [word for word in package.capability if word not in here]:
        what = f"a GPU of {lacks[0]}, this is {here[0]}" if package.device_type == "cuda" else ""
        what = what or f"a CPU with {', '.join(lacks[:4])}, which this one lacks"
        raise ArtifactError(f"the package in {at} is for {what}", help=again)
    if package.device_type == "cpu" and (threads := torch.get_num_threads()) != package.threads:
        raise ArtifactError(
            f"the package in {at} is for {package.threads} thread{'s' * (package.threads != 1)}, "
            f"this process has {threads}",
            help=f"set OMP_NUM_THREADS={package.threads}, or package it again with "
            + option(f"--threads {threads}", f"threads={threads}"),
        )


def package_to_run(
    directory: str | os.PathLike[str], compiled: bool | None, trust: bool, processes: int = 0
) -> Package | None:
    """Return the package of an artifact if it should run instead of the programs.

    Args:
        compiled: True or False decides; None runs a package only in a trusted artifact, because it is machine code.
        processes: their number, if each runs several ranks.

    Raises:
        ArtifactError: `compiled` is set and there is no package, or one for other processes; as `refuse_elsewhere`.
    """
    package = read_package(directory) if compiled is not False else None
    if package is None:
        if compiled:
            raise ArtifactError(
                f"{os.fspath(directory)} has no package", help=f"make one: tpcompiler package {os.fspath(directory)}"
            )
        return None
    if package.processes != processes:
        own, here = (
            f"{each} processes with the same bits" if each else "a process for each rank"
            for each in (package.processes, processes)
        )
        again = AGAIN.format(os.fspath(directory)) + (f" --processes {processes}" if processes else "")
        said = f"the package in {os.fspath(directory)} is for {own}, and this is {here}"
        if compiled:
            raise ArtifactError(said, help=again)
        if trust:
            warnings.warn(f"{said}: the programs run uncompiled; {again}", TpCompilerWarning, stacklevel=4)
        return None
    if not (compiled or trust):
        warnings.warn(
            f"{os.fspath(directory)} has a package, which is machine code and runs only on request: pass "
            + option("--compiled to run it, or --not-compiled", "compiled=True to run it, or compiled=False"),
            TpCompilerWarning,
            stacklevel=4,
        )
        return None
    refuse_elsewhere(directory, package)
    return package


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
    with explaining(f"{path} cannot be loaded", AGAIN.format(directory), RuntimeError):
        model = torch.classes.tpcompiler.Model(str(path), _model_of(directory, package, name, rank), device)
        names = {each: renamed.get(each, each) for each in model.constants()}
        lacks = [own for own in names.values() if own not in tensors]
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
