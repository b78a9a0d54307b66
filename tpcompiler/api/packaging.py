"""Compile an artifact's programs with AOTInductor: once for all ranks, without their weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten, fake_group, group_is_registered, sym_hint, tree_flatten, with_graph
from tpcompiler.api.verify_files import verify_package
from tpcompiler.errors import ArtifactError, UnsupportedError, reason
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.runtime.artifact import (
    Manifest,
    lacks_weights,
    open_checked,
    program_file,
    programs_in,
    read_manifest,
    sha256,
)
from tpcompiler.runtime.package import Package, called_file, drop_package, find_capability, say_package
from tpcompiler.runtime.place import leave_out
from tpcompiler.runtime.rank_file import load_rank, open_rank, taken_by
from tpcompiler.runtime.scratch import scratch_folder
from tpcompiler.runtime.target import COMPILED, RUNNER
from tpcompiler.runtime.weightless import save_marked, weightless_names
from tpcompiler.terminal.progress import counted, measured

SOURCE = Path(__file__).parents[1] / "runtime" / "runner.cpp"


def package(
    directory: str | os.PathLike[str],
    *,
    threads: int = 1,
    check: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> tuple[Package, VerifyReport | None]:
    """Compile every program of an artifact into one package beside it, `compiled.pt2`, once for all ranks alike.

    No weights are read to compile. The package is for this version of torch and for CPUs or GPUs that have what this
    one has; `tpcompiler.load` runs it. Then it is run, as `verify_package` does, and deleted if it is not right.

    Args:
        directory: an artifact, or a directory of several programs.
        threads: of a rank's process, where it runs on the CPU; torchrun sets one.
        check: whether to run it.
        checkpoint: weights to run it with, where none are cut yet.
        trust: read files too that need a pickle or could run code (docs/security.md).

    Returns:
        What it is for, and how it compares with the model.

    Raises:
        ArtifactError: no artifact, or the package cannot be written there.
        UnsupportedError: no compiler that fits torch, or a program that AOTInductor does not take.
        LaunchError, InputsError: as `verify_package`.
    """
    folder = Path(directory)
    names = programs_in(folder)
    manifests = {name: read_manifest(folder / name) for name in names or [""]}
    device_type = next(iter(manifests.values())).device_type
    for name, manifest in manifests.items() if check and checkpoint is None else ():
        if lacking := lacks_weights(manifest):
            open_checked(folder / name, manifest, lacking[0], weights=True).close()  # says what to do
    from tpcompiler._torch import inductor

    try:
        compiler = inductor.compiler()
    except RuntimeError as error:
        raise UnsupportedError(
            f"there is no C++ compiler here: {reason(error)}", help="install g++, or name one with CXX=..."
        ) from error
    files: dict[str, list[Any]] = {}
    strides: dict[str, list[int]] = {}
    called: dict[str, ExportedProgram] = {}
    models: dict[str, dict[str, list[int]]] = {}
    classes = {name: _classes(folder / name, manifest, trust) for name, manifest in manifests.items()}
    each = [(name, index, ranks) for name, own in classes.items() for index, ranks in enumerate(own)]
    for name, index, ranks in counted(each, "compiling", "models"):
        model, manifest = f"{name or 'model'}_{index}", manifests[name]
        models.setdefault(name, {})[model] = ranks
        program = _read(folder / name, manifest, ranks[0], trust)
        strides |= _strides(program)
        if manifest.programs:  # otherwise the weights lie in the program's own file, and it is read anyhow
            called[model] = _without_ops(program)
        files[model] = _compile(program, folder / name / program_file(manifest, ranks[0]), manifest, ranks[0], threads)
        for file in files[model]:
            if Path(file).suffix == ".so":
                refuse_static(Path(file), compiler)
    with _beside(folder) as temporary:
        inductor.write_package(temporary / COMPILED, files)
        with measured("building the library that runs it", "files", 1):
            shutil.copy(build_runner(compiler), temporary / RUNNER)
        for model, program in called.items():
            held = {**program.constants, **program.state_dict}
            save_marked(program, temporary / called_file(model), weightless_names(program), held)
        made = Package(
            files={path.name: sha256(path) for path in sorted(temporary.iterdir())},
            models=models,
            device_type=device_type,
            torch=torch.__version__,
            compiler=_version(compiler),
            strides=strides,
            capability=find_capability(device_type),
            threads=threads,
        )
        say_package(folder, made, [temporary / name for name in made.files])
    report = None
    try:
        report = verify_package(folder, checkpoint=checkpoint, trust=trust) if check else None
        return made, report
    finally:
        if check and not (report and report.ok):
            drop_package(folder)


def _classes(directory: Path, manifest: Manifest, trust: bool) -> list[list[int]]:
    """The ranks that run one graph on values of equal shapes."""
    if manifest.programs:
        return list(manifest.programs.values())
    found: dict[str, list[int]] = {}
    for rank in range(manifest.world_size):
        program = _read(directory, manifest, rank, trust)
        taken = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
        shapes = [(value.shape, value.stride()) if isinstance(value, torch.Tensor) else value for value in taken]
        found.setdefault(f"{program.graph}{shapes}", []).append(rank)
    return list(found.values())


def _read(directory: Path, manifest: Manifest, rank: int, trust: bool) -> ExportedProgram:
    with open_rank(directory, manifest, rank, trust=trust) as file:
        return load_rank(file, manifest)


def _strides(program: ExportedProgram) -> dict[str, list[int]]:
    """Of the tensors that a program holds otherwise than row by row, by name."""
    held = {name: value for name, value in taken_by(program).items() if isinstance(value, torch.Tensor)}
    return {name: list(value.stride()) for name, value in held.items() if not value.is_contiguous()}


def _without_ops(program: ExportedProgram) -> ExportedProgram:
    """The program with what it takes, returns and writes, and nothing that computes it."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        known[node] = graph.node_copy(node)
    (old,) = program.graph.find_nodes(op="output")
    some = next(iter(known.values()), None)
    for node in old.all_input_nodes:
        if node not in known:
            if some is None:
                raise UnsupportedError("a program that takes nothing has no package", help="give it an input")
            known[node] = graph.create_node("call_function", aten.alias.default, (some,), name=node.name)
            known[node].meta["val"] = node.meta["val"]
    graph.output(fx.map_arg(old.args[0], lambda node: known[node]))
    made = with_graph(program, {}, graph)
    for name in weightless_names(made):
        leave_out(made, name)
    return made


