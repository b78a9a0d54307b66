"""Fold a rank's program back into the single-device program that it claims to be a share of."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from tpcompiler._torch import FakeTensorMode, OpOverload, aten, enable_python_dispatcher, symbols_of
from tpcompiler.errors import TpCompilerError, reason
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import all_calls, copy_with_bodies, read_bodies
from tpcompiler.ir.exported import rebuilt
from tpcompiler.ir.local import fake_mode_of, key, local_strides, no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import NO_CLAIM, Claim, claims_of, read_call
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import read_sharding
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.ir.text import dtype_name
from tpcompiler.judge.sound.drawn import DrawnSizes
from tpcompiler.judge.sound.region import Numbers, ProgramRegion, find_numbers, find_regions
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.rules.index_range import Ranges
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import CallRecord

LAYOUT = (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten.sym_storage_offset.default)
# One op, except that some must copy: the layout of values in memory may differ between ranks.
Shardings = tuple[Sharding, ...]
Results = dict[Any, Any]


@dataclass
class Folded:
    """The whole program, and the node in it for each node of the rank's graph.

    Attributes:
        claims: what the nodes of the rank's graph claim.
        graph: the single-device program; `meta["val"]` of its nodes are whole values.
        whole: node of the rank's graph -> node of `graph`; none inside a region.
        shardings: node of the rank's graph -> a sharding for each of its tensors.
        changed: the end of a change of sharding -> its operand.
        paths: the end of a change of sharding -> the claimed sharding after each step.
        ops: the calls that compute a share of one call on the whole.
        regions: regions by name.
        shard_sizes: the size of a shard as a node -> the factor to the whole's size.
        named: a node with a claimed call -> the nodes of the rank's graph that the call names.
        by_name: the keys of `whole`, by name.
        counts: the count of a data-dependent op -> the names of its sizes.
        results: results of calls, shared by all programs that are checked together.
        sizes: the numbers that replace dynamic sizes.
        numbers: the rank-dependent numbers that the program reads.
        at_door: the ranges of inputs that `load` checks; None if the conversion left such checks out.
    """

    program: ExportedProgram
    mesh: Mesh
    mode: FakeTensorMode
    claims: Mapping[fx.Node, Claim]
    graph: fx.Graph = field(default_factory=fx.Graph)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    shardings: dict[fx.Node, Shardings] = field(default_factory=dict)
    changed: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    paths: dict[fx.Node, Shardings] = field(default_factory=dict)
    ops: list[fx.Node] = field(default_factory=list)
    regions: dict[str, ProgramRegion] = field(default_factory=dict)
    shard_sizes: dict[fx.Node, int] = field(default_factory=dict)
    named: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    by_name: dict[str, fx.Node] = field(default_factory=dict)
    counts: dict[Any, list[Any]] = field(default_factory=dict)
    results: Results = field(default_factory=dict)
    sizes: DrawnSizes = field(default_factory=DrawnSizes)
    numbers: Numbers = field(default_factory=Numbers)
    at_door: Ranges | None = None

    def claim(self, node: fx.Node) -> Claim:
        return self.claims.get(node, NO_CLAIM)

    def plain(self, value: Any) -> Any:
        """Return a size, which may be dynamic, as a number."""
        return self.sizes.plain(value, self.program.range_constraints)

    def run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on fake values; calls with equal layouts of arguments share the result."""
        known = (id(self.mode), target, key(args), key(kwargs))
        sizes = self.mode.shape_env  # may be shared with the user's program
        fresh = sizes.ignore_fresh_unbacked_symbols() if sizes is not None else contextlib.nullcontext()
        if known not in self.results:
            with self.mode, torch.no_grad(), enable_python_dispatcher(), fresh:
                self.results[known] = target(*args, **kwargs)
        return self.results[known]

    def stands_for(self, node: fx.Node, whole: fx.Node) -> None:
        self.whole[node] = whole
        self.by_name[node.name] = node

    @property
    def is_even(self) -> bool:
        """Return True if all ranks have shares of equal size for every value."""
        return all(
            sharding.is_even(value.shape, self.mesh)
            for node, shardings in self.shardings.items()
            for value, sharding in zip(edit.outputs(self.whole[node]), shardings, strict=True)
        )


