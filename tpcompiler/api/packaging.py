"""Compile an artifact's programs with AOTInductor: once for all ranks, without their weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import aten, fake_group, group_is_registered, module_inputs, sym_hint, tree_flatten, with_graph
from tpcompiler.api.verify import verify_package
from tpcompiler.checkpoint.hosted import hosted_manifest, hosts_of, read_process
from tpcompiler.errors import UnsupportedError, explaining
from tpcompiler.ir import edit
from tpcompiler.ir.hosting import text_of
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.runtime.artifact import Manifest, lacks_weights, program_file, sha256
from tpcompiler.runtime.package import Package, called_file, drop_package, find_capability, record_package
from tpcompiler.runtime.place import leave_out
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import read_graph, taken_by
from tpcompiler.runtime.target import COMPILED, RUNNER, scratch_folder
from tpcompiler.runtime.weightless import save_marked, weightless_names
from tpcompiler.terminal.progress import counted, measured

SOURCE = Path(__file__).parents[1] / "runtime" / "runner.cpp"


def package_programs(
    programs: Sequence[ProgramFiles],
    folder: Path,
    *,
    threads: int = 1,
    check: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    processes: int = 0,
) -> tuple[Package, VerifyReport | None]:
    """Compile every program of an artifact into one package next to it (`ParallelProgram.package`).

    Raises:
        ArtifactError: the package cannot be written.
        UnsupportedError: no compiler fits torch, or AOTInductor rejects a program.
        LaunchError, InputsError: as `verify_package`.
        MeshError: as `Hosts`, for `processes`.
    """
    device_type = programs[0].manifest.device_type
    for each in programs if check and checkpoint is None else ():
        if lacking := lacks_weights(each.manifest):
            each.open_weights(lacking[0]).close()  # says what to do
    from tpcompiler._torch import inductor

    help = "install g++, or name one with CXX=..."
    with explaining("there is no C++ compiler here", help, RuntimeError, raised=UnsupportedError):
        compiler = inductor.compiler()
    files: dict[str, list[Any]] = {}
    strides: dict[str, list[int]] = {}
    called: dict[str, ExportedProgram] = {}
    models: dict[str, dict[str, list[int]]] = {}
    work = [(own, *each) for own in programs for each in enumerate(_compiled(own, processes))]
    for own, index, (program, manifest, ranks) in counted(work, "compiling", "models"):
        model = f"{own.name}_{index}"
        models.setdefault(own.name, {})[model] = ranks
        strides |= _strides(program)
        if not processes:
            called[model] = _without_ops(program)
        path = own.folder / program_file(own.manifest, ranks[0])
        files[model] = _compile(program, path, manifest, ranks[0], threads, rounds=bool(processes))
        for file in files[model]:
            if Path(file).suffix == ".so":
                refuse_static(Path(file), compiler)
    with (
        explaining(f"cannot write into {folder}", "check the free space and the permissions"),
        scratch_folder(folder.absolute().parent, folder.name) as temporary,
    ):
        inductor.write_package(temporary / COMPILED, files)
        with measured("building the library that runs it", "files", 1):
            shutil.copy(build_runner(compiler), temporary / RUNNER)
        for model, program in called.items():
            tensors = {**program.constants, **program.state_dict}
            save_marked(program, temporary / called_file(model), weightless_names(program), tensors)
        result = Package(
            files={path.name: sha256(path) for path in sorted(temporary.iterdir())},
            models=models,
            processes=processes,
            device_type=device_type,
            torch=str(torch.__version__),
            compiler=_version(compiler),
            strides=strides,
            capability=find_capability(device_type),
            threads=threads,
        )
        record_package(folder, result, [temporary / name for name in result.files])
    report = None
    try:
        again = [each.reopened() for each in programs]  # the manifest names the package now
        report = verify_package(again, folder, checkpoint=checkpoint, processes=processes) if check else None
        return result, report
    finally:
        if check and not (report and report.ok):
            drop_package(folder)


def _compiled(files: ProgramFiles, processes: int) -> Iterator[tuple[ExportedProgram, Manifest, list[int]]]:
    """Yield each graph that ranks run, or processes, with those that run it, and their groups as in a manifest."""
    manifest = files.manifest
    if not processes:
        for ranks in manifest.programs.values():
            yield read_graph(files, ranks[0]), manifest, ranks
        return
    hosts = hosts_of(manifest, processes)
    found = dict[Any, tuple[ExportedProgram, Manifest, list[int]]]()
    for process in range(processes):
        program = read_process(files, hosts, process, lambda own, rank: own)
        if any(spec.kind is OutputKind.GRADIENT_TO_PARAMETER for spec in program.graph_signature.output_specs):
            raise UnsupportedError(
                f"{files.folder} returns gradients, and no package of processes does",
                help="train with load(training=True, same_bits=True), which runs it uncompiled",
            )
        own = found.setdefault(text_of(program), (program, hosted_manifest(manifest, hosts, process), []))
        own[2].append(process)
    yield from found.values()


def _strides(program: ExportedProgram) -> dict[str, list[int]]:
    """Return the strides of tensors that are not contiguous, by name."""
    tensors = {name: value for name, value in taken_by(program).items() if isinstance(value, torch.Tensor)}
    return {name: list(value.stride()) for name, value in tensors.items() if not value.is_contiguous()}


def _without_ops(program: ExportedProgram) -> ExportedProgram:
    """Return the program with its inputs, outputs and writes, but without the ops."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        known[node] = edit.copy_node(graph, node, known)
    (old,) = program.graph.find_nodes(op="output")
    some = next(iter(known.values()), None)
    for node in old.all_input_nodes:
        if node not in known:
            if some is None:
                raise UnsupportedError("a program that takes nothing has no package", help="give it an input")
            known[node] = graph.create_node("call_function", aten.alias.default, (some,), name=node.name)
            known[node].meta["val"] = edit.fake(node)
    graph.output(fx.map_arg(old.args[0], lambda node: known[node]))
    hollow_program = with_graph(program, {}, graph)
    for name in weightless_names(hollow_program):
        leave_out(hollow_program, name)
    return hollow_program


