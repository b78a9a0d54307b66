"""A module in training, and its optimizer, as tensors for torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpcompiler._torch import without_step_hooks
from tpcompiler._torch.boxes import Box, BoxedTensor
from tpcompiler.checkpoint.leaves import torch_placements
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.local import local_strides
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import mesh_of, row_sharding
from tpcompiler.runtime.agree import WAIT, agreeing, digest_of
from tpcompiler.runtime.records import Manifest, TensorRecord
from tpcompiler.runtime.world import own_rank

COPIES = "copy of the program"  # an axis of the mesh of torch's tensors; no axis of a plan has spaces
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class DistributedState:
    """The state of one module, in the memory of the rank's own tensors: a checkpoint is read into the module.

    A tensor is a DTensor, or a `BoxedTensor` if DTensor cannot express its sharding.
    """

    def __init__(self, module: torch.nn.Module, manifest: Manifest, trained: Collection[str]) -> None:
        """`trained`: the parameters that have a gradient."""
        self.module, self.manifest, self.trained = module, manifest, trained
        self.mesh: DeviceMesh | None = None

    def __call__(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, dict[str, Any]]:
        """Return `{"model": {name: tensor}, "optimizer": {"name.key": tensor}, "options": ...}`.

        All ranks must call it. Copies of the program in a larger world are one state. The options are those of the
        optimizer's groups, such as the learning rate: a checkpoint that is read sets them. An optimizer that has made
        no step gets state of zeros, into which a checkpoint can be read. If none is, its first step is as if it had
        not been asked.

        Raises:
            ArtifactError: a parameter is pending, or the optimizer has state that no checkpoint can be read into.
            LaunchError: copies of the program hold other values.
        """
        if self.mesh is None:
            axes = {**({COPIES: self.copies} if self.copies > 1 else {}), **self.manifest.degrees}
            ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
            device = next(self.module.parameters()).device.type
            self.mesh = DeviceMesh(device, ranks, mesh_dim_names=tuple(axes))
        state: dict[str, dict[str, Any]] = {"model": dict(self._tensors())}
        if optimizer is not None:
            names: dict[torch.Tensor, str] = {value: name for name, value in self.module.named_parameters()}
            state["optimizer"] = dict(self._of_optimizer(optimizer, names))
            state["options"] = GroupOptions(optimizer, names)
        if self.copies > 1:
            self._refuse_unlike_copies({**state["model"], **state.get("optimizer", {})})
        return state

    @property
    def copies(self) -> int:
        return dist.get_world_size() // self.manifest.world_size

    def _refuse_unlike_copies(self, state: Mapping[str, Any]) -> None:
        """Raise if copies of the program were trained apart: a checkpoint would have parts of each."""
        own, size = own_rank(self.manifest), self.manifest.world_size
        alike = [copy * size + own for copy in range(self.copies)]
        with agreeing(WAIT, alike, help="give all copies of the program the same batches, or load it again") as mine:
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    mine[f"the share of {name!r}"] = f"SHA-256 {digest_of(_held(value))}.."

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for row in self.manifest.tensors:
            if row.name in named and row.tied_to is None and row.persistent:
                yield row.name, self._distributed(row, named[row.name])

    def _of_optimizer(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
    ) -> Iterator[tuple[str, Any]]:
        rows = {row.name: row for row in self.manifest.tensors}
        _refuse_others(optimizer, names)
        trained = [each for name in self.trained if (each := self.module.get_parameter(name)).requires_grad]
        if not optimizer.state:
            _make_state(optimizer, trained)
        else:
            _refuse_without_state(optimizer, trained, names)
        for value, own in optimizer.state.items():
            for key, each in own.items():
                name = f"{names[value]}.{key}"
                if each is not None and not isinstance(each, torch.Tensor):
                    raise ArtifactError(
                        f"{type(optimizer).__name__} keeps {name!r} as a Python {type(each).__name__}, which "
                        "torch.distributed.checkpoint cannot read back into an optimizer",
                        help="let the optimizer keep it as a tensor, such as torch.tensor(0.0)",
                    )
                is_share = each is not None and each.shape == value.shape and each.ndim > 0
                yield name, self._distributed(rows[names[value]], each) if is_share else each

    def _distributed(self, row: TensorRecord, local: torch.Tensor) -> torch.Tensor:
        mesh = mesh_of(self.manifest)
        sharding, shape = row_sharding(row, mesh), torch.Size(row.shape)
        if sharding.partial:
            raise ArtifactError(
                f"{row.name!r} is sharded as {row.sharding}: it is the sum of what the ranks hold",
                help="give it another style in the plan, such as replicate",
            )
        placements = torch_placements(sharding, row.shape, mesh)
        if placements is None:
            return _in_boxes(local.detach(), sharding, shape, mesh, own_rank(self.manifest))
        stride = tuple(local_strides(local, shape))
        assert self.mesh is not None
        placements = [*[Replicate()] * (self.mesh.ndim - len(placements)), *placements]
        return DTensor.from_local(local.detach(), self.mesh, placements, run_check=False, shape=shape, stride=stride)


def _held(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor."""
    if isinstance(value, BoxedTensor):
        return torch.cat([box.held.reshape(-1) for box in value.boxes])
    return value.to_local() if isinstance(value, DTensor) else value


