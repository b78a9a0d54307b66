"""The compiled form of an artifact's programs: one AOTInductor package for all ranks, and what it was compiled for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler.errors import ArtifactError, TpCompilerWarning
from tpcompiler.runtime.artifact import open_known, programs_in, read_manifest
from tpcompiler.runtime.inputs import check_tensor
from tpcompiler.runtime.target import COMPILED, MANIFEST, RUNNER, SET, reason, replacing

AGAIN = "package it again here: tpcompiler package {}"
# What `-march=native` may use beyond what every such CPU has.
EXTENSIONS = re.compile(
    "3dnow|adx|aes|amx|avx|bmi|f16c|fma|gfni|lzcnt|abm|movbe|pclmul|popcnt|rd|sha|ss?se|sve|vaes|vpclmul|bf16|i8mm|asimd"
)
_loaded: list[Path] = []


@dataclasses.dataclass(frozen=True)
class Package:
    """What is known of an artifact's package, as plain data.

    Attributes:
        files: file name -> SHA-256 (hex), of the package and of the library that runs it from Python.
        models: program -> model in the package -> the ranks that run it. The program of a lone artifact is "".
        device_type: "cpu" or "cuda".
        torch: the version that compiled it, and runs it.
        compiler: the C++ compiler, as it names itself.
        strides: of the tensors that do not lie in memory as in a file, row by row.
        capability: what it needs of the CPU, or of the GPU.
        threads: of a rank's process, on the CPU.
    """

    files: dict[str, str]
    models: dict[str, dict[str, list[int]]]
    device_type: str
    torch: str
    compiler: str
    strides: dict[str, list[int]]
    capability: list[str]
    threads: int


def read_package(directory: str | os.PathLike[str]) -> Package | None:
    """What an artifact, or a directory of several programs, says of its package; None where it has none.

    Raises:
        ArtifactError: as `read_manifest`.
    """
    if programs_in(directory):
        said = json.loads((Path(directory) / SET).read_text(encoding="utf-8")).get("compiled")
    else:
        said = read_manifest(directory).compiled
    return Package(**said) if said else None


def drop_package(directory: Path) -> None:
    """Delete a package, and its name from the listing."""
    say_package(directory, None)
    for name in (COMPILED, RUNNER):
        (directory / name).unlink(missing_ok=True)


def say_package(directory: Path, package: Package | None) -> None:
    """Name a package, or none, in the listing of the directory that it lies in.

    Raises:
        OSError: it cannot be written.
    """
    listing = directory / (SET if programs_in(directory) else MANIFEST)
    data = json.loads(listing.read_text(encoding="utf-8"))
    data["compiled"] = dataclasses.asdict(package) if package else {}
    with replacing(listing) as path:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def find_capability(device_type: str) -> list[str]:
    """What code that is compiled here may ask of the machine: a GPU's generation, or the extensions of the CPU."""
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return [f"sm_{major}{minor}"]
    return sorted(word for word in set(_cpu_flags()) if EXTENSIONS.match(word))