def folded(program: ExportedProgram, manifest: Manifest, mesh: Mesh, results: Results) -> Folded:
    """Fold the program of one rank.

    Raises:
        Unsound: a node has no claim, a claim is unreadable, or no single-device program could have the node.
    """
    if any(node.op == "get_attr" for node in program.graph.nodes):  # its nodes get bodies, and it is the caller's
        program = rebuilt(program, copy_with_bodies(program.graph_module))
        read_bodies(program.graph, program.graph_module)
    claims = dict(claims_of(program.graph))
    made = Folded(program, mesh, fake_mode_of(program.graph), claims, results=results)
    made.numbers = find_numbers(program, manifest, claims)
    if manifest.asked.check_indices:
        made.at_door = {row.name: (row.values[0], row.values[1]) for row in manifest.inputs if row.values is not None}
    regions = find_regions(claims, made.numbers)
    last = {region.nodes[-1]: region for region in regions.values()}
    inside = {node for region in regions.values() for node in region.nodes} | made.numbers.nodes
    made.regions.update(regions)
    with no_new_guards(program.graph):
        _inputs(made, manifest)
        for node in program.graph.nodes:
            if node.op == "get_attr":
                _fold_body_of_control_flow(made, node)
            elif node.op == "output":
                made.stands_for(node, made.graph.output(_same(made, node)[0][0]))
            elif node.op == "call_function":
                if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                    raise Unsound(node, "changes its operand in place")
                if node in last:
                    _fold_region(made, last[node])
                elif node not in inside:
                    _fold_call(made, node)
    return made


def _fold_body_of_control_flow(made: Folded, node: fx.Node) -> None:
    """Fold a body of control flow: every rank runs it whole, so no collective may be in it."""
    body = edit.fake(node)
    for inner in all_calls(copy_with_bodies(body)):
        if edit.is_collective(inner):
            raise Unsound(inner, f"is a collective inside of '{node.name}', which not all ranks need to run")
    new = made.graph.create_node("get_attr", str(node.target), name=node.name)
    new.meta["val"] = body
    made.stands_for(node, new)


def _inputs(made: Folded, manifest: Manifest) -> None:
    rows = {row.name: row for row in manifest.tensors}
    users = iter(manifest.inputs)
    for node, spec in edit.placeholders(made.program):
        if node in made.numbers.nodes:
            continue
        value = node.meta.get("val")
        if isinstance(spec.arg, ConstantArgument) and (type(value), value) != (type(spec.arg.value), spec.arg.value):
            raise Unsound(node, f"is {value!r}, and the signature says {spec.arg.value!r}")
        new = edit.add_input(made.graph, node.name)
        new.meta["val"] = value
        made.stands_for(node, new)
        if not isinstance(value, torch.Tensor):
            continue
        row = next(users, None) if spec.kind is InputKind.USER_INPUT else rows.get(str(spec.target))
        if row is None:
            raise Unsound(node, "is an input that the manifest does not name")
        sharding = read_claimed(node, row.sharding, made.mesh, value.ndim)
        made.shardings[node] = (sharding,)
        if spec.kind is InputKind.USER_INPUT and row.name != node.name:
            raise Unsound(node, f"is input {row.name!r} by the manifest")
        if len(row.shape) != value.ndim:
            raise Unsound(node, f"has {value.ndim} dims, the manifest says {len(row.shape)}")
        if row.dtype != dtype_name(value.dtype):
            raise Unsound(node, f"is of {dtype_name(value.dtype)}, the manifest says {row.dtype}")
        if not sharding.is_replicated:
            shape = [
                size if isinstance(size, int) else own * made.mesh.size(cut.axes)
                for size, own, cut in zip(row.shape, value.shape, sharding.dims, strict=True)
            ]
            with made.mode:
                strides = local_strides(value, shape)
                new.meta["val"] = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        elif any(isinstance(size, int) and size != own for size, own in zip(row.shape, value.shape, strict=True)):
            raise Unsound(node, f"is {list(value.shape)}, the manifest says {row.shape}")
    if left := next(users, None):
        raise Unsound(None, f"the manifest names an input {left.name!r}, which the program lacks")