def _in_boxes(local: torch.Tensor, sharding: Sharding, shape: torch.Size, mesh: Mesh, rank: int) -> BoxedTensor:
    """Return a share that DTensor cannot express, as boxes which are equal or disjoint on all ranks."""
    sides = []  # by dim: start in the whole, start in the share, length
    for by, size in zip(sharding.dims, shape, strict=True):
        runs = [by.runs(size, mesh, mesh.coordinate(each)) for each in range(mesh.world_size)]
        ends = sorted({end for own in runs for run in own for end in (run.start, run.stop)})
        own, at = [], 0
        for run in runs[rank]:
            for start, stop in itertools.pairwise(end for end in ends if run.start <= end <= run.stop):
                own.append((start, at, stop - start))
                at += stop - start
        sides.append(own)
    boxes = []
    for each in itertools.product(*sides):
        held = local[tuple(slice(at, at + length) for _, at, length in each)]
        boxes.append(Box(tuple(start for start, *_ in each), held))
    return BoxedTensor.of(boxes, local, shape)


def _refuse_others(optimizer: torch.optim.Optimizer, names: Collection[torch.Tensor]) -> None:
    """Raise for parameters that are not the module's, and for optimizers that no checkpoint can be read into."""
    kind = type(optimizer).__name__
    if others := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise ArtifactError(
            f"{kind} keeps state under {others[0]!r}, which is no parameter",
            help="let the optimizer keep it in the state of each parameter",
        )
    for value in (*optimizer.state, *(each for group in optimizer.param_groups for each in group["params"])):
        if value not in names:
            raise ArtifactError(
                f"the optimizer has a tensor {list(value.shape)} that is no parameter of the module",
                help="give that tensor another optimizer, and save its state_dict()",
            )
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())  # a scheduler wraps optimizer.step
    if any(each.default is each.empty and each.kind not in VARIABLE for each in parameters[1:]):
        raise ArtifactError(
            f"{kind} takes a function in each step, and has no state of each parameter that could be written",
            help="train with another optimizer, such as AdamW",
        )


def _refuse_without_state(
    optimizer: torch.optim.Optimizer, trained: Collection[torch.Tensor], names: Mapping[torch.Tensor, str]
) -> None:
    """Raise if parameters have no state yet and get some in the next step: who reads the checkpoint has it for all."""
    given = {id(each) for group in optimizer.param_groups for each in group["params"]}
    new = [each for each in trained if id(each) in given and each not in optimizer.state]
    if not new:
        return
    old = {**optimizer.state}
    _step_without_gradients(optimizer, new)
    made = [each for each in new if optimizer.state.get(each)]
    optimizer.state.clear()
    optimizer.state.update(old)
    if made:
        raise ArtifactError(
            f"the optimizer has no state of {names[made[0]]!r} yet, and has state of {names[next(iter(old))]!r}",
            help="make a step in which all of its parameters have gradients, then ask again",
        )


