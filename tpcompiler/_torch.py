"""EVERY private torch import of the project, as seen with torch 2.13 (CPU). When torch moves, look here.

Nothing else in the two packages may import a private torch name.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

FAKE_GROUP: Any = vars(fake_pg)["FakeProcessGroup"]

__all__ = [
    "DeviceMesh",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TreeSpec",
    "decomposed",
    "detect_fake_mode",
    "fake_group",
    "group_is_registered",
    "make_fx",
    "redistribute",
    "register_group",
    "resolve_group",
    "shape_facts",
    "statically_equal",
    "sym_hint",
    "sym_quotient",
    "symbols_of",
    "traced_mesh",
    "tree_flatten",
    "tree_map",
    "tree_names",
    "tree_unflatten",
]


def decomposed(program: ExportedProgram, table: Any) -> ExportedProgram:
    """A functional copy of the program, with the ops of `table` decomposed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 warns about its own LeafSpec
        made: ExportedProgram = program.run_decompositions(table)
        return made


def statically_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal in every run, without adding a guard."""
    return bool(statically_known_true(a == b))


def sym_quotient(a: Any, b: Any) -> Any | None:
    """`a / b` when `b` divides `a` in every run, else None; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = _quotient(*(v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in (a, b)))
    if quotient is None or quotient.is_Integer:
        return None if quotient is None else int(quotient)
    env = (a if isinstance(a, torch.SymInt) else b).node.shape_env
    return env.create_symintnode(quotient, hint=None)


@functools.lru_cache(maxsize=4096)
def _quotient(whole: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    quotient = sympy.cancel(whole / part)
    if quotient.is_Integer:
        return quotient
    if not quotient.is_polynomial() or not quotient.free_symbols:
        return None
    return quotient if all(c.is_integer for c in sympy.Poly(quotient).coeffs()) else None


def symbols_of(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols in the sizes of these values."""
    sizes = [s for v in tree_flatten(list(values))[0] for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return set().union(*(s.node.expr.free_symbols for s in sizes if isinstance(s, torch.SymInt)))


def shape_facts(mode: FakeTensorMode) -> tuple[int, ...]:
    """How many guards, replacements and deferred assertions the shape environment holds: growth is specialisation."""
    env = mode.shape_env
    if env is None:
        return ()
    return len(env.guards), len(env.replacements), sum(map(len, env.deferred_runtime_asserts.values()))


def sym_hint(size: Any) -> int:
    """The size in the example that the program was exported with."""
    if isinstance(size, int):
        return size
    env = size.node.shape_env
    hint = getattr(env, "optimization_hint", None) or env.size_hint  # torch 2.13 renamed it
    return int(hint(size.node.expr))


def tree_names(spec: Any) -> list[str]:
    """The path of every leaf of a pytree, as `logits`, `0` or `cache.0.key`; equal paths are numbered, `0#2`."""
    leaves, _ = tree_flatten_with_path(tree_unflatten(list(range(spec.num_leaves)), spec))
    names: list[str] = []
    times: Counter[str] = Counter()
    for path, _leaf in leaves:
        parts = (str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
        name = ".".join(parts) or "output"
        times[name] += 1
        names.append(name if times[name] == 1 else f"{name}#{times[name]}")
    return names


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let graphs that say `name` use `group`."""
    _register_process_group(cast(Any, name), group)


def resolve_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast(Any, name))


def group_is_registered(name: str) -> bool:
    try:
        resolve_group(name)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def fake_group(name: str, rank: int, size: int, device_type: str) -> Iterator[None]:
    """A process group that answers nothing, registered under a private name for the time of a trace.

    It never becomes the default group, so a caller's own process group keeps its state.
    """
    c10d: Any = dist  # its stubs leave out the stores
    group = c10d.ProcessGroup(c10d.PrefixStore(name, c10d.HashStore()), rank, size)
    create = getattr(FAKE_GROUP, "_create_internal", FAKE_GROUP)
    group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.CUSTOM, create(rank, size))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)
    register_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(cast(Any, name))


def traced_mesh(
    device_type: str, axes: Sequence[str], degrees: Sequence[int], rank: int, groups: Sequence[str]
) -> DeviceMesh:
    """A mesh over groups that are registered already; needs no default group and makes none."""
    ranks = torch.arange(torch.Size(degrees).numel()).view(*degrees)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes), _init_backend=False, _rank=rank)
    mesh._dim_group_names = cast(Any, list(groups))
    return mesh


def redistribute(
    local: torch.Tensor,
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    shape: Sequence[Any],
) -> torch.Tensor:
    """torch's own change of placements of a dense local tensor of a global tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    meta = TensorMeta(torch.Size(shape), tuple(strides[: len(shape)]), local.dtype)
    return redistribute_local_tensor(
        local, DTensorSpec(mesh, tuple(source), meta), DTensorSpec(mesh, tuple(target), meta)
    )