def read_claimed(node: fx.Node | None, text: Any, mesh: Mesh, ndim: int) -> Sharding:
    """Return the claimed sharding of a tensor.

    Raises:
        Unsound: the claim cannot be read.
    """
    try:
        return read_sharding(text, mesh, ndim)
    except (TpCompilerError, ValueError, LookupError, AssertionError, TypeError) as error:
        raise Unsound(node, f"claims the sharding {text!r}, which a tensor of {ndim} dims cannot have") from error


def _claimed(made: Folded, node: fx.Node) -> tuple[Claim, Shardings]:
    claim, values = made.claim(node), edit.outputs(node)
    texts = claim.sharding
    if texts is None or len(texts) != len(values):
        raise Unsound(node, f"makes {len(values)} tensors, and claims shardings {texts}")
    return claim, tuple(read_claimed(node, t, made.mesh, v.ndim) for t, v in zip(texts, values, strict=True))


def reads_data(number: fx.Node) -> bool:
    """Return True if a number depends on a tensor's data, and not only on sizes."""
    if isinstance(number.target, OpOverload) and number.target not in LAYOUT:
        return True
    return any(reads_data(used) for used in number.all_input_nodes if not edit.outputs(used))


def _fold_region(made: Folded, region: ProgramRegion) -> None:
    for node in region.inputs:
        if not edit.outputs(node) and node.op == "call_function" and reads_data(node):
            raise Unsound(region.nodes[-1], f"is the end of {region.name}, which uses '{node.name}', read from data")
    if region.name.startswith("reshard"):
        _fold_change(made, region)
    else:
        _fold_body(made, region)


def _fold_change(made: Folded, region: ProgramRegion) -> None:
    operands = [node for node in region.inputs if edit.is_tensor(node)]
    last = region.nodes[-1]
    if len(operands) != 1 or region.outputs != (last,):
        counts = f"{len(operands)} operands and {len(region.outputs)} results"
        raise Unsound(last, f"is the end of {region.name}, which has {counts} where a change has one")
    claim, (target,) = _claimed(made, last)
    ndim = edit.outputs(operands[0])[0].ndim
    states = tuple(read_claimed(last, text, made.mesh, ndim) for text in claim.states or ("none",))
    if (states[0], states[-1]) != (made.shardings[operands[0]][0], target):
        raise Unsound(
            last,
            f"claims to change {claim.change} to {target.text(made.mesh)}, "
            f"and '{operands[0].name}' is {made.shardings[operands[0]][0].text(made.mesh)}",
        )
    made.stands_for(last, made.whole[operands[0]])
    made.shardings[last] = (target,)
    made.changed[last] = operands
    made.paths[last] = states


def _fold_body(made: Folded, region: ProgramRegion) -> None:
    whole: fx.Node | None = None
    for node in region.outputs:
        claim, shardings = _claimed(made, node)
        call = claim.call
        if call is None:
            raise Unsound(node, f"is used outside of {region.name} and does not say what it is a share of")
        if whole is None:
            whole = _whole_call(made, node, *_global(made, node, call), made.graph)
            made.regions[region.name] = replace(region, call=whole)
        index = call.output
        part = whole if index is None else _whole_call(made, node, operator.getitem, (whole, index), {}, made.graph)
        made.stands_for(node, part)
        made.shardings[node] = shardings