def _step_without_gradients(optimizer: torch.optim.Optimizer, trained: Collection[torch.Tensor]) -> None:
    """Let an optimizer make the state of some parameters.

    Parameters, gradients, options of groups and generators are as before.
    """
    groups, held = [dict(group) for group in optimizer.param_groups], {id(each) for each in trained}
    values = [each for group in groups for each in group["params"]]
    old = [(each, each.data, each.grad) for each in values]
    for group in optimizer.param_groups:
        changeable = {key: each for key, each in group.items() if isinstance(each, torch.Tensor | list | dict)}
        group.update({key: copy.deepcopy(each) for key, each in changeable.items() if key != "params"})
    for each in values:
        each.data, each.grad = each.data.clone(), torch.zeros_like(each) if id(each) in held else None
    devices = {each.device for each in values if each.device.type == "cuda"}
    try:
        with without_step_hooks(optimizer), torch.random.fork_rng(devices):
            type(optimizer).step(optimizer)  # a scheduler counts calls of optimizer.step
    finally:
        for each, value, gradient in old:
            each.data, each.grad = value, gradient
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(own)


def _make_state(optimizer: torch.optim.Optimizer, trained: Collection[torch.Tensor]) -> None:
    """Make the tensors in which an optimizer keeps its state for parameters with a gradient, all of zeros.

    Zeros are not how every optimizer begins (weight decay, dampening, step sizes), so the first step takes them away
    again, unless a checkpoint was read into them. Parameters and gradients are as before.
    """
    _step_without_gradients(optimizer, trained)
    for each in _state_tensors(optimizer):
        each.zero_()

    def begin(*_: Any) -> None:
        hook.remove()
        if not any(each.any() for each in _state_tensors(optimizer)):
            optimizer.state.clear()

    hook = optimizer.register_step_pre_hook(begin)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for own in optimizer.state.values():
        yield from (each for each in own.values() if isinstance(each, torch.Tensor))


OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")  # how a step is computed, not what it computes
NO_OPTIONS = ("params", "param_names")


class GroupOptions(dict[str, Any]):
    """`{"groups": (names of parameters, options) of each group}`; setting "groups" sets the optimizer's options.

    torch.distributed.checkpoint replaces what is no tensor, and never writes into it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self.optimizer, self.names = optimizer, names
        groups = tuple((tuple(self._names_of(group)), _options(group)) for group in optimizer.param_groups)
        super().__init__(groups=groups)

    def __setitem__(self, key: str, value: Any) -> None:
        """Set the options of each group to those that its parameters have in a checkpoint.

        Raises:
            ArtifactError: the parameters of a group had different options.
        """
        super().__setitem__(key, value)
        options = {name: own for names, own in value for name in names}
        for group in self.optimizer.param_groups:
            known = [name for name in self._names_of(group) if name in options]
            for name in known[1:]:
                if not _is_equal(options[name], options[known[0]]):
                    raise ArtifactError(
                        f"the parameters {known[0]!r} and {name!r} are in one group of the optimizer, and had "
                        f"different options when the checkpoint was written: {options[known[0]]} and {options[name]}",
                        help="make the optimizer with the groups that it had then",
                    )
            for option, each in options[known[0]].items() if known else ():
                old = group.get(option)
                if isinstance(old, torch.Tensor):
                    with torch.no_grad():
                        old.copy_(torch.as_tensor(each))  # a scheduler may hold it
                else:
                    group[option] = each

    def _names_of(self, group: Mapping[str, Any]) -> Iterable[str]:
        return (self.names[value] for value in group["params"])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: each.detach().cpu() if isinstance(each, torch.Tensor) else each
        for key, each in group.items()
        if key not in (*NO_OPTIONS, *OF_THE_MACHINE) and _is_plain(each)
    }


def _is_plain(value: Any) -> bool:
    """Return False for values that are code, such as functions, which a checkpoint cannot hold."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.Tensor)


def _is_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(each), torch.as_tensor(other[key]))
        if isinstance(each, torch.Tensor) or isinstance(other[key], torch.Tensor)
        else each == other[key]
        for key, each in one.items()
    )
