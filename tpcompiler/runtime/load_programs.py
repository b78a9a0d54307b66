"""Load one rank's program in a process that torchrun started."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload, read_failed_guard
from tpcompiler.errors import ArtifactError, UnsupportedError
from tpcompiler.runtime.agree import agreeing, artifact_facts, input_facts, named_failures
from tpcompiler.runtime.artifact import SINGLE, Manifest, families, is_single, largest_world, misfit_of
from tpcompiler.runtime.in_place import write_in_place
from tpcompiler.runtime.inputs import check_values, flatten_inputs, named_inputs, refuse_excluded, structure_check
from tpcompiler.runtime.package import Package, package_to_run, packaged_module, read_called
from tpcompiler.runtime.pipeline import Buffers, Pipeline
from tpcompiler.runtime.place import map_buffers, place_state
from tpcompiler.runtime.program_files import ProgramFiles, open_programs
from tpcompiler.runtime.rank_file import AGAIN, Weights, read_rank, strides_of, taken_by
from tpcompiler.runtime.target import COMPILED
from tpcompiler.runtime.turns import taking_turns
from tpcompiler.runtime.world import greet_groups, groups_here, join_world, own_rank, ranks_of_copy, register_groups

MODE = "the program has the mode, train or eval, in which the model was exported"
TWO = "export the model in each mode, convert both programs together, and load them: they share parameters"
DEGREES = "programs over different numbers of ranks cannot be run with same_bits"
FLOAT8 = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)}
# Measured with torch 2.13: each dtype with each collective.
GLOO_LACKS = {torch.int16, torch.uint16, torch.uint32, torch.uint64, *FLOAT8}
GLOO_LACKS_OF_COMPLEX = {"all_to_all_single", "product", "max", "min"}


class Host(NamedTuple):
    """Two functions for a process that runs several ranks.

    `read` returns its program, and a manifest for the world of processes; `names` each rank's name of every tensor in
    a process, given the artifact's manifest and the number of processes.
    """

    read: Callable[[ProgramFiles, Weights | None], tuple[ExportedProgram, Manifest]]
    names: Callable[[Manifest, int, int], list[dict[str, str]]]


class Loading(NamedTuple):
    """Arguments of `tpcompiler.load`; `weights` reads weights that an artifact's files lack."""

    check_inputs: bool
    timeout: timedelta
    weights: Weights | None
    microbatches: int
    host: Host | None


class _RankProgram(NamedTuple):
    program: ExportedProgram
    manifest: Manifest
    leaf_names: list[dict[str, str]]


def load_programs(
    directory: str | os.PathLike[str],
    rank: int | None,
    arguments: Loading,
    *,
    trust: bool,
    compiled: bool | None,
    backend: str | None,
) -> Any:
    """Load an artifact's programs (see `checkpoint/load.py`)."""
    timeout, host = arguments.timeout, arguments.host
    files = open_programs(directory, trust=trust)
    manifests = {name: each.manifest for name, each in files.items()}
    if misfit := misfit_of(manifests):
        raise ArtifactError(
            f"the programs of {os.fspath(directory)} do not belong together: {misfit}", help="convert them together"
        )
    if is_single(files):
        _refuse_alone(files[SINGLE])
    world = largest_world(manifests)
    if host is not None and len({each.world_size for each in manifests.values()}) > 1:
        raise UnsupportedError(DEGREES, help="leave same_bits out, or convert all for one mesh")
    device = join_world(next(iter(manifests.values())), world, timeout, backend, rank, may_host=host is not None)
    with agreeing(timeout) as mine:
        package = package_to_run(directory, compiled, trust, 0 if host is None else dist.get_world_size())
        mine["the package"] = f"SHA-256 {package.files.get(COMPILED, '')[:12]}.." if package else "not run"
    read: dict[str, _RankProgram] = {}  # without those of other stages
    for family in families(files, lambda each: each.manifest.family):
        stored: dict[str, torch.Tensor] = {}
        for name, each in family.items():
            own = _read(Path(directory), each, package, device, stored, arguments)
            read |= {name: own} if own is not None else {}
    with agreeing(timeout):
        modules = {
            name: packaged_module(
                directory,
                package,
                name,
                own_rank(read[name].manifest),
                read[name].program,
                _renamed(package, name, files[name].manifest, read[name].leaf_names, host),
            )
            if package
            else write_in_place(read[name].program.module())
            for name in files
            if name in read
        }
    for name, own in read.items():
        module: Any = modules[name]
        module.forward = _guarded(module, own, arguments)
        module.register_forward_pre_hook(structure_check(own.program), prepend=True, with_kwargs=True)
        module.exported_program, module.leaf_names = own.program, own.leaf_names
        module.group_names = [*groups_here(own.manifest)]
        if package is None:
            module.train = module.eval = refuse_mode
    made: dict[str, Any] = {name: each for name, each in modules.items() if not manifests[name].stage}
    made |= _join_stages(manifests, modules, arguments)
    return made[SINGLE] if is_single(made) else made


