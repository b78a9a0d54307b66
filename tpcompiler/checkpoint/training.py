"""Train a rank's program: its loss has a backward, which hands out the gradients that the program computes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import RETURNED_KINDS, tree_flatten, tree_unflatten
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import row_sharding
from tpcompiler.runtime.records import Manifest


def make_trainable(modules: Mapping[str, Any], manifests: Mapping[str, Manifest]) -> None:
    """Give the modules of programs with gradients a loss with a backward, and `clip_grad_norm_`.

    Raises:
        ArtifactError: no program returns gradients.
    """
    found = {name: at for name, each in modules.items() if (at := _loss_position(each.exported_program)) is not None}
    if not found:
        raise ArtifactError(
            "the artifact's programs return no gradients, so they cannot be trained",
            help="export the model and its loss by tpcompiler.export_training",
        )
    for name, at in found.items():
        module, manifest = modules[name], manifests[name]
        module.forward = _differentiable(module, at)
        replicas = _count_replicas(manifest)
        module.clip_grad_norm_ = MethodType(functools.partial(_clip_grad_norm, replicas=replicas), module)


def _loss_position(program: ExportedProgram) -> int | None:
    """Return the position of the loss among the results; None without gradients."""
    kinds = [spec.kind for spec in program.graph_signature.output_specs if spec.kind in RETURNED_KINDS]
    has_gradients = OutputKind.GRADIENT_TO_PARAMETER in kinds
    return kinds.index(OutputKind.LOSS_OUTPUT) if has_gradients and OutputKind.LOSS_OUTPUT in kinds else None


def _differentiable(module: Any, loss: int) -> Any:
    """Return a forward that returns the model's outputs, of which the loss has a backward."""
    run = module.forward

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        outputs, spec = tree_flatten(results["outputs"])
        gradients = results["gradients"]
        parameters = [module.get_parameter(name) for name in gradients]
        outputs[loss] = _Loss.apply(outputs[loss], [*gradients.values()], *parameters)  # type: ignore[no-untyped-call]
        return tree_unflatten(outputs, spec)

    return forward


class _Loss(torch.autograd.Function):
    """The loss as a function of the parameters, whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], *_: torch.nn.Parameter) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.gradients:
            raise RuntimeError("the gradients of this loss were handed out before: call the module again")
        gradients, ctx.gradients = ctx.gradients, []
        return None, None, *(each.mul_(scales[0]) for each in gradients)


def _count_replicas(manifest: Manifest) -> dict[str, int]:
    """Return how many ranks hold each element of a parameter, by its FQN."""
    mesh = Mesh.of(manifest.mesh, manifest.factors)
    rows = (row for row in manifest.tensors if row.kind == "parameter")
    return {row.name: mesh.world_size // mesh.size(mesh.ordered(row_sharding(row, mesh).axes)) for row in rows}


@torch.no_grad()
def _clip_grad_norm(module: torch.nn.Module, max_norm: float, *, replicas: Mapping[str, int]) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all ranks' together is at most `max_norm`; return the norm.

    All ranks must call it. As `torch.nn.utils.clip_grad_norm_`, of the 2-norm.
    """
    graded = [(replicas[name], each.grad) for name, each in module.named_parameters() if each.grad is not None]
    device = next(module.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for count, grad in graded:  # an element that several ranks hold counts once
        wide = torch.promote_types(grad.dtype, torch.float32)
        total += torch.linalg.vector_norm(grad, dtype=wide).double().square() / count
    dist.all_reduce(total)
    norm = total.sqrt()
    for _, grad in graded:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype))
    return norm
