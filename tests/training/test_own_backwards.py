"""Backwards that torch.export leaves out are refused, even if they agree on the example; the others are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpcompiler
from tests.passes.stages import Call
from tpcompiler._torch import FakeTensor
from tpcompiler.errors import ProgramError, TpCompilerError, TpCompilerWarning, UnsupportedError


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -gradients[0]


class Square(torch.autograd.Function):
    """A backward of its own that is the forward's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


def hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: 3 * gradient)
    return x


def detached(x: torch.Tensor) -> torch.Tensor:
    """Gradient reversal as the errors' help writes it."""
    return -x + (x + x).detach()


def recomputed(x: torch.Tensor, use_reentrant: bool = False) -> torch.Tensor:
    return checkpoint(torch.tanh, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]


def layers(between: Callable[[torch.Tensor], torch.Tensor], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    forward = lambda self, x: self.o(between(self.a(torch.relu(self.i(x))))).square().mean()  # noqa: E731
    return Call(forward, i=nn.Linear(8, 8), a=nn.Linear(8, 8), o=nn.Linear(8, 8), **more)


class Straight(torch.autograd.Function):
    """Straight through a clamp: the same as torch's backward if no value is clamped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-100, 100)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def with_hook(kind: str) -> nn.Module:
    model = layers(nn.Identity())
    weight: Any = model.a.weight  # type: ignore[union-attr]
    if kind == "of a parameter":
        weight.register_hook(lambda gradient: gradient.clamp(-100, 100))
    elif kind == "after accumulation":
        weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    elif kind == "of a module":
        model.a.register_full_backward_hook(lambda _, given, made: (3 * given[0],))  # type: ignore[union-attr, operator]
    else:
        model.a.register_full_backward_pre_hook(lambda _, made: (3 * made[0],))  # type: ignore[union-attr, operator]
    return model


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "reversed": (lambda: layers(Reverse.apply), "Reverse (a torch.autograd.Function)"),
    "a checkpoint": (lambda: layers(lambda x: recomputed(x, True)), "checkpoint(use_reentrant=True), instead of False"),
    "a hook": (lambda: layers(hooked), "a hook of a tensor"),
    "the same on the example": (lambda: layers(Straight.apply), "Straight (a torch.autograd.Function)"),
    "the same everywhere": (lambda: layers(Square.apply), "Square (a torch.autograd.Function)"),
    "a hook after accumulation": (lambda: with_hook("after accumulation"), "a hook of 'a.weight'"),
    "a hook of a parameter": (lambda: with_hook("of a parameter"), "a hook of 'a.weight'"),
    "a hook of a module": (lambda: with_hook("of a module"), "a backward hook of 'a'"),
    "a hook before a module": (lambda: with_hook("before a module"), "a backward hook of 'a'"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", REFUSED)
def test_a_backward_that_torch_export_leaves_out(name: str) -> None:
    make, names = REFUSED[name]
    with pytest.raises(UnsupportedError, match="the model has its own backward") as raised:
        tpcompiler.export_training(make(), (X,))
    assert names in str(raised.value)


def test_a_loss_with_a_backward_of_its_own() -> None:
    loss = lambda output, target: (Reverse.apply(output) - target).square().mean()  # noqa: E731
    with pytest.raises(UnsupportedError, match="Reverse"):
        tpcompiler.export_training(nn.Linear(8, 8), (X,), loss=loss, targets={"target": X})


def test_a_parameter_that_is_not_the_models() -> None:
    """The program would hold its value, and nothing would train it."""
    scale = nn.Parameter(torch.tensor(2.0))
    loss = lambda output, target: (scale * output - target).square().mean()  # noqa: E731
    with pytest.raises(ProgramError, match=r"depends on a tensor \[\] that requires a gradient and is no parameter"):
        tpcompiler.export_training(nn.Linear(8, 8), (X,), loss=loss, targets={"target": X})
    assert scale.grad is None
    scale.requires_grad_(False)
    tpcompiler.export_training(nn.Linear(8, 8), (X,), loss=loss, targets={"target": X})


def before_accumulation() -> tuple[nn.Module, Any]:
    """Return a model with a hook that Python cannot list, and the node that holds it."""
    model = layers(nn.Identity())
    weight: Any = model.a.weight  # type: ignore[union-attr]
    node: Any = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (clamp(gradients[0]),))
    return model, node


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    """The identity on the example."""
    return gradient.clamp(-100, 100)


def node_hook(x: torch.Tensor) -> torch.Tensor:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(lambda gradients: (clamp(gradients[0]),))
    return x


def multi_hook(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook((x,), lambda gradients: None)
    return x


def compressed(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(clamp, lambda value: value):
        return torch.tanh(x)


def eager_hook(x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        x.register_hook(clamp)
    return x


def eager_saved(x: torch.Tensor) -> torch.Tensor:
    return x if torch.compiler.is_compiling() else compressed(x) - torch.tanh(x).detach() + x


def eager_function(x: torch.Tensor) -> torch.Tensor:
    return x if torch.compiler.is_compiling() else Straight.apply(x)  # type: ignore[no-any-return]


SEEN_IN_THE_MODULES_OWN_RUN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a hook of a node": (node_hook, "a hook of the autograd graph"),
    "a hook of several tensors": (multi_hook, "a hook of a tensor"),
    "hooks on saved tensors": (compressed, "clamp (saved_tensors_hooks)"),
    "hooks on saved tensors outside of export": (eager_saved, "clamp (saved_tensors_hooks)"),
    "a hook outside of export": (eager_hook, "clamp (a hook of a tensor)"),
    "a function outside of export": (eager_function, "Straight (a torch.autograd.Function)"),
}


@pytest.mark.parametrize("name", SEEN_IN_THE_MODULES_OWN_RUN)
def test_a_backward_that_the_modules_own_run_shows(name: str) -> None:
    between, names = SEEN_IN_THE_MODULES_OWN_RUN[name]
    with pytest.raises(UnsupportedError, match="the model has its own backward") as raised:
        tpcompiler.export_training(layers(between), (X,))
    assert names in str(raised.value)


def test_a_hook_of_a_model_exported_without_gradients() -> None:
    with torch.no_grad(), pytest.raises(UnsupportedError, match="a hook of a tensor"):
        tpcompiler.export_training(layers(lambda x: hooked(x) if x.requires_grad else x), (X,))


def test_a_hook_of_all_modules() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, given, made: given)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(UnsupportedError, match="a backward hook of all modules"):
            tpcompiler.export_training(layers(nn.Identity()), (X,))
    finally:
        handle.remove()


@pytest.mark.parametrize("held", [True, False])
def test_a_hook_of_the_loss(held: bool) -> None:
    """Of a loss that is a module, and of one that a function calls."""
    loss = nn.MSELoss()
    loss.register_full_backward_hook(lambda module, given, made: tuple(map(clamp, given[:1])) + given[1:])  # type: ignore[arg-type, operator]
    given: Any = loss if held else lambda output, target: loss(output, target)
    with pytest.raises(UnsupportedError, match=r"a backward hook of|a hook of the autograd graph"):
        tpcompiler.export_training(nn.Linear(8, 8), (X,), loss=given, targets={"target": X})


def test_a_hook_before_accumulation() -> None:
    model, _node = before_accumulation()
    with pytest.raises(UnsupportedError, match="a hook of the autograd graph"):
        tpcompiler.export_training(model, (X,))


def test_code_that_runs_differently_under_export() -> None:
    model = layers(lambda x: x if torch.compiler.is_compiling() else 3 * x - (2 * x).detach())
    model.i.weight.grad = torch.ones(8, 8)  # type: ignore[union-attr, assignment]
    with pytest.raises(ProgramError, match=r"'gradients\..*' of the exported program is not the module's own"):
        tpcompiler.export_training(model, (X,))
    assert torch.equal(model.i.weight.grad, torch.ones(8, 8))  # type: ignore[union-attr, arg-type]
    assert model.a.weight.grad is None  # type: ignore[union-attr]


def test_a_seed_in_the_forward() -> None:
    """The export has run it, so that the generator is where it leads; torch.export leaves it out."""
    model = layers(lambda x: (torch.manual_seed(3), x * torch.rand(8))[1])
    with pytest.raises(ProgramError, match="of the exported program is not the module's own"):
        tpcompiler.export_training(model, (X,))


@pytest.mark.parametrize(
    "value",
    [torch.ones(1).expand(8), nn.Parameter(torch.ones(1).expand(8)), torch.inference_mode()(torch.ones)(8)],
    ids=["buffer", "parameter", "of inference mode"],
)
def test_a_tensor_that_nothing_can_be_written_to(value: torch.Tensor) -> None:
    model = layers(lambda x: x + model.value)
    if isinstance(value, nn.Parameter):
        model.value = value
    else:
        model.register_buffer("value", value)
    program = tpcompiler.export_training(model, (X,))
    assert tpcompiler.parallelize(program, 2, {"i": "colwise"}).verify((X,)).ok


def test_a_loss_that_waits_for_its_backward() -> None:
    """The comparison writes to parameters and statistics, and restores both."""
    norm = nn.BatchNorm1d(8)
    model = layers(norm, norm=norm).train()
    loss, state = model(X), {name: value.clone() for name, value in model.state_dict().items()}
    tpcompiler.export_training(model, (X,))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    loss.backward()


def test_export_in_inference_mode() -> None:
    model = layers(torch.tanh)
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=r"inference_mode\(\) is on"):
        tpcompiler.export_training(model, (X,))
    with torch.no_grad():
        tpcompiler.export_training(model, (X,))


def test_a_generator_of_the_models_own() -> None:
    generator = torch.Generator()
    model = layers(lambda x: x * torch.rand(8, generator=generator))
    with pytest.raises(UnsupportedError, match=r"a generator of the model's own \(torch\._C\.Generator\)"):
        tpcompiler.export_training(model, (X,))
    with pytest.raises(UnsupportedError, match="a generator of the model's own"):
        tpcompiler.parallelize(torch.export.export(model, (X,)), 2, {})


@torch.library.custom_op("tests::reverse", mutates_args=())
def reverse(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


reverse.register_fake(torch.empty_like)
reverse.register_autograd(lambda ctx, gradient: -gradient)


def offloaded(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(x)


KEPT = [detached, reverse, recomputed, offloaded]


@pytest.mark.sample(1)
@pytest.mark.parametrize("between", KEPT, ids=["detached", "custom", "checkpoint", "offloaded"])
def test_a_backward_that_is_kept(between: Any) -> None:
    model = layers(between, norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5)).train()
    state, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    program = tpcompiler.export_training(model, (X,))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)  # as before the comparison
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(each.grad is None for each in model.parameters())
    model(X).backward()
    wanted = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    torch.testing.assert_close(program.module(check_guards=False)(X)["gradients"], wanted)
    plan = {"i": "colwise", "a": "rowwise"}
    assert tpcompiler.parallelize(program, 2, plan).verify((X,)).ok


def test_a_module_without_a_backward() -> None:
    model = layers(lambda x: torch.tanh(x) if torch.compiler.is_compiling() else torch.tanh(x).mul_(1))
    with pytest.raises(TpCompilerError, match="the model's own backward raises: one of the variables needed"):
        tpcompiler.export_training(model, (X,))


def test_sparse_gradients() -> None:
    model = nn.EmbeddingBag(11, 8, sparse=True, mode="sum")
    with pytest.raises(UnsupportedError, match=r"makes a sparse gradient.*") as raised:
        tpcompiler.export_training(
            model, (torch.ones(2, 2, dtype=torch.int64),), loss=lambda output: output.square().sum()
        )
    assert "sparse=False" in str(raised.value)


def test_one_tensor_for_two_inputs() -> None:
    """torch.export takes one tensor that stands twice for one input, the last."""
    loss, other = nn.functional.mse_loss, torch.randn(4, 8)
    model = nn.Linear(8, 8)
    program = tpcompiler.export_training(model, (X,), loss=loss, targets={"target": X})
    got = program.module(check_guards=False)(X, target=other)["outputs"]["loss"]
    torch.testing.assert_close(got, loss(model(X), other))


def _clamped(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.w.clamp_(0, 1)
    return (x @ self.w).sum()


@pytest.mark.parametrize(
    ("module", "x", "name"),
    [
        (Call(_clamped, w=(8, 8)), torch.randn(3, 8), "w"),
        (
            Call(lambda self, x: self.embed(x).sum(), embed=nn.Embedding(16, 8, max_norm=1.0)),
            torch.arange(3),
            "embed.weight",
        ),
    ],
    ids=["clamp", "max_norm"],
)
def test_a_parameter_that_the_forward_writes(module: nn.Module, x: torch.Tensor, name: str) -> None:
    with pytest.raises(ProgramError, match=rf"writes to the parameter '{name}', which only an optimizer may change"):
        tpcompiler.export_training(module, (x,))


def test_a_module_that_rejects_other_values() -> None:
    """The second draw is not compared, and a warning says so."""
    x = torch.ones(3, 8)

    def only_ones(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor) and not torch.equal(x, torch.ones_like(x)):
            raise ValueError("give ones")
        return self.a(x).square().mean()

    with pytest.warns(TpCompilerWarning, match="compared on the example alone: .*give ones"):
        tpcompiler.export_training(Call(only_ones, a=nn.Linear(8, 4)), (x,))


def test_a_tensor_that_is_written_and_is_no_buffer() -> None:
    """Of a module in a list, and a plain attribute: the program would have it as a constant."""
    hidden: Any = layers(lambda x: norms[0](x))
    norms = [nn.BatchNorm1d(8)]
    plain = Call(lambda self, x: (self.a(x) - self.mean.mul_(0.9)).square().mean(), a=nn.Linear(8, 8))
    plain.__dict__["mean"] = torch.ones(8)
    with pytest.raises(ProgramError, match=r"writes to .*, a tensor \[8\] that is no buffer of the model"):
        tpcompiler.export_training(plain, (X,))
    for each in norms[0].parameters():
        each.requires_grad_(False)
    with pytest.raises(ProgramError, match="that is no buffer of the model"):
        tpcompiler.export_training(hidden, (X,))
