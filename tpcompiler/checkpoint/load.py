"""`tpcompiler.load`: one rank's programs in a process that torchrun started, maybe with weights from a checkpoint."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload, Recompute, read_failed_guard
from tpcompiler.errors import ArtifactError, InputsError, UnsupportedError
from tpcompiler.runtime.agree import WAIT, agreeing, artifact_facts, input_facts, named_failures
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


class RankModule(torch.nn.Module):
    """A rank's program: call it like the model. Of several programs, a dict of them by name.

    For type checkers and editors: no instance is made of it.

    Attributes:
        exported_program: the rank's program.
        leaf_names: of each rank of a process that runs several, the names of the rank's tensors here.
        group_names: the process groups whose ranks call it together.
        saved_bytes: with `training`, what the forward leaves to the backward.
    """

    exported_program: ExportedProgram
    leaf_names: list[dict[str, str]]
    group_names: list[str]
    saved_bytes: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave out the last sums of gradients over ranks in backwards of the block; with `training`."""
        raise NotImplementedError

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all ranks' together is at most `max_norm`; with `training`."""
        raise NotImplementedError

    def distributed_state(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, dict[str, Any]]:
        """Return the state that torch.distributed.checkpoint saves and loads; with `training`."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> RankModule:
        """Return the program of this name, of several."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of several programs."""
        raise NotImplementedError

    def items(self) -> ItemsView[str, RankModule]:
        """Return several programs with their names."""
        raise NotImplementedError


