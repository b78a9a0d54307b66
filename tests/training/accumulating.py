"""Steps of several batches, some of them in no_sync; each works on a module of one device too, and leaves gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import utils


def no_sync(module: Any) -> Any:
    return module.no_sync() if hasattr(module, "no_sync") else contextlib.nullcontext()


def clip(module: Any, most: float) -> None:
    own = getattr(module, "clip_grad_norm_", None)
    _ = own(most) if own else utils.clip_grad_norm_(module.parameters(), most)


def accumulate(module: Any, batches: torch.Tensor) -> None:
    for at, x in enumerate(batches):
        with no_sync(module) if at + 1 < len(batches) else contextlib.nullcontext():
            module(x).backward()
    clip(module, 0.1)


def clip_each(module: Any, batches: torch.Tensor) -> None:
    for x in batches:
        with no_sync(module):
            module(x).backward()
        clip(module, 0.1)


def scale_and_copy(module: Any, batches: torch.Tensor) -> None:
    module(batches[0]).backward()
    with no_sync(module):
        module(batches[1]).backward()
    for each in module.parameters():
        each.grad.mul_(0.5)
    with no_sync(module):
        module(batches[2]).backward()
    for each in module.parameters():
        each.grad = each.grad.clone()
    module(batches[3]).backward()


def give_up(module: Any, batches: torch.Tensor, set_to_none: bool) -> None:
    """Gradients of a penalty, which all ranks have whole, are there when the sums are made."""
    module(batches[0]).backward()
    with no_sync(module):
        module(batches[1]).backward()
        module.zero_grad(set_to_none)
        module(batches[2]).backward()
    module.zero_grad(set_to_none)
    (sum(each.square().sum() for each in module.parameters()) / 100).backward()
    module(batches[3]).backward()


def freeze(module: Any, batches: torch.Tensor) -> None:
    """Each layer has gradients of other batches, and one weight of one more."""
    module.up.requires_grad_(False)
    with no_sync(module):
        module(batches[0]).backward()
        module.up.requires_grad_(True)
        module(batches[1]).backward(inputs=[module.down.weight])
    module.down.requires_grad_(False)
    module(batches[2]).backward()
    module.down.requires_grad_(True)


def ask_and_hook(module: Any, batches: torch.Tensor) -> None:
    """Gradients that nobody keeps, and hooks that halve one."""
    with no_sync(module):
        module(batches[0]).backward()
    torch.autograd.grad(module(batches[1]), list(module.parameters()))
    hooks = [each.register_hook(lambda gradient: gradient / 2) for each in module.parameters()]
    with no_sync(module):
        module(batches[2]).backward()
    module(batches[3]).backward()
    for each in hooks:
        each.remove()


def step_inside(module: Any, batches: torch.Tensor) -> None:
    """The step makes the sums, also that of an optimizer of one layer."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module.up, module)]
    for optimizer in optimizers:
        with no_sync(module):
            module(batches[0]).backward()
            module(batches[1]).backward()
            optimizer.step()


def step_in_hooks(module: Any, batches: torch.Tensor) -> None:
    """Each parameter has its step as soon as it has its gradient, while others still wait for theirs."""
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in module.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    hooks = [each.register_post_accumulate_grad_hook(step) for each in optimizers]
    with no_sync(module):
        module(batches[0]).backward()
    for each in hooks:
        each.remove()
    module(batches[1]).backward()


def step_with_closure(module: Any, batches: torch.Tensor, by_name: bool) -> None:
    """The step calls what runs the backwards, some of which were run before it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        with no_sync(module):
            module(batches[1]).backward()
            module(batches[2]).backward()
        return torch.tensor(0.0)

    with no_sync(module):
        module(batches[0]).backward()
    _ = optimizer.step(closure=closure) if by_name else optimizer.step(closure)


def steps_with_closure(module: Any, batches: torch.Tensor) -> None:
    """Several evaluations of one closure, each of which begins with fresh gradients."""
    optimizer = torch.optim.Rprop(module.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with no_sync(module):
            module(batches[1]).backward()
        return torch.tensor(0.0)

    for _ in range(3):
        optimizer.step(closure)


SEQUENCES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "accumulate": accumulate,
    "clip each": clip_each,
    "scale and copy": scale_and_copy,
    "give up, to None": lambda module, batches: give_up(module, batches, True),
    "give up, to 0": lambda module, batches: give_up(module, batches, False),
    "freeze": freeze,
    "ask and hook": ask_and_hook,
    "step inside": step_inside,
    "step in hooks": step_in_hooks,
    "step with a closure": lambda module, batches: step_with_closure(module, batches, False),
    "step with a closure by name": lambda module, batches: step_with_closure(module, batches, True),
    "steps with a closure": steps_with_closure,
}


def take_turns(one: Any, two: Any, batches: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of programs that share parameters: each sums what the other has left out."""
    made = []
    with no_sync(one):
        one(batches[0]).backward()
    two(batches[1]).backward()
    made.append({name: each.grad.clone() for name, each in one.named_parameters()})
    with no_sync(one), no_sync(two):
        two(batches[2]).backward()
        one(batches[3]).backward()
    clip(two, 0.1)
    return [*made, {name: each.grad.clone() for name, each in one.named_parameters()}]


def run_all(module: Any, batches: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """Return gradients and parameters after each sequence, which begins from the same parameters."""
    start, made = {name: each.detach().clone() for name, each in module.named_parameters()}, {}
    for how, run in SEQUENCES.items():
        module.zero_grad()
        run(module, batches)
        named = list(module.named_parameters())
        made[how] = {f"{name}.grad": each.grad.clone() for name, each in named}
        made[how] |= {name: each.detach().clone() for name, each in named}
        with torch.no_grad():
            for name, each in named:
                each.copy_(start[name])
    return made