def _compile(program: ExportedProgram, path: Path, manifest: Manifest, rank: int, threads: int) -> list[Any]:
    """The files of the model that a rank and all that are like it run."""
    from tpcompiler._torch import inductor

    for held in (program.state_dict, program.constants):
        for name, value in held.items():
            if isinstance(value, torch.Tensor):  # memory that is never touched
                empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=manifest.device_type)
                held[name] = torch.nn.Parameter(empty, False) if isinstance(value, torch.nn.Parameter) else empty
    module, args = plain_module(program, path)
    with contextlib.ExitStack() as stack:
        for name, groups in manifest.groups.items():
            if group_is_registered(name):  # by `load`, in this process
                continue
            own = next(ranks for ranks in groups if rank in ranks)
            stack.enter_context(fake_group(name, own.index(rank), len(own), manifest.device_type))
        stack.enter_context(torch.no_grad())
        stack.enter_context(inductor.quiet_inductor())
        try:
            return inductor.compile_module(module, args, threads)
        except Exception as error:  # whatever Inductor, or the compiler that it calls, raises
            raise UnsupportedError(
                f"AOTInductor does not compile {path}: {reason(error)}",
                help="run it as it is, without a package; TORCH_LOGS=+inductor says more",
            ) from error


def plain_module(program: ExportedProgram, path: Path) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The program as a module that takes and returns tensors one by one, and tensors to compile it with."""
    taken = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    module: Any = program.module(check_guards=False)
    graph: fx.Graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    args = []
    for node in graph.find_nodes(op="placeholder"):
        value = taken[node.name]
        if isinstance(value, torch.Tensor):
            shape = [sym_hint(size) for size in value.shape]
            args.append(torch.zeros(shape, dtype=value.dtype, device=value.device))
            if not value.is_contiguous():
                _take_contiguous(node, value)
        elif node.users:
            raise UnsupportedError(
                f"{path} takes the number {node.name!r}, and a package takes tensors only",
                help="make it a tensor in the model, and export and convert again",
            )
        else:
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    values = [value for value in tree_flatten(output.args[0])[0] if isinstance(value, fx.Node)]
    for value in values:
        if not isinstance(value.meta.get("val", args), torch.Tensor | list):  # what is written back has no value
            raise UnsupportedError(
                f"{path} returns the number {value.name!r}, and a package returns tensors only",
                help="return a tensor in the model, and export and convert again",
            )
    output.args = (tuple(values),)
    return fx.GraphModule(module, graph), args


def _take_contiguous(node: fx.Node, value: torch.Tensor) -> None:
    """Let a model take an input row by row, whatever its layout in memory was at export: the ops see that as it was."""
    order = sorted(range(value.ndim), key=lambda dim: -sym_hint(value.stride(dim)))
    back = [order.index(dim) for dim in range(value.ndim)]
    users = [user for user in node.users if not (user.target is aten.copy_.default and user.args[0] is node)]
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    *_, last = node.graph.find_nodes(op="placeholder")
    with node.graph.inserting_before(last.next):
        rows = node.graph.call_function(aten.permute.default, (node, order))
        rows = node.graph.call_function(aten.clone.default, (rows,), {"memory_format": torch.contiguous_format})
        rows = node.graph.call_function(aten.permute.default, (rows, back))
    for user in users:
        user.replace_input_with(node, rows)


def refuse_static(library: Path, compiler: str) -> None:
    """Torch and a package share what the C++ library has once, such as its locales: with a copy of its own one crashes.

    Raises:
        UnsupportedError: the compiler has put such a copy into the library.
    """
    if not re.search(rb"lib(std)?c\+\+\.(so|\d+\.dylib)", library.read_bytes()):
        raise UnsupportedError(
            f"{compiler} puts the C++ library into what it builds, which would crash beside torch's",
            help="use a compiler that links libstdc++.so, such as CXX=/usr/bin/g++",
        )


def build_runner(compiler: str) -> Path:
    """The library that runs packages from Python, built once for this torch and kept in the user's cache.

    Raises:
        UnsupportedError: the compiler does not take it.
    """
    root = Path(torch.__file__).parent
    key = hashlib.sha256(f"{torch.__version__} {root} {SOURCE.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpcompiler"
    library = cache / f"runner-{key}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with scratch_folder(cache, "runner") as folder:
            command = [
                compiler,
                "-std=c++20",
                "-O1",
                "-s",
                "-fPIC",
                "-shared",
                str(SOURCE),
                "-o",
                f"{folder}/runner.so",
            ]
            command += [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib"]
            command += ["-ltorch", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UnsupportedError(
                    f"{compiler} does not compile {SOURCE}: {next(iter(done.stderr.splitlines()), 'no reason given')}",
                    help="use a compiler of C++20, such as g++ 11, by CXX=...",
                )
            refuse_static(folder / "runner.so", compiler)
            os.replace(f"{folder}/runner.so", library)
    except OSError as error:
        raise ArtifactError(f"cannot write {cache}: {reason(error)}", help="set XDG_CACHE_HOME") from error
    return library


def _version(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return next(iter(said.splitlines()), compiler)


@contextlib.contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """A folder to write into, on the disk of the artifact.

    Raises:
        ArtifactError: it cannot be written.
    """
    try:
        with scratch_folder(directory.absolute().parent, directory.name) as folder:
            yield folder
    except OSError as error:
        raise ArtifactError(
            f"cannot write into {directory}: {reason(error)}", help="check the free space and the permissions"
        ) from error