def _renamed(
    package: Package, name: str, manifest: Manifest, leaf_names: Sequence[Mapping[str, str]], host: Host | None
) -> dict[str, str]:
    """Return this process's name of each tensor by that in the process that the model was compiled for."""
    if host is None:
        return {}
    process, models = dist.get_rank(), package.models.get(name, {}).values()
    first = next((each[0] for each in models if process in each), process)
    theirs = host.names(manifest, package.processes, first)
    return {one[leaf]: own[leaf] for one, own in zip(theirs, leaf_names, strict=True) for leaf in own}


def _join_stages(
    manifests: Mapping[str, Manifest], modules: Mapping[str, Any], arguments: Loading
) -> dict[str, Pipeline]:
    """Return the programs that were cut into stages, by name."""
    wholes: dict[str, dict[str, Manifest]] = {}
    for name, manifest in manifests.items():
        if manifest.stage is not None:
            wholes.setdefault(manifest.stage.of, {})[name] = manifest
    made, buffers = {}, dict[str | None, list[Buffers]]()
    for whole, stages in wholes.items():
        (own,) = (name for name in stages if name in modules)
        shared = buffers.setdefault(stages[own].family, [{} for _ in range(arguments.microbatches)])
        checks = arguments.check_inputs
        made[whole] = Pipeline(list(stages.values()), modules[own], arguments.timeout, shared, checks)
    return made


def _refuse_alone(files: ProgramFiles) -> None:
    """Check that the artifact contains all of its tensors."""
    left_out = [row.name for row in files.manifest.tensors if row.stored_in is not None]
    if left_out:
        raise ArtifactError(
            f"{files.folder} leaves {len(left_out)} tensors to the program next to it, such as {min(left_out)!r}",
            help=f"load {files.folder.parent}, which gives all of its programs",
        )


def _read(
    directory: Path,
    files: ProgramFiles,
    package: Package | None,
    device: torch.device,
    stored: dict[str, torch.Tensor],
    arguments: Loading,
) -> _RankProgram | None:
    """Read this rank's program onto its device; take missing tensors from `stored`, and add its own there.

    Of a stage that other ranks run, only make the groups: all ranks must make them all.
    """
    manifest, leaf_names = files.manifest, list[dict[str, str]]()
    is_own = manifest.stage is None or manifest.stage.index == dist.get_rank() // manifest.world_size
    left_out = {row.name: row.stored_in for row in manifest.tensors if row.stored_in is not None}
    with agreeing(arguments.timeout) as mine:
        if not is_own:
            exported = None
        elif arguments.host is not None:
            exported, manifest = arguments.host.read(files, arguments.weights)
            leaf_names = arguments.host.names(files.manifest, dist.get_world_size(), dist.get_rank())
            left_out = {row.name: row.stored_in for row in manifest.tensors if row.stored_in is not None}
            refuse_unsendable(exported, dist.get_backend())
        elif package is not None:
            exported = read_called(directory, package, files, own_rank(manifest), arguments.weights)
        else:
            exported = read_rank(files, own_rank(manifest), arguments.weights)
            refuse_unsendable(exported, dist.get_backend())
        if exported is not None:
            _refuse_unlike(files, left_out, taken_by(exported), stored)
        mine.update(artifact_facts(manifest))
    with named_failures(groups_here(manifest)):
        register_groups(manifest, arguments.timeout)
    greet_groups(manifest, device, arguments.timeout)
    if exported is None:
        return None
    for state in (exported.state_dict, exported.constants):
        state.update({each: stored[each] for each in state.keys() & left_out.keys()})
    place_state(exported, device)
    map_buffers(exported, manifest, device)
    for row in manifest.tensors:
        fqn = row.name
        stored[fqn] = exported.state_dict[fqn] if fqn in exported.state_dict else exported.constants[fqn]
    return _RankProgram(exported, manifest, leaf_names)


