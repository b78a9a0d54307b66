"""Train a rank's program: its loss has a backward, which runs the second half of the program."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import RETURNED_KINDS, Recompute, has_gradient, tree_map, tree_names, tree_unflatten
from tpcompiler.checkpoint.distributed import DistributedState
from tpcompiler.checkpoint.halves import Halves
from tpcompiler.checkpoint.hosted import hosted_manifest, hosts_of
from tpcompiler.checkpoint.restrictions import Structure, forbid_copies_and_modes, forbid_on_shares
from tpcompiler.checkpoint.unsummed import Unsummed, groups_of_sums
from tpcompiler.errors import ArtifactError, InputsError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.shares import holders_of, mesh_of, row_sharding
from tpcompiler.runtime.agree import named_failures
from tpcompiler.runtime.inputs import named_inputs
from tpcompiler.runtime.records import Manifest
from tpcompiler.runtime.turns import taking_turns
from tpcompiler.runtime.world import own_rank

_Block = tuple[tuple[slice, ...], int]


def make_trainable(
    modules: Mapping[str, Any], manifests: Mapping[str, Manifest], recompute: Recompute, same_bits: bool = False
) -> str:
    """Give the modules of programs with gradients a loss with a backward, and the methods that `load` documents.

    With `same_bits`, a process runs several ranks; sums over ranks are parts of its program and cannot be left out.

    Returns:
        A digest of the collectives in the halves of all programs, which all ranks must have.

    Raises:
        ArtifactError: no program returns gradients.
    """
    found = {name: at for name, each in modules.items() if (at := _loss_position(each.exported_program)) is not None}
    if not found:
        raise ArtifactError(
            "the artifact's programs return no gradients, so they cannot be trained",
            help="export the model and its loss by tpcompiler.export_training",
        )
    collectives, unsummed = list[Any](), Unsummed(manifests.values())
    for name, at in found.items():
        module, manifest = modules[name], manifests[name]
        hosts, process = hosts_of(manifest, dist.get_world_size()) if same_bits else None, dist.get_rank()
        halves = Halves(module.exported_program, recompute)
        type(module).forward = halves.run_forward  # what `load` calls after its checks
        own = manifest if hosts is None else hosted_manifest(manifest, hosts, process)
        steps = _Backward(module, halves, own, unsummed)
        collectives.append((halves.collectives, steps.groups))
        module.forward = _differentiable(module, at, steps)
        forbid_copies_and_modes(module)
        forbid_on_shares(module, manifest)
        module.saved_bytes, module.no_sync = halves.saved_bytes, steps.no_sync
        module.distributed_state = DistributedState(module, manifest, halves.names)
        if hosts is None:
            blocks = [_Blocks(manifest, own_rank(manifest), {name: name for name, _ in module.named_parameters()})]
        else:
            module.no_sync, module.distributed_state = _refuse("no_sync"), _refuse("distributed_state")
            named = zip(hosts.ranks(process), module.leaf_names, strict=True)
            blocks = [_Blocks(manifest, *each) for each in named]
        module.clip_grad_norm_ = MethodType(
            functools.partial(_clip_grad_norm, blocks=blocks, unsummed=unsummed), module
        )
    return hashlib.sha256(repr(collectives).encode()).hexdigest()[:12]


def _refuse(method: str) -> Any:
    def raise_refusal(*_: Any, **__: Any) -> None:
        raise UnsupportedError(f"{method} of a module that was loaded with same_bits", help="load it without same_bits")

    return raise_refusal


def _loss_position(program: ExportedProgram) -> int | None:
    """Return the position of the loss among the user's outputs; None without gradients."""
    kinds = [spec.kind for spec in program.graph_signature.output_specs if spec.kind in RETURNED_KINDS]
    has_gradients = OutputKind.GRADIENT_TO_PARAMETER in kinds
    return kinds.index(OutputKind.LOSS_OUTPUT) if has_gradients and OutputKind.LOSS_OUTPUT in kinds else None


