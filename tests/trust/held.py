"""Damages of what ranks hold, and of what the manifest and the claims say."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import force_setattr
from torch.export.graph_signature import OutputKind

from tests.trust.damage import Artifact, at, claim, kind, region, rows, shape
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding, Level
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join, read_sharding
from tpcompiler.runtime.records import PlacedRecord


def _sharding(artifact: Artifact, row: PlacedRecord) -> Sharding:
    return read_sharding(row.sharding, artifact.mesh, len(row.shape))


def _whole(artifact: Artifact, row: PlacedRecord) -> torch.Tensor:
    parts = [artifact.leaf(rank, row.name).detach() for rank in range(len(artifact.ranks))]
    return join(parts, _sharding(artifact, row), artifact.mesh, row.shape)[0]


def _recut(artifact: Artifact, row: PlacedRecord, whole: torch.Tensor, by: Sharding) -> bool:
    """Whether that gives any rank another tensor: what changes nothing is no damage."""
    changed = False
    for rank in range(len(artifact.ranks)):
        new, old = cut(whole, by, artifact.mesh, rank), artifact.leaf(rank, row.name)
        if new.shape != old.shape:
            return False
        changed |= not torch.equal(new, old)
        artifact.put(rank, row.name, new)
    return changed


def _cut_rows(artifact: Artifact) -> list[PlacedRecord]:
    return [row for row in rows(artifact) if "S(" in row.sharding and 0 not in row.shape]


def _replicas(artifact: Artifact) -> list[PlacedRecord]:
    floats = ("f32", "f16", "bf16", "f64")
    whole = [row for row in rows(artifact) if set(row.sharding) <= set("R, ") and row.dtype in floats]
    return [row for row in whole if 0 not in row.shape]


@kind
def shares_swapped(artifact: Artifact, nth: int) -> bool:
    """Two ranks hold each other's share of a weight."""
    last = len(artifact.ranks) - 1

    def apart(row: PlacedRecord) -> bool:
        one, two = (artifact.leaf(rank, row.name) for rank in (0, last))
        return one.shape == two.shape and not torch.equal(one, two)

    row = at([row for row in _cut_rows(artifact) if apart(row)], nth)
    if row:
        one, two = (artifact.leaf(rank, row.name) for rank in (0, last))
        artifact.put(0, row.name, two)
        artifact.put(last, row.name, one)
    return row is not None


@kind
def shares_transposed(artifact: Artifact, nth: int) -> bool:
    """The numbers of a share lie in it as if it were transposed, on all ranks."""
    row = at([row for row in _cut_rows(artifact) if len(row.shape) == 2 and 1 not in row.shape], nth)
    changed = False
    for rank in range(len(artifact.ranks)) if row else ():
        old = artifact.leaf(rank, row.name)  # type: ignore[index]
        new = old.t().reshape(old.shape)
        changed |= not torch.equal(new, old)
        artifact.put(rank, row.name, new)  # type: ignore[index]
    return changed


@kind
def shares_of_one_row_later(artifact: Artifact, nth: int) -> bool:
    """Every share of a weight begins and ends one row later."""
    row = at(_cut_rows(artifact), nth)
    if row is None:
        return False
    sharding = _sharding(artifact, row)
    dim = next(dim for dim, by in enumerate(sharding.dims) if by.axes)
    return _recut(artifact, row, _whole(artifact, row).roll(-1, dim), sharding)


@kind
def packed_parts_cut_as_one(artifact: Artifact, nth: int) -> bool:
    """Queries, keys and values in one matrix (or bias) are cut as if they were one piece."""
    row = at([row for row in _cut_rows(artifact) if "parts" in row.sharding], nth)
    return row is not None and _recut(artifact, row, _whole(artifact, row), _as_one(_sharding(artifact, row)))