def _cpu_flags() -> Iterator[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, said = line.partition(":")
            if name.strip() in ("flags", "Features"):
                yield from said.split()
                return
    except OSError:
        return


def refuse_elsewhere(directory: str | os.PathLike[str], package: Package) -> None:
    """Check that this process can run the package.

    Raises:
        ArtifactError: another torch, a CPU or GPU that lacks what the code uses, another number of threads.
    """
    at, again = os.fspath(directory), AGAIN.format(os.fspath(directory))
    if package.torch != torch.__version__:
        raise ArtifactError(f"the package in {at} is of torch {package.torch}, this is {torch.__version__}", help=again)
    here = find_capability(package.device_type)
    if lacks := [word for word in package.capability if word not in here]:
        what = f"a GPU of {lacks[0]}, this is {here[0]}" if package.device_type == "cuda" else ""
        what = what or f"a CPU with {', '.join(lacks[:4])}, which this one has not"
        raise ArtifactError(f"the package in {at} is for {what}", help=again)
    if package.device_type == "cpu" and (threads := torch.get_num_threads()) != package.threads:
        raise ArtifactError(
            f"the package in {at} is for {package.threads} thread{'s' * (package.threads != 1)}, "
            f"this process has {threads}",
            help=f"set OMP_NUM_THREADS={package.threads}, or package it again with --threads {threads}",
        )


def package_to_run(directory: str | os.PathLike[str], compiled: bool | None, trust: bool) -> Package | None:
    """The package of an artifact, if it is to be run in place of the programs.

    Args:
        compiled: whether it is; by default where there is one and the artifact is trusted: it is machine code.

    Raises:
        ArtifactError: there is none and `compiled` is set; as `refuse_elsewhere`.
    """
    package = read_package(directory) if compiled is not False else None
    if package is None:
        if compiled:
            raise ArtifactError(
                f"{os.fspath(directory)} has no package", help=f"make one: tpcompiler package {os.fspath(directory)}"
            )
        return None
    if not (compiled or trust):
        warnings.warn(
            f"{os.fspath(directory)} has a package, which is machine code and is not run unasked: pass compiled=True "
            "to run it, or compiled=False",
            TpCompilerWarning,
            stacklevel=4,
        )
        return None
    refuse_elsewhere(directory, package)
    return package


def packaged_module(
    directory: str | os.PathLike[str], package: Package, name: str, rank: int, program: ExportedProgram
) -> fx.GraphModule:
    """One of a package's models, over the tensors that the rank's program holds.

    Raises:
        ArtifactError: a file that is missing or not what was written, or has another model or other tensors.
    """
    for file in (COMPILED, RUNNER):
        open_known(directory, package.files, file).close()
    _load_library(Path(directory) / RUNNER)
    path = Path(directory) / COMPILED
    device = torch.cuda.current_device() if package.device_type == "cuda" else -1
    names = [model for model, ranks in package.models.get(name, {}).items() if rank in ranks]
    held = {**program.constants, **program.state_dict}
    try:
        (found,) = names
        model = torch.classes.tpcompiler.Model(str(path), found, device)
        lacks = [each for each in model.constants() if each not in held]
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(
            f"{path} has no model of {name or 'the program'} for rank {rank}: {reason(error)}",
            help=AGAIN.format(os.fspath(directory)),
        ) from error
    if lacks:
        raise ArtifactError(
            f"{path} takes the tensor {lacks[0]!r}, which its program does not", help=AGAIN.format(os.fspath(directory))
        )
    model.load({each: held[each].detach() for each in model.constants()})
    return _call_model(program, model)


def _load_library(path: Path) -> None:
    """Once for a process, whatever the artifact: all of one torch are built from one source."""
    if not _loaded:
        torch.classes.load_library(str(path))
        _loaded.append(path)


def _call_model(program: ExportedProgram, model: Any) -> fx.GraphModule:
    """The module of a program, with its checks of what it is given, and the model in the place of its ops."""
    module: Any = program.module()
    graph: fx.Graph = module.graph
    taken = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [node for node in graph.nodes if node.op == "placeholder" and isinstance(taken[node.name], torch.Tensor)]
    like = [taken[node.name] for node in inputs]

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        for node, value, wanted in zip(inputs, given, like, strict=True):
            check_tensor(node.name, value, wanted)
        own = [_in_memory_as(value, wanted) for value, wanted in zip(given, like, strict=True)]
        made: list[torch.Tensor] = model.run(own)
        for value, copied in zip(given, own, strict=True):
            if copied is not value:
                value.copy_(copied)  # the program may write to what it is given
        return made

    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        made = graph.call_function(run, tuple(inputs))
        numbered = itertools.count()
        output.args = fx.map_arg(output.args, lambda _: graph.call_function(operator.getitem, (made, next(numbered))))
    kept = {"placeholder", "call_module", "output"}  # a module checks the inputs
    for node in reversed(graph.nodes):
        if node.op not in kept and not node.users:
            graph.erase_node(node)
    module.recompile()
    return cast(fx.GraphModule, module)


def _in_memory_as(value: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides that the code was compiled for."""
    if wanted.is_contiguous():
        return value.contiguous()
    strides = [stride if isinstance(stride, int) else None for stride in wanted.stride()]
    if None in strides or list(value.stride()) == strides:
        return value
    return torch.empty_strided(value.shape, wanted.stride(), dtype=value.dtype, device=value.device).copy_(value)