def _compile(
    program: ExportedProgram, path: Path, manifest: Manifest, rank: int, threads: int, *, rounds: bool
) -> list[Any]:
    """Compile the model of a rank and of all ranks with the same graph; return its files."""
    from tpcompiler._torch import inductor

    for state in (program.state_dict, program.constants):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):  # memory that is never touched
                empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=manifest.device_type)
                state[name] = torch.nn.Parameter(empty, False) if isinstance(value, torch.nn.Parameter) else empty
    module, args = plain_module(program, path)
    with contextlib.ExitStack() as stack:
        for name, groups in manifest.groups.items():
            if group_is_registered(name):  # by `load`, in this process
                continue
            own = next(ranks for ranks in groups if rank in ranks)
            stack.enter_context(fake_group(name, own.index(rank), len(own), manifest.device_type))
        stack.enter_context(torch.no_grad())
        stack.enter_context(inductor.quiet_inductor())
        help = "run it as it is, without a package; TORCH_LOGS=+inductor says more"
        # whatever Inductor, or the compiler that it calls, raises
        with explaining(f"AOTInductor does not compile {path}", help, Exception, raised=UnsupportedError):
            return inductor.compile_module(module, args, threads, rounds=rounds)


def plain_module(program: ExportedProgram, path: Path) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return the program as a module of single tensors, and tensors to compile it with."""
    module: Any = program.module(check_guards=False)
    graph: fx.Graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    args = []
    for node, value in module_inputs(program, module):
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
        if not isinstance(value.meta.get("val", args), torch.Tensor | list):  # written values have no recorded value
            raise UnsupportedError(
                f"{path} returns the number {value.name!r}, and a package returns tensors only",
                help="return a tensor in the model, and export and convert again",
            )
    output.args = (tuple(values),)
    return fx.GraphModule(module, graph), args


def _take_contiguous(node: fx.Node, value: torch.Tensor) -> None:
    """Make a model take an input in contiguous layout, and restore its layout at export for the ops."""
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
    """Reject a library with its own copy of the C++ library: torch and the package share its globals, such as locales.

    Raises:
        UnsupportedError: the compiler has linked such a copy.
    """
    if not re.search(rb"lib(std)?c\+\+\.(so|\d+\.dylib)", library.read_bytes()):
        raise UnsupportedError(
            f"{compiler} puts the C++ library into what it builds, which would crash next to torch's",
            help="use a compiler that links libstdc++.so, such as CXX=/usr/bin/g++",
        )


def build_runner(compiler: str) -> Path:
    """Build the library that runs packages from Python, once for this torch, in the user's cache.

    Raises:
        UnsupportedError: the compiler fails.
    """
    root = Path(torch.__file__).parent
    key = hashlib.sha256(f"{torch.__version__} {root} {SOURCE.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpcompiler"
    library = cache / f"runner-{key}.so"
    if library.exists():
        return library
    with explaining(f"cannot write {cache}", "set XDG_CACHE_HOME"):
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
    return library


def _version(compiler: str) -> str:
    output = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return next(iter(output.splitlines()), compiler)