def _refuse_unlike(
    files: ProgramFiles,
    left_out: Mapping[str, str],
    wanted: Mapping[str, torch.Tensor],
    stored: Mapping[str, torch.Tensor],
) -> None:
    """Check that programs read before this one have the tensors that it leaves to them, laid out as it takes them."""
    for name in sorted(left_out.keys() & wanted.keys()):
        if name not in stored:
            raise ArtifactError(
                f"{files.folder} leaves {name!r} to {left_out[name]!r}, which is not listed before it, or lacks it",
                help=AGAIN,
            )
        if (actual := strides_of(stored[name])) != (expected := strides_of(wanted[name])):
            raise ArtifactError(
                f"{files.folder} takes {name!r} with the strides {expected}, the program next to it has {actual}",
                help=AGAIN,
            )


def _guarded(module: fx.GraphModule, read: _RankProgram, arguments: Loading) -> Callable[..., Any]:
    """Return a forward that also checks inputs, on the first call across all ranks that run the program together."""
    unchecked = arguments.check_inputs
    indices = [row.name for row in read.manifest.inputs if row.values is not None]
    groups = groups_here(read.manifest)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal unchecked
        if unchecked:
            with agreeing(arguments.timeout, ranks_of_copy(read.manifest)) as mine:  # copies may get other inputs
                mine.update(input_facts(named_inputs(read.program, args, kwargs), read.manifest))
            unchecked = False
        if indices and not torch.compiler.is_compiling():
            check_values(named_inputs(read.program, args, kwargs), read.manifest.inputs)
        # A backward would run and give wrong gradients: it would add up the loss of all ranks, which is the same on
        # each, and leave other parts without a sum. Without a record of the forward it raises.
        with torch.no_grad(), named_failures(groups):
            try:
                return type(module).forward(module, *args, **kwargs)
            except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
                if not torch.compiler.is_compiling():  # if the inputs are wrong, raise our error
                    flatten_inputs(read.program, args, kwargs)
                    refuse_excluded(read_failed_guard(error))
                raise

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # locks cannot be compiled into a graph
            return run(*args, **kwargs)
        with taking_turns(groups):
            return run(*args, **kwargs)

    return forward


def refuse_mode(*_: Any) -> Any:
    """Refuse `train` and `eval` of a loaded module.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"a loaded module cannot be set to train or eval: {MODE}", help=TWO)


def refuse_unsendable(program: ExportedProgram, backend: str) -> None:
    """Check that the backend supports every collective of the program with its dtype.

    In the first call each rank would raise a different text.

    Raises:
        UnsupportedError: gloo does not support one.
    """
    for node in program.graph.nodes:
        target = node.target
        if backend != "gloo" or not isinstance(target, OpOverload) or target.namespace != "_c10d_functional":
            continue
        dtype = node.all_input_nodes[0].meta["val"].dtype
        names = [target._schema.name.partition("::")[2], *map(str, node.args[1:2])]  # and a reduction's op
        if dtype in GLOO_LACKS or (dtype.is_complex and not GLOO_LACKS_OF_COMPLEX.isdisjoint(names)):
            collective = names[0] if "reduce" not in names[0] else " by ".join(names)
            raise UnsupportedError(
                f"'{node.name}' sends {str(dtype).removeprefix('torch.')}, for which gloo has no {collective}",
                help="cast it to another dtype in the model (int16 to int32), and export and convert again",
            )