@kind
def packed_parts_cut_as_one_and_claimed_so(artifact: Artifact, nth: int) -> bool:
    """The same, and the manifest says so."""
    row = at([row for row in _cut_rows(artifact) if "parts" in row.sharding], nth)
    if row is None or not _recut(artifact, row, _whole(artifact, row), _as_one(_sharding(artifact, row))):
        return False
    force_setattr(row, "sharding", _as_one(_sharding(artifact, row)).text(artifact.mesh))
    return True


def _as_one(sharding: Sharding) -> Sharding:
    plain = (DimSharding(tuple(Level(axis) for axis in by.axes)) if by.parts else by for by in sharding.dims)
    return Sharding(tuple(plain), sharding.partial)


@kind
def a_bias_on_every_rank(artifact: Artifact, nth: int) -> bool:
    """A bias that one rank adds, so that the sum has it once, is added by all."""
    row = at([row for row in rows(artifact) if "P(sum)" in row.sharding and _whole(artifact, row).any()], nth)
    if row:
        whole = _whole(artifact, row)
        for rank in range(len(artifact.ranks)):
            artifact.put(rank, row.name, whole)
    return row is not None


@kind
def a_replica_of_old(artifact: Artifact, nth: int) -> bool:
    """One rank holds other values of what all should hold alike."""
    row = at(_replicas(artifact), nth)
    if row:
        artifact.put(len(artifact.ranks) - 1, row.name, artifact.leaf(0, row.name) * 1.25 + 0.25)
    return row is not None