def load(
    directory: str | os.PathLike[str],
    rank: int | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    check_inputs: bool = False,
    timeout: timedelta = WAIT,
    trust: bool = False,
    compiled: bool | None = None,
    backend: str | None = None,
    training: bool = False,
    recompute: Recompute = "min-cut",
    microbatches: int = 1,
    same_bits: bool = False,
) -> RankModule:
    """Return this process's program, ready to call.

    Selects the GPU of this process (`LOCAL_RANK`) for a CUDA program, initialises the default process group
    from torchrun's environment unless the caller has (NCCL for CUDA, gloo for CPU), makes the groups that the graphs
    name, compares the files' hashes with the manifest, and puts the weights on the device.

    All ranks must have the same artifact, world and versions: they compare them before any collective, and all raise
    if one of them fails or does not arrive.

    A script may simply end: gloo groups that are made here are destroyed at exit, unless the caller has called
    `destroy_process_group`. The caller's own process group is left alone. With NCCL, end with
    `destroy_process_group`, as torch requires.

    Args:
        directory: an artifact of `ParallelProgram.save` or `tpcompiler convert`.
        rank: this process's rank, by default that of the process group.
        checkpoint: a directory of safetensors files, for an artifact that was converted without weights: this rank
            reads only its own shares, and writes nothing.
        check_inputs: in the first call, all ranks that run a program together compare the dtypes and shapes of their
            inputs, and the content of those that every rank gets whole, before the first collective. Later calls are
            not compared: if they differ, results are undefined, and ranks may hang until the process group's own
            timeout.
        timeout: how long ranks wait for each other: here, and in collectives of the groups that are made here.
        trust: also read files that need a pickle or could run code (docs/security.md).
        compiled: run the package that `tpcompiler package` wrote (True), or the uncompiled programs (False). The
            default is the package if `trust` is set, because it is machine code; otherwise a warning names it.
        backend: the backend of the process group that is initialised here, "nccl" or "gloo".
        training: for a program of `export_training`: the module returns the model's outputs, and `loss.backward()`
            adds the gradients to the parameters. `module.clip_grad_norm_(max_norm)` clips their norm over all ranks;
            backwards in `with module.no_sync():` leave out the sums over ranks, which the next backward outside makes,
            or the next clipping or step; `module.distributed_state(optimizer)` is what torch.distributed.checkpoint
            saves, and loads on any number of ranks. All ranks must call all of these in the same order.
        recompute: what the backward computes again instead of finding it saved: what is cheap ("min-cut", by torch's
            partitioner), everything except collectives and ops that may draw random numbers, such as attention ("all"),
            or nothing ("none").
            `module.saved_bytes` is what the forward leaves to the backward.
        microbatches: of a program that was cut into stages: the number of batches, along dim 0, of a call; a stage
            works on one while later stages work on those before it. Each has its own buffers (caches). Inputs that do
            not grow with the batch, such as positions, are given once.
        same_bits: give the same bits on any number of processes that divides the artifact's ranks: each process runs
            as many ranks in a row, with the kernels and shapes of these, and sums follow one tree (docs/same-bits.md).
            A process takes and returns the shares of its ranks in one. With `training`, gradients and the clipped norm
            have the same bits, too; `no_sync` and `distributed_state` are refused.

    Returns:
        The module: call it like the model; it records no gradients without `training`. Its `exported_program` is the
        rank's `ExportedProgram`. For a directory with several programs, a dict of modules by name that share weights
        and buffers: all see what one of them writes into a cache.

    Raises:
        ArtifactError: the artifact is missing or damaged, or returns no gradients to train with, the checkpoint does
            not fit it or, without `trust`, files could run code. The requested package is missing, or this process
            cannot run it: it is for another torch, CPU, GPU or number of threads.
        LaunchError: not started by torchrun, another world size or rank, a group name in use, no GPU for this
            process, another rank that fails, is missing, or has another artifact, or ranks of a group that cannot
            reach each other.
        InputsError: an unknown `recompute`.
        UnsupportedError: the backend lacks a collective for its dtype; training in `torch.inference_mode()`, or of a
            package; or `same_bits` of stages.
        MeshError: `same_bits` on a number of processes that cannot run as many whole ranks each.
    """
    if recompute not in get_args(Recompute):
        raise InputsError(f"recompute is {recompute!r}", help=f"give one of {', '.join(get_args(Recompute))}")
    if training and compiled:
        raise UnsupportedError("a package has no backward of its own to train with", help="load it with compiled=False")
    if training and torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "torch.inference_mode() is on, in which parameters cannot be trained later", help="load outside of it"
        )
    weights = None
    if checkpoint is not None:
        from tpcompiler.checkpoint.cut import read_shares  # a deployment with weights does not need it

        weights = functools.partial(read_shares, checkpoint)
    loaded: Any = load_programs(
        directory,
        rank,
        Loading(check_inputs, timeout, weights, microbatches, same_bits),
        trust=trust,
        compiled=False if training else compiled,
        backend=backend,
    )
    if training:
        from tpcompiler.checkpoint.training import make_trainable

        manifests = {name: files.manifest for name, files in open_programs(directory, trust=trust).items()}
        with agreeing(timeout) as mine:
            modules = loaded if isinstance(loaded, dict) else {SINGLE: loaded}
            mine["the list of collectives of forward and backward"] = make_trainable(
                modules, manifests, recompute, same_bits
            )
    return loaded  # type: ignore[no-any-return]


class Loading(NamedTuple):
    """Arguments of `load`; `weights` reads weights that an artifact's files lack."""

    check_inputs: bool
    timeout: timedelta
    weights: Weights | None
    microbatches: int
    same_bits: bool


RankProgram = tuple[ExportedProgram, Manifest, list[dict[str, str]]]  # with the names of leaves (`names_in`)


