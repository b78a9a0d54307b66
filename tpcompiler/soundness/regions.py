"""What ranks do together for a change of sharding, or for shares of one op, is run and compared with what it claims."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler.errors import InternalError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join
from tpcompiler.soundness.folded import Folded, Region, Unsound
from tpcompiler.soundness.sizes import plain, plain_shape
from tpcompiler.verify.simulate import Waiting, lock_step, run_call

Done = set[Any]
# Of an op's share, between float32 sums of another order; a wrong share differs by about the size of the values.
TOLERANCE = 1e-3


def check_region(name: str, ranks: Sequence[Folded], done: Done) -> None:
    """Run one region of all ranks in lock step.

    A change moves elements, so it is run on their numbers, in float64, and what comes out must be the very same whole.
    The share of an op is run on random values, and compared with the op on the whole.

    `done`: regions that were found right, by all that they depend on.

    Raises:
        Unsound: some rank does not get what the region claims to make.
    """
    regions = [each.regions[name] for each in ranks]
    texts = {id(each): _described(each, region) for each, region in zip(ranks, regions, strict=True)}
    known = tuple(texts[id(each)] for each in ranks)
    if known in done:
        return
    (_check_change if regions[0].call is None else _check_body)(ranks, regions)
    done.add(known)


def _check_change(ranks: Sequence[Folded], regions: Sequence[Region]) -> None:
    first, mesh = ranks[0], ranks[0].mesh
    (operand,) = (node for node in regions[0].inputs if edit.is_tensor(node))
    last = regions[0].nodes[-1]
    shape = plain_shape(edit.outputs(first.whole[operand])[0].shape, first.program)
    source, target = first.shardings[operand][0], first.shardings[last][0]
    whole = (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) - torch.Size(shape).numel() // 3).view(shape)
    shares = _shares(whole, source, mesh)
    feeds = [dict.fromkeys(_tensors(region), shares[rank]) for rank, region in enumerate(regions)]
    outs = [out for (out,) in _run(ranks, regions, feeds)]
    _compare(last, whole, outs, target, mesh, exact=True)


def _shares(whole: torch.Tensor, sharding: Sharding, mesh: Mesh) -> list[torch.Tensor]:
    """Of every rank; what waits for a reduction is spread so that no other reduction gives the same."""
    shares = [cut(whole, Sharding(sharding.dims), mesh, rank).clone() for rank in range(mesh.world_size)]
    for axis, op in sharding.partial:
        degree = mesh.degree(axis)
        for rank, share in enumerate(shares):
            here = mesh.coordinate(rank)[axis]
            turn = (torch.arange(share.numel(), dtype=torch.float64).view(share.shape) + here) % degree
            apart = ((turn == 0) * 7.0 - (turn == 1) * 7.0) * (degree > 1)
            if op == "sum":
                share += apart - share * (turn != degree - 1)
            elif op == "avg":
                share += apart
            elif op == "product":
                share.copy_(torch.where(turn == 0, share, 1.0))
            else:
                share += turn * (-5.0 if op == "max" else 5.0)
    return shares


def _check_body(ranks: Sequence[Folded], regions: Sequence[Region]) -> None:
    first, mesh, region = ranks[0], ranks[0].mesh, regions[0]
    whole_of = {first.whole[node]: node for node in region.inputs}
    generator = torch.Generator().manual_seed(0)
    call = region.call
    tensors = [node for node in region.inputs if edit.is_tensor(node)]
    shardings = [first.shardings[node][0] for node in (*tensors, *region.outputs)]
    sizes = [
        plain(size, first.program)
        for node, sharding in zip((*tensors, *region.outputs), shardings, strict=True)
        for size, by in zip(edit.outputs(first.whole[node])[0].shape, sharding.dims, strict=True)
        if by.axes
    ]
    wholes = {
        node: _random(edit.outputs(first.whole[node])[0], min(sizes, default=2), first, generator) for node in tensors
    }
    feeds = []
    for rank, other in enumerate(regions):
        shares = [cut(wholes[node], first.shardings[node][0], mesh, rank) for node in tensors]
        feeds.append(dict(zip(_tensors(other), shares, strict=True)))
    given = fx.node.map_arg(
        (call.args, dict(call.kwargs)),
        lambda n: wholes[whole_of[n]] if edit.is_tensor(n) else plain(n.meta["val"], first.program),
    )
    made = call.target(*given[0], **given[1])
    outs = list(_run(ranks, regions, feeds))
    for index, node in enumerate(region.outputs):
        whole_node = first.whole[node]
        expected = made if whole_node is call else made[whole_node.args[1]]
        _compare(node, expected, [out[index] for out in outs], first.shardings[node][0], mesh, exact=False)


def _tensors(region: Region) -> list[fx.Node]:
    return [node for node in region.inputs if edit.is_tensor(node)]


def _random(value: torch.Tensor, below: int, made: Folded, generator: torch.Generator) -> torch.Tensor:
    """Random values; integers are such as count what is cut."""
    shape = plain_shape(value.shape, made.program)
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if value.is_floating_point() or value.is_complex():
        return torch.randn(shape, generator=generator).to(value.dtype)
    return torch.randint(0, max(below, 1), shape, generator=generator).to(value.dtype)


def _run(
    ranks: Sequence[Folded], regions: Sequence[Region], feeds: Sequence[Mapping[fx.Node, torch.Tensor]]
) -> list[list[Any]]:
    runs = []
    for each, region, feed in zip(ranks, regions, feeds, strict=True):
        numbers = {node: plain(node.meta["val"], each.program) for node in region.inputs if node not in feed}
        runs.append(_one(region, {**feed, **numbers}))
    try:
        return lock_step(runs)
    except InternalError as error:
        raise Unsound(regions[0].nodes[-1], f"is the end of {regions[0].name}: {error.message}") from error
    except (RuntimeError, IndexError, ValueError, TypeError) as error:  # an op on shapes that do not fit
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unsound(regions[0].nodes[-1], f"is the end of {regions[0].name}, which does not run: {line}") from error


def _one(region: Region, env: dict[fx.Node, Any]) -> Generator[Waiting, Any, list[Any]]:
    for node in region.nodes:
        env[node] = yield from run_call(node, env)
    return [env[node] for node in region.outputs]


def _compare(
    node: fx.Node, whole: torch.Tensor, outs: Sequence[torch.Tensor], sharding: Sharding, mesh: Mesh, exact: bool
) -> None:
    try:
        found = join(outs, sharding, mesh, whole.shape)
    except ValueError as error:
        raise Unsound(node, f"is not what its region claims: {error}") from error
    for replica in found:
        if exact or not (whole.is_floating_point() or whole.is_complex()):
            same = torch.equal(replica, whole)
        else:
            scale = max(1.0, float(whole.abs().nan_to_num(0, 0, 0).amax())) if whole.numel() else 1.0
            same = torch.allclose(replica.double(), whole.double(), rtol=0, atol=TOLERANCE * scale, equal_nan=True)
        if not same:
            raise Unsound(node, f"does not become {sharding.text(mesh)} of the whole in its region")


def _described(made: Folded, region: Region) -> Any:
    """All that the result depends on: the nodes as a text with numbers for names, what goes in and what comes out."""
    number: dict[Any, str] = {node: f"i{i}" for i, node in enumerate(region.inputs)}
    number.update({node: f"n{i}" for i, node in enumerate(region.nodes)})
    lines = [
        f"{number[node]} = {node.target}({_text(node.args, number)}, {_text(node.kwargs, number)})"
        for node in region.nodes
    ]
    ends = [
        (number[node], *(sharding.text(made.mesh) for sharding in made.shardings.get(node, ())), *_sizes(made, node))
        for node in (*region.inputs, *region.outputs)
    ]
    call = region.call
    if call is not None:
        values = {node: _layout(node.meta["val"]) for node in call.all_input_nodes}
        call = f"{call.target}({_text(call.args, values)}, {_text(call.kwargs, values)})"
    return tuple(lines), tuple(ends), call


def _text(value: Any, names: Mapping[Any, str]) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each, names) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(each, names)}' for name, each in value.items())}}}"
    return names[value] if isinstance(value, fx.Node) else repr(value)


def _layout(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def _sizes(made: Folded, node: fx.Node) -> tuple[Any, ...]:
    if not edit.is_tensor(node):
        return (str(node.meta.get("val")),)
    value = edit.outputs(made.whole[node])[0]
    return tuple(map(str, value.shape)), value.dtype