def _fold_call(made: Folded, node: fx.Node) -> None:
    if edit.is_collective(node) or edit.is_wait(node):
        raise Unsound(node, "belongs to no change of sharding")
    size, degree = node.args if node.target is operator.mul else (None, None)
    if isinstance(size, fx.Node) and size in made.shard_sizes:
        if made.shard_sizes[size] != degree:
            raise Unsound(node, f"multiplies a shard's size by {degree}, and there are {made.shard_sizes[size]}")
        if not statically_equal(node.meta.get("val"), edit.fake(made.whole[size])):
            raise Unsound(node, f"is {node.meta.get('val')}, and the whole's size {edit.fake(made.whole[size])}")
        made.stands_for(node, made.whole[size])
        return
    values = edit.outputs(node)
    if not values:
        if "val" not in node.meta and (not isinstance(node.target, OpOverload) or node.target._schema.returns):
            raise Unsound(node, "has no recorded value")
        if isinstance(node.target, OpOverload) and node.target is not aten.sym_size.int:
            for used in edit.operands(node):
                if used in made.shardings and not made.shardings[used][0].is_replicated:
                    raise Unsound(node, f"reads '{used.name}', of which it has a share")
        made.stands_for(node, _whole_call(made, node, node.target, *_same(made, node), made.graph))
        if node.target is aten.sym_size.int:
            cut = made.shardings[edit.operands(node)[0]][0].dims[node.args[1]]  # type: ignore[index]
            if cut.axes:
                made.shard_sizes[node] = made.mesh.size(cut.axes)
        return
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        every = edit.fake(_same(made, node)[0][0])
        tensors = [i for i, value in enumerate(every) if isinstance(value, torch.Tensor)]
        made.shardings[node] = (made.shardings[source][tensors.index(index)],)
        made.stands_for(node, _whole_call(made, node, operator.getitem, *_same(made, node), made.graph))
        return
    claim, made.shardings[node] = _claimed(made, node)
    call = claim.call
    if call is not None and not isinstance(node.target, OpOverload):
        raise Unsound(node, f"calls {node.target}, and claims to be a share of another call")
    target, args, kwargs = (node.target, *_same(made, node)) if call is None else _global(made, node, call)
    made.stands_for(node, _whole_call(made, node, target, args, kwargs, made.graph))
    made.ops.append(node)


def _same(made: Folded, node: fx.Node) -> tuple[Any, Any]:
    """Return the node's own arguments, on the whole."""

    def whole(used: fx.Node) -> fx.Node:
        if used in made.shard_sizes:
            raise Unsound(node, f"takes '{used.name}', the size of a shard, for that of the whole")
        if used in made.numbers.nodes:
            raise Unsound(node, f"uses '{used.name}', a number of the rank, outside of a region")
        if used not in made.whole:
            raise Unsound(node, f"uses '{used.name}', which is inside a region")
        return made.whole[used]

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), whole)
    return args, kwargs


def _global(made: Folded, node: fx.Node, call: CallRecord) -> tuple[Any, Any, Any]:
    def value(name: str) -> fx.Node:
        if name not in made.by_name:
            raise ValueError(f"there is no {name!r} before it")
        named_node = made.by_name[name]
        if edit.is_tensor(named_node):
            made.named.setdefault(node, []).append(named_node)
        return made.whole[named_node]

    try:
        return read_call(call, value, edit.outputs(node)[0].device)
    except (ValueError, TypeError) as error:
        raise Unsound(node, f"claims to be a share of a call that cannot be read: {error}") from error


def _whole_call(
    made: Folded, node: fx.Node, target: Any, args: Any, kwargs: Mapping[str, Any], graph: fx.Graph
) -> fx.Node:
    # Values that the model does not have, such as sizes, must not take a name of the model's.
    claim = made.claim(node)
    name = f"own_{node.name}" if claim.origin is None else claim.origin
    new = graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name)
    edit.inherit_meta(new, node)
    used = [other for other in node.all_input_nodes if edit.outputs(other)]
    alike = all(s.is_replicated for n in (node, *used) for s in made.shardings.get(n, ()))
    number = isinstance(node.target, OpOverload) and not edit.outputs(node) and node.target is not aten.sym_size.int
    if number or (alike and edit.outputs(node) and claim.call is None):
        new.meta["val"] = node.meta.get("val")  # equal on every rank and on one device
        return new
    given, named = fx.node.map_arg((new.args, dict(new.kwargs)), lambda n: edit.fake(n))
    try:
        new.meta["val"] = made.run(target, given, named)
    except Exception as error:  # torch raises anything for arguments that do not fit
        raise Unsound(node, f"cannot be run on the whole: {reason(error)}") from error
    value = edit.fake(new)
    if isinstance(value, torch.Tensor) and symbols_of([value]) - symbols_of([given, named]):
        # A data-dependent size has a fresh name here, and keeps the name in the file.
        dims = zip(value.shape, edit.outputs(node)[0].shape, made.shardings[node][0].dims, strict=True)
        with made.mode:
            new.meta["val"] = value.new_empty([size if cut.axes else own for size, own, cut in dims])
    return new