class _Backward:
    """The backward of a program."""

    def __init__(self, module: torch.nn.Module, halves: Halves, manifest: Manifest, unsummed: Unsummed) -> None:
        self.module, self.halves, self.unsummed = module, halves, unsummed
        self.process_groups = manifest.groups
        self.groups = groups_of_sums(halves.last_sums, manifest)
        self.is_summing = True

    @functools.cached_property
    def without_sums(self) -> Any:
        return self.halves.without_sums({name: size for name, (_, size) in self.groups.items()})

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave out the last sums of gradients over ranks in backwards of the block.

        Until they are summed, gradients are as in `DistributedDataParallel.no_sync`: their mean over the ranks is the
        gradient. The next backward outside of the block sums what is in them by then, and so do `clip_grad_norm_` and
        the step of an optimizer.
        """
        before, self.is_summing = self.is_summing, False
        try:
            yield
        finally:
            self.is_summing = before

    @torch.no_grad()
    def gradients(self, saved: list[Any], tangent: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return the gradients of `halves.names`, or parts of them while sums are left out."""
        given = [*saved, tangent]
        saved.clear()
        if self.is_summing:
            self.unsummed.sum()
        else:
            self.unsummed.add((self.module.get_parameter(name), group) for name, group in self.groups.items())
        backward = self.halves.backward if self.is_summing else self.without_sums
        device = next(self.module.parameters()).device.type
        with (
            taking_turns(self.process_groups),
            named_failures(self.process_groups),
            torch.autocast(device, enabled=False),
        ):
            return backward(given)[: len(self.halves.names)]  # type: ignore[no-any-return]


def _differentiable(module: Any, loss: int, backward: _Backward) -> Any:
    """Return a forward that returns the model's outputs, of which the loss has a backward, and others one that raises.

    Raises:
        InputsError: an input requires a gradient, which nothing would compute.
    """
    run, spec = module.forward, module.exported_program.call_spec.out_spec
    place = tree_unflatten([*range(spec.num_leaves)], spec)["outputs"]
    names = [name.removeprefix("outputs.") for name in tree_names(spec)]
    program, trained = module.exported_program, _trained_outputs(module.exported_program)
    frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    structure = Structure(module)

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        structure.refuse_changes()
        if torch.is_grad_enabled():
            _refuse_gradients_of_inputs(named_inputs(program, args, kwargs))
            _refuse_thawed(frozen)
        _refuse_autocast(next(module.parameters()).device.type)
        results = run(*args, **kwargs)
        outputs, parameters = results["outputs"], [module.get_parameter(name) for name in backward.halves.names]
        for at, value in enumerate(outputs):
            is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if at != loss and is_float and trained[at]:
                own = [module.get_parameter(name) for name in trained[at]]
                outputs[at] = _WithoutGradient.apply([value], names[at], *own)  # type: ignore[no-untyped-call]
        outputs[loss] = _Loss.apply(outputs[loss], results["saved"], backward, *parameters)  # type: ignore[no-untyped-call]
        return tree_map(lambda at: outputs[at], place)

    return forward


def _trained_outputs(program: ExportedProgram) -> list[list[str]]:
    """Return for each of the user's outputs the parameters that it had a gradient for: some may be frozen later."""
    signature, values = program.graph_signature, cast(Any, program.graph.output_node().args[0])
    parameters = signature.inputs_to_parameters
    return [
        [fqn for name, fqn in parameters.items() if edit.is_tensor(value) and has_gradient(value, {name})]
        for value, spec in zip(values, signature.output_specs, strict=True)
        if spec.kind in RETURNED_KINDS
    ]


def _refuse_gradients_of_inputs(inputs: Mapping[str, Any]) -> None:
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise InputsError(
                f"input {name!r} requires a gradient, and a module loaded for training computes those of its "
                "parameters alone",
                help="pass its detach(), and export what makes it as a part of the model",
            )


def _refuse_thawed(frozen: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters that required no gradient in the module that was exported, and require one now."""
    if thawed := [name for name, each in frozen.items() if each.requires_grad]:
        more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
        raise InputsError(
            f"parameter {thawed[0]!r}{more} requires a gradient, and the program has none: it was frozen when the "
            "model was exported",
            help="export the model with requires_grad=True on it, or leave it frozen",
        )


def _refuse_autocast(device: str) -> None:
    if torch.is_autocast_enabled(device):
        raise UnsupportedError(
            "torch.autocast is on, and the program has the dtypes of its export",
            help="call the module outside of it, and call export_training in it to have its dtypes",
        )


class _WithoutGradient(torch.autograd.Function):
    """An output of which the program has no gradient: without this, a loss that uses it would lose its part."""

    @staticmethod
    def forward(ctx: Any, value: list[torch.Tensor], name: str, *parameters: torch.nn.Parameter) -> torch.Tensor:
        ctx.name = name
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        raise RuntimeError(
            f"output {ctx.name!r} has no gradient in this program, only the loss has: detach it, or add it to the loss "
            "inside the model and export again"
        )


class _Loss(torch.autograd.Function):
    """The loss as a function of the parameters, of whose backward everything but the loss' gradient is saved."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, saved: list[Any], backward: _Backward, *parameters: torch.nn.Parameter
    ) -> torch.Tensor:
        ctx.saved, ctx.backward = saved, backward
        ctx.versions = _versions(parameters)
        ctx.versions_saved = _versions(saved)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradients of a module loaded for training have no gradient themselves: call backward without "
                "create_graph=True"
            )
        if ctx.saved is None:
            raise RuntimeError(
                "this loss had its backward before, which frees what it needs, even with retain_graph: call again"
            )
        if _find_changed(ctx.versions) is not None:
            raise RuntimeError("parameters have changed since this loss was computed: call its backward before a step")
        if (at := _find_changed(ctx.versions_saved)) is not None:
            raise RuntimeError(
                f"{ctx.backward.halves.saved_names[at]!r} was changed in place since this loss was computed, and its "
                "backward needs the old value: change a copy, or call the backward first"
            )
        saved, ctx.saved, ctx.versions_saved = ctx.saved, None, None
        return None, None, None, *ctx.backward.gradients(saved, tangents[0])