@kind
def one_element_of_a_share_changed(artifact: Artifact, nth: int) -> bool:
    """One number of one rank's share is another."""
    row = at([row for row in _cut_rows(artifact) if artifact.leaf(0, row.name).is_floating_point()], nth)
    if row is None or not artifact.leaf(0, row.name).numel():
        return False
    new = artifact.leaf(0, row.name).detach().clone()
    new.view(-1)[new.numel() // 2] += 3
    artifact.put(0, row.name, new)
    return True


@kind
def weights_of_another_model(artifact: Artifact, nth: int) -> bool:
    """All ranks hold shares of another weight than the original's."""
    row = at([row for row in _cut_rows(artifact) if artifact.leaf(0, row.name).is_floating_point()], nth)
    return row is not None and _recut(artifact, row, _whole(artifact, row) * 1.25, _sharding(artifact, row))


@kind
def weights_rounded(artifact: Artifact, nth: int) -> bool:
    """All ranks hold a weight that went through float16."""
    row = at([row for row in _cut_rows(artifact) if row.dtype == "f32"], nth)
    return row is not None and _recut(artifact, row, _whole(artifact, row).half().float(), _sharding(artifact, row))


def _written_back(artifact: Artifact) -> list[tuple[int, int]]:
    """Pairs of outputs that are written back and could be each other's. (Not counters, which are all alike.)"""
    program = artifact.ranks[0]
    values: Any = program.graph.output_node().args[0]
    kept = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    specs = program.graph_signature.output_specs
    mutated = [i for i, s in enumerate(specs) if s.kind in kept and values[i].meta["val"].is_floating_point()]
    return [(i, j) for i, j in itertools.pairwise(mutated) if shape(values[i]) == shape(values[j])]


@kind
def written_back_to_each_other(artifact: Artifact, nth: int) -> bool:
    """Two buffers are given each other's new value, on all ranks."""
    pair = at(_written_back(artifact), nth)
    for program in artifact.ranks if pair else ():
        values = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        i, j = pair  # type: ignore[misc]
        values[i], values[j] = values[j], values[i]
        program.graph.output_node().args = (tuple(values),)
    return pair is not None


@kind
def written_back_to_each_other_by_name(artifact: Artifact, nth: int) -> bool:
    """The signature of one rank gives two buffers each other's new value."""
    pair = at(_written_back(artifact), nth)
    if pair:
        one, two = (artifact.last.graph_signature.output_specs[i] for i in pair)
        one.target, two.target = two.target, one.target
    return pair is not None


@kind
def not_written_back(artifact: Artifact, nth: int) -> bool:
    """A buffer is given the value that it has, on one rank."""
    program = artifact.last
    inputs = {str(spec.target): spec.arg.name for spec in program.graph_signature.input_specs}
    nodes = {node.name: node for node in program.graph.nodes}
    specs = program.graph_signature.output_specs
    place = at([i for i, spec in enumerate(specs) if spec.kind is OutputKind.BUFFER_MUTATION], nth)
    if place is not None:
        values = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        values[place] = nodes[inputs[str(specs[place].target)]]
        program.graph.output_node().args = (tuple(values),)
    return place is not None


@kind
def never_written_back(artifact: Artifact, nth: int) -> bool:
    """No rank keeps the new value of a buffer."""
    kinds = [spec.kind for spec in artifact.ranks[0].graph_signature.output_specs]
    place = at([i for i, each in enumerate(kinds) if each is OutputKind.BUFFER_MUTATION], nth)
    for program in artifact.ranks if place is not None else ():
        values = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        del values[place], program.graph_signature.output_specs[place]
        program.graph.output_node().args = (tuple(values),)
    return place is not None


def _other_text(text: str, ndim: int) -> str | None:
    """Another sharding of as many dims, over the axes that are there."""
    if "S(" not in text:
        return text.replace("R", "P(sum)", 1) if "R" in text else None
    at_ = int(text.partition("S(")[2][0])
    return text.replace(f"S({at_}", f"S({(at_ + 1) % ndim}", 1) if ndim > 1 else text.replace(f"S({at_})", "R", 1)


def _says_otherwise(field: str) -> Callable[[Artifact, int], bool]:
    def damage(artifact: Artifact, nth: int) -> bool:
        found: list[PlacedRecord] = [
            row
            for row in getattr(artifact.manifest, field)
            if _other_text(row.sharding, len(row.shape)) not in (None, row.sharding)
        ]
        row = at(found, nth)
        if row:
            force_setattr(row, "sharding", _other_text(row.sharding, len(row.shape)))
        return row is not None

    damage.__doc__ = f"The manifest says another sharding of one of its {field}."
    damage.__name__ = f"another_sharding_among_{field}"
    return kind(damage)


for _field in ("tensors", "inputs", "outputs"):
    _says_otherwise(_field)


def _row_is_another(key: str, change: Callable[[Any], Any]) -> Callable[[Artifact, int], bool]:
    def damage(artifact: Artifact, nth: int) -> bool:
        row = at(
            [
                row
                for f in (artifact.manifest.tensors, artifact.manifest.inputs, artifact.manifest.outputs)
                for row in f
            ],
            nth,
        )
        if row:
            force_setattr(row, key, change(getattr(row, key)))
        return row is not None

    damage.__doc__ = f"The manifest says another {key} of a tensor."
    damage.__name__ = f"another_{key}_in_the_manifest"
    return kind(damage)


_row_is_another(
    "shape", lambda sizes: [*sizes[:-1], sizes[-1] + 1] if sizes and isinstance(sizes[-1], int) else [*sizes, 3]
)
_row_is_another("dtype", lambda name: "f16" if name != "f16" else "i64")
_row_is_another("name", lambda name: f"{name}_2")


@kind
def a_tensor_that_the_manifest_leaves_out(artifact: Artifact, nth: int) -> bool:
    """The manifest does not name a tensor that the ranks hold."""
    row = at(artifact.manifest.tensors, nth)
    if row:
        artifact.manifest.tensors.remove(row)
    return row is not None


@kind
def a_tensor_said_to_be_elsewhere(artifact: Artifact, nth: int) -> bool:
    """Shares are swapped, and the manifest says that the tensor lies in the files of another program."""
    if not shares_swapped(artifact, nth):
        return False
    before = copy.deepcopy(artifact)
    shares_swapped(before, nth)
    last = len(artifact.ranks) - 1
    for row in artifact.manifest.tensors:
        if not torch.equal(artifact.leaf(last, row.name), before.leaf(last, row.name)):
            force_setattr(row, "stored_in", "prefill")
    return True


@kind
def groups_of_other_ranks(artifact: Artifact, nth: int) -> bool:
    """The manifest lists the ranks of a group in another order."""
    name = at([n for n, groups in artifact.manifest.groups.items() if len(groups[0]) > 1], nth)
    if name:
        artifact.manifest.groups[name] = [list(reversed(ranks)) for ranks in artifact.manifest.groups[name]]
    return name is not None


@kind
def a_collective_that_the_manifest_leaves_out(artifact: Artifact, nth: int) -> bool:
    """The manifest's list of collectives is short of one."""
    place = at(range(len(artifact.manifest.collectives)), nth)
    if place is not None:
        del artifact.manifest.collectives[place]
    return place is not None


@kind
def another_sharding_claimed(artifact: Artifact, nth: int) -> bool:
    """A value claims another sharding than it has."""

    def where(node: Any) -> bool:
        said = read_claim(node).sharding or ()
        return (
            len(said) == 1
            and read_claim(node).parts is None
            and _other_text(said[0], len(shape(node))) not in (None, said[0])
        )

    site = at([s for s in artifact.each(where) if all("getitem" not in str(n.target) for n in s)], nth)
    for node in site or ():
        claim(node)["sharding"] = [_other_text(read_claim(node).sharding[0], len(shape(node)))]  # type: ignore[list-item]
    return site is not None


@kind
def no_claim(artifact: Artifact, nth: int) -> bool:
    """A call says nothing of itself."""
    site = at(artifact.each(lambda n: bool(read_claim(n).sharding) and "getitem" not in str(n.target)), nth)
    for node in site or ():
        node.meta["custom"] = {}
    return site is not None


@kind
def two_changes_of_one_name(artifact: Artifact, nth: int) -> bool:
    """The collective of one change says that it belongs to the one before."""
    starts = artifact.each(edit.is_collective)
    pairs = list(itertools.pairwise(starts))
    pair = at(pairs, nth)
    for one, two in zip(*pair, strict=True) if pair else ():
        claim(two)["reshard"] = region(one) or ""
    return pair is not None


@kind
def another_change_claimed(artifact: Artifact, nth: int) -> bool:
    """A change says that it starts from what it ends with."""
    site = at(
        artifact.each(
            lambda n: (
                read_claim(n).reshard is not None
                and read_claim(n).sharding is not None
                and "getitem" not in str(n.target)
            )
        ),
        nth,
    )
    for node in site or ():
        after = str(read_claim(node).change).partition(" -> ")[2]
        claim(node)["change"] = f"{after} -> {after}"
    return site is not None


@kind
def outputs_under_each_others_name(artifact: Artifact, nth: int) -> bool:
    """Two outputs in a dict have each other's key, on all ranks."""
    signatures = [program.module_call_graph[0].signature for program in artifact.ranks]
    if nth or any(s is None or s.out_spec.type is not dict or s.out_spec.num_children < 2 for s in signatures):
        return False
    for signature in filter(None, signatures):
        spec = signature.out_spec
        keys = [spec.context[1], spec.context[0], *spec.context[2:]]
        signature.out_spec = type(spec)(dict, keys, [spec.child(i) for i in range(spec.num_children)])
    return True


@kind
def inputs_under_each_others_name(artifact: Artifact, nth: int) -> bool:
    """Two keyword arguments have each other's name, on all ranks."""
    signatures = [program.module_call_graph[0].signature for program in artifact.ranks]
    if nth or any(s is None or s.in_spec.child(1).num_children < 2 for s in signatures):
        return False
    for signature in filter(None, signatures):
        spec = signature.in_spec
        named = spec.child(1)
        keys = [named.context[1], named.context[0], *named.context[2:]]
        swapped = type(spec)(dict, keys, [named.child(i) for i in range(named.num_children)])
        signature.in_spec = type(spec)(spec.type, spec.context, [spec.child(0), swapped])
    return True