def load_programs(
    directory: str | os.PathLike[str],
    rank: int | None,
    arguments: Loading,
    *,
    trust: bool,
    compiled: bool | None,
    backend: str | None,
) -> Any:
    """Load an artifact's programs, without a backward (`load`)."""
    timeout, same_bits = arguments.timeout, arguments.same_bits
    files = open_programs(directory, trust=trust)
    manifests = {name: each.manifest for name, each in files.items()}
    if misfit := misfit_of(manifests):
        raise ArtifactError(
            f"the programs of {os.fspath(directory)} do not belong together: {misfit}", help="convert them together"
        )
    if is_single(files):
        _refuse_alone(files[SINGLE])
    world = largest_world(manifests)
    if same_bits and len({each.world_size for each in manifests.values()}) > 1:
        raise UnsupportedError(DEGREES, help="leave same_bits out, or convert all for one mesh")
    device = join_world(next(iter(manifests.values())), world, timeout, backend, rank, may_host=same_bits)
    with agreeing(timeout) as mine:
        package = package_to_run(directory, compiled, trust, dist.get_world_size() if same_bits else 0)
        mine["the package"] = f"SHA-256 {package.files.get(COMPILED, '')[:12]}.." if package else "not run"
    read: dict[str, RankProgram] = {}  # without those of other stages
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
                own_rank(manifest),
                program,
                _renamed(package, name, files[name].manifest, leaf_names) if same_bits else {},
            )
            if package
            else write_in_place(program.module())
            for name in files
            if name in read
            for program, manifest, leaf_names in [read[name]]
        }
    for name, (program, manifest, leaf_names) in read.items():
        module: Any = modules[name]
        module.forward = _guarded(module, program, manifest, arguments)
        module.register_forward_pre_hook(structure_check(program), prepend=True, with_kwargs=True)
        module.exported_program, module.leaf_names = program, leaf_names
        module.group_names = [*groups_here(manifest)]
        if package is None:
            module.train = module.eval = refuse_mode
    made: dict[str, Any] = {name: each for name, each in modules.items() if not manifests[name].stage}
    made |= _join_stages(manifests, modules, arguments)
    return made[SINGLE] if is_single(made) else made


def _renamed(
    package: Package, name: str, manifest: Manifest, leaf_names: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return this process's name of each tensor by that in the process that the model was compiled for."""
    from tpcompiler.checkpoint.hosted import names_in

    process, models = dist.get_rank(), package.models.get(name, {}).values()
    first = next((each[0] for each in models if process in each), process)
    theirs = names_in(manifest, package.processes, first)
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
) -> RankProgram | None:
    """Read this rank's program onto its device; take missing tensors from `stored`, and add its own there.

    Of a stage that other ranks run, only make the groups: all ranks must make them all.
    """
    manifest, leaf_names = files.manifest, list[dict[str, str]]()
    is_own = manifest.stage is None or manifest.stage.index == dist.get_rank() // manifest.world_size
    left_out = {row.name: row.stored_in for row in manifest.tensors if row.stored_in is not None}
    with agreeing(arguments.timeout) as mine:
        if not is_own:
            exported = None
        elif arguments.same_bits:
            from tpcompiler.checkpoint.hosted import names_in, read_hosted  # most deployments do not need them

            exported, manifest = read_hosted(files, arguments.weights)
            leaf_names = names_in(files.manifest, dist.get_world_size(), dist.get_rank())
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
    return exported, manifest, leaf_names


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


def _guarded(
    module: fx.GraphModule, program: ExportedProgram, manifest: Manifest, arguments: Loading
) -> Callable[..., Any]:
    """Return a forward that also checks inputs, on the first call across all ranks that run the program together."""
    unchecked = arguments.check_inputs
    indices = [row.name for row in manifest.inputs if row.values is not None]
    groups = groups_here(manifest)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal unchecked
        if unchecked:
            with agreeing(arguments.timeout, ranks_of_copy(manifest)) as mine:  # copies may get other inputs
                mine.update(input_facts(named_inputs(program, args, kwargs), manifest))
            unchecked = False
        if indices and not torch.compiler.is_compiling():
            check_values(named_inputs(program, args, kwargs), manifest.inputs)
        # A backward would run and give wrong gradients: it would add up the loss of all ranks, which is the same on
        # each, and leave other parts without a sum. Without a record of the forward it raises.
        with torch.no_grad(), named_failures(groups):
            try:
                return type(module).forward(module, *args, **kwargs)
            except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
                if not torch.compiler.is_compiling():  # if the inputs are wrong, raise our error
                    flatten_inputs(program, args, kwargs)
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
