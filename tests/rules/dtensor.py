"""What DTensor's sharding propagator says of a call: torch's own rules, asked one placement at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

from tests.rules.sample import Sample
from tpcompiler._torch import DeviceMesh, fake_group, traced_mesh, tree_flatten, tree_unflatten
from tpcompiler.ir.placements import format_placement
from tpcompiler.judge.rules.placements import SoundWay


@contextlib.contextmanager
def mesh_of(degree: int) -> Iterator[DeviceMesh]:
    with fake_group("oracle", 0, degree, "cpu"):
        yield traced_mesh("cpu", ("tp",), (degree,), 0, ("oracle",))


def knows(target: Any) -> bool:
    """Whether DTensor has a rule for the op by itself (it takes composite ops apart)."""
    rules: Any = DTensor._op_dispatcher.sharding_propagator
    return (
        target in rules.op_strategy_funcs or target in rules.op_single_dim_strategy_funcs or target in rules.op_to_rules
    )


def text(placements: Sequence[Placement]) -> str:
    """As ours are printed; a placement of a kind that we do not have under its name."""
    ours = (Shard, Replicate, Partial)
    return ", ".join(format_placement(p) if type(p) in ours else type(p).__name__ for p in placements)


def answer(sample: Sample, inputs: Sequence[Placement], mesh: DeviceMesh) -> SoundWay | None:
    """The placements of the outputs that DTensor gives operands placed so; None if it would place them otherwise.

    Raises:
        Exception: whatever its rule raises.
    """
    rules: Any = DTensor._op_dispatcher.sharding_propagator
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    feed = iter(inputs)
    placed = [_spec(leaf, next(feed), mesh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(placed, spec)
    # Without its info a schema is cached under a key that ignores the numbers among the arguments.
    info = rules.op_to_schema_info.get(sample.target)
    info = info or rules.op_to_schema_info_for_single_dim_strategy.get(sample.target)
    found = rules.propagate_op_sharding_non_cached(OpSchema(sample.target, tuple(args), kwargs, info))
    if found.needs_redistribute and _moved(placed, found.redistribute_schema):
        return None
    specs = found.output_spec if isinstance(found.output_spec, (tuple, list)) else [found.output_spec]
    return SoundWay(tuple(inputs), tuple(each.placements[0] for each in specs if each is not None))


def _moved(placed: Sequence[Any], schema: Any) -> bool:
    """Whether an operand is to be placed otherwise, and not only a size argument made local."""
    if schema is None:
        return False
    after = [
        leaf for leaf in tree_flatten((schema.args_schema, schema.kwargs_schema))[0] if isinstance(leaf, DTensorSpec)
    ]
    before = [leaf for leaf in placed if isinstance(leaf, DTensorSpec)]
    return [each.placements for each in before] != [each.placements for each in after]


def _spec(value: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> DTensorSpec:
    return DTensorSpec(mesh, (placement,), TensorMeta(value.shape, value.stride(), value.dtype))
