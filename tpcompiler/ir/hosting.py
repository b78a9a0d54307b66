"""The programs of several ranks as one, for a process that runs them all: so 8 ranks fit on 8, 4, 2 processes, or one.

Every op runs as on its own rank, by the same kernel on the same shapes, and rounds alike. What ranks compute alike is
computed once. A reduction follows one binary tree over the ranks of its group, whatever processes run them. So all
outputs have the same bits on any number of processes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tpcompiler._torch import (
    LEAF_KINDS,
    RETURNED_KINDS,
    FakeTensor,
    aten,
    c10d_functional,
    guards_of,
    guards_on,
    input_values,
    set_guards,
    sym_hint,
    tree_flatten,
    tree_names,
    tree_unflatten,
)
from tpcompiler.errors import InternalError, MeshError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.backward import starts_backward
from tpcompiler.ir.control_flow import all_calls, copy_with_bodies
from tpcompiler.ir.draws import draws
from tpcompiler.ir.exported import copy_signature, rebuilt
from tpcompiler.ir.local import fake_mode_of, no_new_guards
from tpcompiler.ir.mesh import Mesh, groups_named, hosted_group
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import NEUTRAL

T = TypeVar("T")
Shape = Sequence[Any]  # sizes, which may be symbolic
Calls = Sequence[Sequence[Any]]  # the arguments of a collective of each rank
Box = Sequence[tuple[str, int]]  # the number of positions along each axis
Ranks = Sequence[tuple[ExportedProgram, Mapping[str, Any]]]  # each rank's program, and its tensors by name
PAIRS = {
    "sum": aten.add.Tensor,
    "avg": aten.add.Tensor,
    "product": aten.mul.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}


@dataclass(frozen=True)
class Hosts:
    """The processes that run the ranks of a mesh, each as many in a row.

    Raises:
        MeshError: the ranks of a process are no box of the mesh, so that processes would run different collectives.
    """

    mesh: Mesh
    processes: int

    def __post_init__(self) -> None:
        ranks = self.mesh.world_size
        if _box(self.mesh, self.processes) is None:
            able = [number for number in range(1, ranks + 1) if _box(self.mesh, number) is not None]
            raise MeshError(
                f"{self.processes} processes cannot run the {ranks} ranks of {self.mesh}, as many ranks each",
                help=f"start {', '.join(map(str, able[:-1]))}{' or ' * (len(able) > 1)}{able[-1]}",
            )

    @property
    def each(self) -> int:
        """The number of ranks of a process."""
        return self.mesh.world_size // self.processes

    def ranks(self, process: int) -> range:
        return range(process * self.each, (process + 1) * self.each)

    @property
    def degrees(self) -> dict[str, int]:
        """The mesh of processes: the number of them along each axis."""
        counts = dict(self.box)
        return {
            axis: degree // math.prod(counts[part] for part in self.mesh.parts_of(axis))
            for axis, degree in self.mesh.axes
        }

    @cached_property
    def box(self) -> Box:
        """The number of positions that a process has along each axis."""
        found = _box(self.mesh, self.processes)
        assert found is not None
        return found


def _box(mesh: Mesh, processes: int) -> Box | None:
    left, odd = divmod(mesh.world_size, max(processes, 1))
    box = []
    for axis, degree in reversed(mesh.parts):
        count = math.gcd(left, degree)
        if processes < 1 or odd or count < min(left, degree):
            return None
        left //= count
        box.append((axis, count))
    return tuple(reversed(box))


class _Group(NamedTuple):
    """A group of ranks of which this process runs some."""

    name: str  # of the processes
    size: int  # ranks
    own: Sequence[int]  # places of this process's in its list of ranks
    processes: int


def name_leaves(
    hosts: Hosts, process: int, leaves: Iterable[str], shardings: Mapping[str, Sharding]
) -> list[dict[str, str]]:
    """Return for each rank of a process the name under which the process holds the rank's share of each leaf.

    The first share has the leaf's own name, others are `rank_3.name`. Ranks at one place along the axes of the leaf
    have the same; without a sharding, each has its own.

    Raises:
        UnsupportedError: two tensors would have one name.
    """
    names: list[dict[str, str]] = [{} for _ in range(hosts.each)]
    taken = dict[str, str]()
    for leaf in leaves:
        sharding, shares = shardings.get(leaf), dict[Any, str]()
        for own, rank in zip(names, hosts.ranks(process), strict=True):
            here = hosts.mesh.coordinate(rank)
            place = rank if sharding is None else tuple(here[axis] for axis in sorted(sharding.axes))
            name = own[leaf] = shares.setdefault(place, f"rank_{rank}.{leaf}" if shares else leaf)
            if taken.setdefault(name, leaf) != leaf:
                raise UnsupportedError(f"two tensors would be called {name!r}", help="rename that module")
    return names


def host_ranks(ranks: Ranks, hosts: Hosts, process: int, shardings: Mapping[str, Sharding]) -> ExportedProgram:
    """Return the program that a process runs in place of its ranks' programs.

    It takes and returns the shares of its ranks in one, a rank's after the other's; those that ranks share, once. It
    holds each rank's share of a leaf apart, as kernels read it, and returns its gradient (`name_leaves`).

    Args:
        ranks: the programs of `hosts.ranks(process)`, which are unchanged, and tensors, which are not copied.
        shardings: of leaves, inputs, and outputs as `output NAME`.

    Raises:
        UnsupportedError: a collective of a kind that is not known here, or ranks draw different random numbers.
    """
    with no_new_guards(*(program.graph for program, _ in ranks)):
        return _Hosted(ranks, hosts, process, shardings).program()


class _Hosted:
    def __init__(self, ranks: Ranks, hosts: Hosts, process: int, shardings: Mapping[str, Sharding]) -> None:
        graphs = dict[Any, ExportedProgram]()  # of ranks alike, one: their fake values are of one mode
        self.ranks = [(graphs.setdefault(text_of(program), program), tensors) for program, tensors in ranks]
        self.hosts, self.shardings = hosts, shardings
        self.numbers = hosts.ranks(process)
        self.first = ranks[0][0]
        self.signature = copy_signature(self.first.graph_signature)
        self.graph = fx.Graph()
        self.mode = fake_mode_of(self.first.graph)
        self.values: list[dict[fx.Node, Any]] = [{} for _ in ranks]  # what stands for a rank's value
        self.made: dict[Any, fx.Node] = {}
        leaves = [str(spec.target) for spec in self.signature.input_specs if spec.kind in LEAF_KINDS]
        self.names = name_leaves(hosts, process, leaves, shardings)
        self.state: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}
        self.cut_inputs = set[str]()

    def program(self) -> ExportedProgram:
        self._take_inputs()
        runs = [self._run(at) for at in range(len(self.ranks))]
        while any(waiting := [next(run, None) for run in runs]):
            self._exchange(waiting)
        self.graph.output(tuple(self._outputs()))
        program = rebuilt(self.first, self.graph, self.signature, self.constants, self.state)
        program.example_inputs = None
        if any(spec.kind is OutputKind.GRADIENT_TO_PARAMETER for spec in self.signature.output_specs):
            program.module_call_graph[0].signature.out_spec = self._out_spec()
        if self.cut_inputs:  # torch's guards are on the sizes of one rank's share
            takes = {node.name for node, spec in edit.placeholders(program) if spec.kind is InputKind.USER_INPUT}
            set_guards(program, guards_on(guards_of(self.first), takes - self.cut_inputs))
        return program

    def _take_inputs(self) -> None:
        self.signature.input_specs.clear()
        for each in zip(*(edit.placeholders(program) for program, _ in self.ranks), strict=True):
            first, spec = each[0]
            nodes = [node for node, _ in each]
            if spec.kind is InputKind.USER_INPUT:
                whole = self._placeholder(first, spec, spec.target)
                parts = self._divide(whole, nodes, self.shardings.get(first.name))
            else:
                parts = self._hold(nodes, spec)
            for values, node, part in zip(self.values, nodes, parts, strict=True):
                values[node] = part

    def _placeholder(self, like: fx.Node, spec: Any, target: str | None) -> fx.Node:
        node = self.graph.placeholder(like.name)
        if spec.kind is InputKind.USER_INPUT:
            node.name = like.name
        node.target = node.name
        node.meta.update(like.meta)
        arg = dataclasses.replace(spec.arg, name=node.name)
        self.signature.input_specs.append(dataclasses.replace(spec, arg=arg, target=target))
        return node

    def _hold(self, nodes: Sequence[fx.Node], spec: Any) -> Iterator[fx.Node]:
        """Yield what stands for each rank's share of a leaf."""
        shares = dict[str, fx.Node]()
        for node, names, (program, tensors) in zip(nodes, self.names, self.ranks, strict=True):
            name = names[spec.target]
            if name not in shares:
                shares[name] = self._placeholder(node, spec, name)
                (self.state if spec.target in program.state_dict else self.constants)[name] = tensors[spec.target]
            yield shares[name]

    def _divide(self, whole: fx.Node, nodes: Sequence[fx.Node], sharding: Sharding | None) -> Iterator[fx.Node]:
        """Yield each rank's part of an input."""
        parts = [whole for _ in nodes]
        if sharding is not None:
            if any(count > 1 and axis in dict(sharding.partial) for axis, count in self.hosts.box):
                raise UnsupportedError(f"input '{whole.name}' is a pending sum", help="give it whole, or cut")
            shapes = [edit.shape(node) for node in nodes]
            if any(count > 1 and axis in sharding.cut_axes for axis, count in self.hosts.box):
                self.cut_inputs.add(whole.name)
                like, shape = edit.fake(whole), join_shapes(shapes, sharding, self.hosts.box)
                with self.mode:
                    edit.record(whole, torch.empty(tuple(shape), dtype=like.dtype, device=like.device))
            parts = split_shares(whole, sharding, self.hosts.box, shapes, self._split, lambda part, op: part)
        for part in parts:
            yield part if part is whole else self._call(aten.contiguous.default, part)

    def _split(self, value: fx.Node, dim: int, sizes: Sequence[Any]) -> list[fx.Node]:
        if not all(isinstance(size, int) for size in sizes):  # dynamic shares are even
            pieces = self._call(aten.unflatten.int, value, dim, [len(sizes), -1])
            return [self._call(aten.select.int, pieces, dim, at) for at in range(len(sizes))]
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        return [
            self._call(aten.slice.Tensor, value, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)
        ]

    def _run(self, at: int) -> Iterator[fx.Node]:
        """Do what a rank's program does; yield its collectives, which all ranks of this process reach together."""
        program, values = self.ranks[at][0], self.values[at]
        for node in program.graph.nodes:
            if node.op == "get_attr":
                values[node] = self._body(node, program)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                if edit.is_collective(node):
                    yield node
                elif edit.is_wait(node):
                    values[node] = args[0]
                elif node.target is operator.getitem and isinstance(args[0], list):
                    values[node] = args[0][args[1]]
                else:
                    values[node] = self._repeat(node, args, kwargs)

    def _repeat(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """Return the call of a rank's op; one call for ranks that have the same operands."""
        key = node.name, str(node.target), repr(args), repr(kwargs)
        if key not in self.made:
            if draws(node) and (node.name, str(node.target)) in self.made:
                raise UnsupportedError(
                    f"'{node.name}' ({node.target}) draws random numbers for each rank apart",
                    help="load it on as many processes as it has ranks, without same_bits",
                )
            call = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
            call.meta.update(node.meta)
            self.made[key] = self.made[node.name, str(node.target)] = call
        return self.made[key]

    def _body(self, node: fx.Node, program: ExportedProgram) -> fx.Node:
        body = program.graph_module.get_submodule(str(node.target))
        if isinstance(body, fx.GraphModule):
            if any(map(edit.is_collective, all_calls(copy_with_bodies(body)))):
                raise UnsupportedError(f"'{node.name}' has collectives in its body", help="load it without same_bits")
        key = node.name, _text_of_body(body)
        if key not in self.made:
            name = f"{node.target}_{len(self.made)}" if (node.name,) in self.made else str(node.target)
            self.made[key] = self.made[(node.name,)] = self.graph.get_attr(name)
            edit.record(self.made[key], body)
        return self.made[key]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        key = str(target), repr(args)
        if key not in self.made:
            call = self.made[key] = self.graph.call_function(target, args)
            fakes = fx.node.map_arg(args, lambda node: self._in_one_mode(edit.fake(node)))
            with self.mode, torch.no_grad():
                edit.record(call, target(*fakes))
        return self.made[key]

    def _in_one_mode(self, value: Any) -> Any:
        """Return a fake value of ranks that run another graph in this one's mode, its sizes as in the example."""
        if isinstance(value, FakeTensor) and value.fake_mode is not self.mode:
            with self.mode:
                sizes = [sym_hint(size) for size in value.shape]
                return torch.empty(sizes, dtype=value.dtype, device=value.device)
        return value

    def _exchange(self, waiting: Sequence[fx.Node | None]) -> None:
        """Run a collective that all ranks of this process have reached, in each of their groups."""
        nodes = [node for node in waiting if node is not None]
        first = nodes[0]
        if len(nodes) < len(waiting) or len({(node.target, str(node.args[-1])) for node in nodes}) > 1:
            raise InternalError(f"the ranks of a process are not all at '{first.name}'", help="report this")
        kind, name = str(first.target).split(".")[1], str(first.args[-1])
        known = {
            "all_reduce": self._all_reduce,
            "all_reduce_coalesced": self._all_reduce_each,
            "all_gather_into_tensor": self._all_gather,
            "reduce_scatter_tensor": self._reduce_scatter,
            "all_to_all_single": self._all_to_all,
        }
        if kind not in known:
            raise UnsupportedError(f"'{first.name}': ranks of one process cannot do {kind}", help="report this")
        for group in self._groups(name):
            own = [(nodes[at], self.values[at]) for at in group.own]
            args = [fx.node.map_arg(node.args, values.__getitem__) for node, values in own]
            for (node, values), result in zip(own, known[kind](args, group), strict=True):
                values[node] = result

    def _groups(self, name: str) -> Iterator[_Group]:
        """Yield the groups of this name that have ranks of this process."""
        for ranks in groups_named(name) or [range(self.hosts.mesh.world_size)]:
            own = [rank - self.numbers.start for rank in ranks if rank in self.numbers]
            if own:
                processes = len({rank // self.hosts.each for rank in ranks})
                if len(own) * processes != len(ranks):
                    raise UnsupportedError(
                        f"the group {list(ranks)} is not of as many ranks of each process", help="report this"
                    )
                yield _Group(hosted_group(name, self.hosts.processes), len(ranks), own, processes)

    def _all_reduce(self, calls: Calls, group: _Group) -> list[Any]:
        op = calls[0][1]
        pieces = self._partial_sums(calls, op, group)
        if group.processes > 1:
            count = group.processes * len(pieces)
            stacked = self._call(aten.stack.default, pieces)
            got = self._wait(c10d_functional.all_gather_into_tensor.default, stacked, group.processes, group.name)
            pieces = [self._call(aten.select.int, got, 0, at) for at in range(count)]
        return [self._reduce(pieces, op, group)] * len(calls)

    def _all_reduce_each(self, calls: Calls, group: _Group) -> list[Any]:
        several = [
            self._all_reduce([(values[at], *rest) for values, *rest in calls], group) for at in range(len(calls[0][0]))
        ]
        return [[*own] for own in zip(*several, strict=True)]

    def _partial_sums(self, calls: Calls, op: str, group: _Group) -> list[fx.Node]:
        """Return what a process sends of its ranks' values: one, if its ranks are a whole subtree."""
        leaves = [self._call(aten.contiguous.default, value) for value, *_ in calls]
        is_subtree = not len(leaves) & (len(leaves) - 1)
        return [self._in_pairs(leaves, op)] if is_subtree or group.processes == 1 else [*leaves]

    def _in_pairs(self, values: Sequence[fx.Node], op: str) -> fx.Node:
        return in_pairs(values, lambda left, right: self._call(PAIRS[op], left, right))

    def _reduce(self, pieces: Sequence[fx.Node], op: str, group: _Group) -> fx.Node:
        result = self._in_pairs(pieces, op)
        return self._call(aten.div.Tensor, result, group.size) if op == "avg" else result

    def _all_gather(self, calls: Calls, group: _Group) -> list[Any]:
        values = [value for value, *_ in calls]
        own = self._call(aten.cat.default, values) if len(values) > 1 else values[0]
        if group.processes > 1:
            own = self._wait(c10d_functional.all_gather_into_tensor.default, own, group.processes, group.name)
        return [own] * len(calls)

    def _reduce_scatter(self, calls: Calls, group: _Group) -> list[Any]:
        op = calls[0][1]
        pieces = self._partial_sums(calls, op, group)
        if group.processes > 1:
            rows = [self._call(aten.unflatten.int, piece, 0, [group.processes, -1]) for piece in pieces]
            stacked = self._call(aten.stack.default, rows, 1)
            ones = [1] * group.processes
            got = self._wait(c10d_functional.all_to_all_single.default, stacked, ones, ones, group.name)
            flat = self._call(aten.flatten.using_ints, got, 0, 1)
            pieces = [self._call(aten.select.int, flat, 0, at) for at in range(group.processes * len(rows))]
        result = self._reduce(pieces, op, group)
        parts = self._call(aten.unflatten.int, result, 0, [len(calls), -1])
        return [
            self._call(aten.contiguous.default, self._call(aten.select.int, parts, 0, at)) for at in range(len(calls))
        ]

    def _all_to_all(self, calls: Calls, group: _Group) -> list[Any]:
        each = group.size // group.processes
        sent = [self._pieces(value, sizes) for value, _, sizes, _ in calls]
        sizes_in, sizes_out = [sizes for _, _, sizes, _ in calls], [sizes for _, sizes, _, _ in calls]
        if group.processes == 1:
            return [self._call(aten.cat.default, [pieces[to] for pieces in sent]) for to in range(len(calls))]
        blocks = [range(start, start + each) for start in range(0, group.size, each)]
        to_send = self._call(aten.cat.default, [own[to] for block in blocks for to in block for own in sent])
        split_in = [self._total([sizes[to] for to in block for sizes in sizes_in]) for block in blocks]
        split_out = [self._total([sizes[of] for sizes in sizes_out for of in block]) for block in blocks]
        got = self._wait(c10d_functional.all_to_all_single.default, to_send, split_out, split_in, group.name)
        pieces = self._pieces(got, [sizes[of] for block in blocks for sizes in sizes_out for of in block])
        rows = _in_rows(pieces, each)  # by process, and then by the rank here that they are for
        return [self._call(aten.cat.default, [piece for row in rows[to::each] for piece in row]) for to in range(each)]

    def _pieces(self, value: fx.Node, sizes: Sequence[Any]) -> list[fx.Node]:
        split = self._call(aten.split_with_sizes.default, value, [*sizes])
        return [self._call(operator.getitem, split, at) for at in range(len(sizes))]

    def _total(self, sizes: Sequence[Any]) -> Any:
        total = sizes[0]
        for size in sizes[1:]:
            numbers = isinstance(total, int) and isinstance(size, int)
            total = total + size if numbers else self._call(operator.add, total, size)
        return total

    def _wait(self, target: Any, *args: Any) -> fx.Node:
        return self._call(c10d_functional.wait_tensor.default, self._call(target, *args))

    def _outputs(self) -> Iterator[Any]:
        specs, self.signature.output_specs = self.signature.output_specs, []
        names = iter(tree_names(self.first.call_spec.out_spec))
        for at, spec in enumerate(specs):
            outs = [program.graph.output_node().args[0][at] for program, _ in self.ranks]
            values = [own[out] if isinstance(out, fx.Node) else out for own, out in zip(self.values, outs, strict=True)]
            if spec.kind in RETURNED_KINDS:
                name = next(names)
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                yield self._return(self._join(values, str(spec.target)), spec, spec.target)
            elif spec.kind in RETURNED_KINDS and spec.kind is not OutputKind.GRADIENT_TO_PARAMETER:
                yield self._return(self._join(values, f"output {name}"), spec, None)
            else:
                shares = dict[str, Any]()
                for held, value in zip(self.names, values, strict=True):
                    shares.setdefault(held[str(spec.target)], value)
                for target, value in shares.items():
                    yield self._return(value, spec, target)

    def _return(self, value: Any, spec: Any, target: str | None) -> Any:
        arg = dataclasses.replace(spec.arg, name=value.name) if isinstance(value, fx.Node) else spec.arg
        self.signature.output_specs.append(dataclasses.replace(spec, arg=arg, target=target))
        return value

    def _out_spec(self) -> Any:
        """Return the pytree of the results, in which every share of a leaf has its gradient.

        Raises:
            UnsupportedError: a backward that starts from the loss of each rank apart.
        """
        found = {tuple(n.name for n in program.graph.nodes if starts_backward(n)) for program, _ in self.ranks}
        if len(found) > 1:
            raise UnsupportedError("the ranks of a process have different backwards", help="load it without same_bits")
        own = self.first.call_spec.out_spec
        tree = tree_unflatten([*range(own.num_leaves)], own)
        gradients = {names[leaf]: 0 for leaf in tree["gradients"] for names in self.names}
        return tree_flatten({key: gradients if key == "gradients" else each for key, each in tree.items()})[1]

    def _join(self, values: Sequence[Any], name: str) -> Any:
        sharding = self.shardings.get(name)
        if sharding is None or len(values) == 1:
            return values[0]
        return join_shares(
            values, sharding, self.hosts.box, lambda own, dim: self._call(aten.cat.default, [*own], dim), self._in_pairs
        )


def join_shares(
    values: Sequence[T],
    sharding: Sharding,
    box: Box,
    cat: Callable[[Sequence[T], int], T],
    reduce: Callable[[Sequence[T], str], T],
) -> T:
    """Return the shares of a process's ranks in one: those that axes cut in a row, pending ones reduced, others once.

    `box` is that of `Hosts`, or the inner axes of one.
    """
    pending = dict(sharding.partial)
    for axis, count in reversed(box):
        rows, dims = _in_rows(values, count), sharding.dims_cut_by(axis)
        if count > 1 and dims:
            values = [cat(own, dims[0]) for own in rows]
        else:
            values = [reduce(own, pending[axis]) if axis in pending else own[0] for own in rows]
    (value,) = values
    return value


def join_tensors(values: Sequence[torch.Tensor], sharding: Sharding, hosts: Hosts) -> torch.Tensor:
    """Return the shares of a process's ranks in one, with the bits that its program gives."""
    return join_shares(
        values, sharding, hosts.box, lambda own, dim: torch.cat([*own], dim), lambda own, op: in_pairs(own, PAIRS[op])
    )


def split_tensor(
    value: torch.Tensor, sharding: Sharding, hosts: Hosts, process: int, shape: Shape
) -> list[torch.Tensor]:
    """Return each rank's part of what a process returns of a tensor of this whole shape; dynamic sizes are even.

    The value of a pending reduction is the first rank's term, as `ir.shares.cut` deals it.
    """
    mesh, counts = hosts.mesh, dict(hosts.box)
    here = [mesh.coordinate(rank) for rank in hosts.ranks(process)]
    dims = list(zip(sharding.dims, shape, value.shape, strict=True))
    even = [got // math.prod(counts[axis] for axis in by.axes) for by, _, got in dims]
    shapes = [
        [
            by.local_size(size, mesh, at) if isinstance(size, int) else other
            for (by, size, _), other in zip(dims, even, strict=True)
        ]
        for at in here
    ]

    def term(part: torch.Tensor, op: str) -> torch.Tensor:
        return torch.full_like(part, NEUTRAL[op]) if op in NEUTRAL else part

    cut = lambda part, dim, sizes: torch.split(part, [*sizes], dim)  # noqa: E731
    return split_shares(value, sharding, hosts.box, shapes, cut, term)


def in_pairs(values: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """Combine neighbours, then the results, and so on."""
    while len(values) > 1:
        values = [combine(*pair) if len(pair) > 1 else pair[0] for pair in _in_rows(values, 2)]
    return values[0]


def join_shapes(shapes: Sequence[Shape], sharding: Sharding, box: Box) -> Shape:
    """Return the shape of what `join_shares` returns for shares of these shapes."""

    def cat(own: Sequence[Shape], dim: int) -> Shape:
        return [sum(shape[dim] for shape in own) if at == dim else size for at, size in enumerate(own[0])]

    return join_shares(shapes, sharding, box, cat, lambda own, op: own[0])


def split_shares(
    value: T,
    sharding: Sharding,
    box: Box,
    shapes: Sequence[Shape],
    split: Callable[[T, int, Shape], Sequence[T]],
    term: Callable[[T, str], T],
) -> list[T]:
    """Return each rank's part of what `join_shares` made of shares of these shapes.

    `term`: what ranks after the first hold of a pending reduction.
    """
    parts, pending = [(value, shapes)], dict(sharding.partial)
    for index, (axis, count) in enumerate(box):
        dims, cut = sharding.dims_cut_by(axis), list[tuple[T, Sequence[Shape]]]()
        for part, own in parts:
            other = term(part, pending[axis]) if axis in pending else part
            rows, pieces = _in_rows(own, len(own) // count), [part] + [other] * (count - 1)
            if count > 1 and dims:
                sizes = [join_shapes(row, sharding, box[index + 1 :])[dims[0]] for row in rows]
                pieces = [*split(part, dims[0], sizes)]
            cut += zip(pieces, rows, strict=True)
        parts = cut
    return [part for part, _ in parts]


def _in_rows(values: Sequence[T], length: int) -> list[Sequence[T]]:
    return [values[start : start + length] for start in range(0, len(values), length)]


def text_of(program: ExportedProgram) -> tuple[Any, ...]:
    """Return a text that programs have in common whose graphs are the same, their sizes and bodies included."""
    bodies = [program.graph_module.get_submodule(str(n.target)) for n in program.graph.find_nodes(op="get_attr")]
    shapes = [str(getattr(value, "shape", value)) for value in input_values(program).values()]
    return str(program.graph), *shapes, *map(_text_of_body, bodies)


def _text_of_body(body: Any) -> str:
    return body.print_readable(print_output=False) if isinstance(body, fx.GraphModule) else str(body)