def _versions(values: Sequence[Any]) -> list[tuple[torch.Tensor, int] | None]:
    """Return tensors with the number of writes to their memory, which tensors of inference mode do not count."""
    counts = (isinstance(each, torch.Tensor) and not each.is_inference() for each in values)
    return [(each, each._version) if is_counted else None for each, is_counted in zip(values, counts, strict=True)]


def _find_changed(versions: Sequence[tuple[torch.Tensor, int] | None]) -> int | None:
    """Return the position of the first tensor that was written since."""
    changed = (at for at, each in enumerate(versions) if each is not None and each[0]._version != each[1])
    return next(changed, None)


class _Blocks:
    """The shares of a rank, in blocks of elements that equally many ranks hold.

    `names`: the module's name of each of its tensors.
    """

    def __init__(self, manifest: Manifest, rank: int, names: Mapping[str, str]) -> None:
        self.mesh, self.rank, self.names = mesh_of(manifest), rank, names
        self.rows = {row.name: row for row in manifest.tensors}
        self.known: dict[str, list[_Block]] = {}

    def of(self, name: str) -> list[_Block]:
        """Return the blocks of a tensor: where they are in this rank's share, and how many ranks hold them."""
        if name not in self.known:
            row = self.rows[name]
            dims = holders_of(row_sharding(row, self.mesh), row.shape, self.mesh, self.rank)
            self.known[name] = [
                (tuple(slice(start, end) for start, end, _ in runs), self._holders([count for *_, count in runs]))
                for runs in itertools.product(*map(_runs, dims))
            ]
        return self.known[name]

    def _holders(self, counts: Sequence[int]) -> int:
        """Return how many ranks hold an element, of those that hold its index of each dim: no axis cuts two dims."""
        world = self.mesh.world_size
        return world * math.prod(counts) // int(world ** len(counts))


def _runs(holders: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the runs of equal numbers: start, end and the number."""
    values, lengths = holders.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    ends = lengths.cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, values.tolist(), strict=True))


@torch.no_grad()
def _clip_grad_norm(
    module: torch.nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    blocks: Sequence[_Blocks],
    unsummed: Unsummed,
) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all ranks' together is at most `max_norm`; return the norm.

    All ranks must call it. As `torch.nn.utils.clip_grad_norm_`, of a norm that is positive; `foreach` changes nothing.

    Raises:
        InputsError: the norm is not positive.
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
    """
    power = float(norm_type)
    if not power > 0:
        raise InputsError(f"the norm {norm_type} is not positive", help="give a positive one, such as 2.0 or inf")
    unsummed.sum()
    is_max = math.isinf(power)
    graded = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    device = next(module.parameters()).device
    own = []  # of each rank of this process
    for rank in blocks:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, grad in ((leaf, graded[held]) for leaf, held in rank.names.items() if held in graded):
            wide = torch.promote_types(grad.dtype, torch.float32)
            for place, count in rank.of(name):  # an element that several ranks hold counts once
                if grad[place].numel():
                    norm = torch.linalg.vector_norm(grad[place], power, dtype=wide).double()
                    total = torch.maximum(total, norm) if is_max else total + norm.pow(power) / count
        own.append(total)
    totals = [torch.zeros_like(torch.stack(own)) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, torch.stack(own))
    first = blocks[0].rank // len(own)
    copy = dist.get_rank() - first  # the first process of those that run this copy of the program
    norms = torch.cat(totals[copy : copy + blocks[0].mesh.world_size // len(own)])
    norm = norms.max() if is_max else norms.sum().pow(1 / power)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be clipped: leave "
            "out error_if_nonfinite=True to scale by it anyway"
        )
    for grad in graded.values():
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype))
    return norm
