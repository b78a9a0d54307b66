"""Decomposition to the ops that the rules read. Only calls that need it are traced, each kind of call once."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

from tpcompiler._torch import (
    WRAPPERS,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    all_tensors,
    aten,
    calls_others,
    declares_view,
    disable_fake_tensor_cache,
    enable_python_dispatcher,
    functional_op,
    is_vmap,
    stays_whole,
    trace_ops,
    tree_flatten,
)
from tpcompiler.frontend.written_back import hidden_bases, memory_of, updates_statistics, without_memory, writes
from tpcompiler.ir import edit
from tpcompiler.ir.draws import DROPOUTS
from tpcompiler.ir.exported import copy_signature, rebuilt
from tpcompiler.ir.local import fake_mode_of, key, same_layout
from tpcompiler.ir.shared_memory import find_shared
from tpcompiler.terminal.progress import counted

Values = dict[fx.Node, Any]
SCATTERS = {  # views, and the ops that put a part back, with the same arguments after it
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}
DENSE = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class NotSimple(Exception):
    """A program that torch has to trace as a whole."""


def decompose_calls(program: ExportedProgram, how: Mapping[Any, Any], table: Mapping[Any, Any]) -> ExportedProgram:
    """Rewrite every call that has to be decomposed (`decomposing` provides the tables), and every call in place.

    Before    y = to(x, float32); z = wrap_with_set_grad_enabled(False, body, y)[0]; z_1 = add_(z, 1); relu(z)
    After     y = _to_copy(x, dtype=float32); z = linear(y, w); z_1 = add(z, 1); relu(z_1)

    Before    row = select(y, 0, i); add_(row, 1); relu(y)
    After     row = select(y, 0, i); z = add(row, 1); y_1 = select_scatter(y, z, 0, i); relu(y_1)

    torch's own decomposition traces the whole program again, which takes 5 to 10 times as long for the same result.

    Raises:
        NotSimple: control flow, torch.vmap, autocast, subclasses, writes to views other than slices, norms in training,
            conjugated views, and decompositions that create tensors or write in place, all of which need torch's own
            decomposition.
    """
    values = all_tensors(program)
    if any(isinstance(value, torch.Tensor) and type(value) not in DENSE for value in values.values()):
        raise NotSimple("a subclass")
    writer = _Simplifier(program, how, table)
    with disable_fake_tensor_cache(writer.mode):  # every call here is of another layout: torch's entries cost more
        return writer.written()


def _trace(node: fx.Node, op: Any, values: Sequence[Any], mode: FakeTensorMode, table: Mapping[Any, Any]) -> fx.Graph:
    """Return the decomposition of a call of `op` with a node's arguments, its inputs having these values.

    Raises:
        NotSimple: it creates tensors, writes in place or has control flow, or an operand is a conjugated view.
    """
    inputs = node.all_input_nodes
    if any(isinstance(v, torch.Tensor) and (v.is_conj() or v.is_neg()) for v in values):
        raise NotSimple(node.name)

    def body(*values: Any) -> Any:
        values_of = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: values_of[used])
        return op(*args, **kwargs)

    with mode, torch.no_grad(), enable_python_dispatcher():
        # A tracer identifies its inputs as objects.
        own = [same_layout(value) if isinstance(value, torch.Tensor) else value for value in values]
        graph = trace_ops(body, *own, table=table)
    for inner in graph.nodes:
        is_op = isinstance(inner.target, OpOverload)
        if inner.op == "get_attr" or (inner.op == "call_function" and is_op and inner.target._schema.is_mutable):
            raise NotSimple(node.name)
        if isinstance(inner.target, HigherOrderOperator) or (is_op and updates_statistics(inner)):
            raise NotSimple(node.name)
    return graph


class _Simplifier:
    def __init__(self, program: ExportedProgram, how: Mapping[Any, Any], table: Mapping[Any, Any]) -> None:
        self.program, self.how, self.table = program, how, table
        self.graph, self.mode = fx.Graph(), fake_mode_of(program.graph)
        self.bodies: dict[Any, fx.Graph] = {}  # the decompositions of calls
        self.sizes: dict[Any, fx.Node] = {}
        self.results: dict[Any, Any] = {}
        self.seen: dict[Any, Any] = {}  # the shapes of results, by call
        self.owners: dict[fx.Node, fx.Node] = {}
        self.given: dict[fx.Node, fx.Node] = {}  # inputs and leaves as they are when the program begins
        self.overwritten: set[fx.Node] = set()
        self.places: dict[fx.Node, set[fx.Node]] = {}  # the nodes that stand for the same tensor
        self.order: dict[fx.Node, int] = {}  # of the calls
        self.memory: dict[fx.Node, set[fx.Node]] = {}  # the owners of the memory that a call's results may share

    def written(self) -> ExportedProgram:
        env: Values = {}
        values = list(self.copy(self.program.graph, self.program.graph_module, env, inside=False))
        signature = copy_signature(self.program.graph_signature)
        targets = {spec.arg.name: spec for spec in signature.input_specs}
        overwritten = [node for node in self.given if node in self.overwritten]
        shared = {name for pair in find_shared(all_tensors(self.program)) for name in pair} if overwritten else ()
        for node in overwritten:
            spec = targets[node.name]
            if spec.kind is not InputKind.BUFFER or spec.target in shared:
                raise NotSimple(node.name)
        user_outputs = [
            dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=value.name))
            if isinstance(value, fx.Node)
            else spec
            for spec, value in zip(signature.output_specs, values, strict=True)
        ]
        signature.output_specs = [
            OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(name=env[node].name), targets[node.name].target)
            for node in overwritten
        ] + user_outputs
        returned = (*(env[node] for node in overwritten), *values)
        output = self.graph.output(returned)
        meta = self.program.graph.output_node().meta
        output.meta = {name: value for name, value in meta.items() if name != "val"}
        return rebuilt(self.program, self.graph, signature)

    def copy(self, graph: fx.Graph, module: torch.nn.Module, env: Values, inside: bool) -> Any:
        """Write a graph's calls; return the graph's results."""
        nodes = list(graph.nodes)
        for node in nodes if inside else counted(nodes, "reading the ops", "ops"):
            if node.op == "output":
                return fx.node.map_arg(node.args[0], lambda used: env[used])
            if node.op == "get_attr":
                env[node] = getattr(module, str(node.target), None)
            elif node.op == "placeholder":
                env.setdefault(node, None)
                if not inside:
                    env[node] = self.given[node] = self.make(node, (), {}, dict(node.meta))
            elif isinstance(node.target, HigherOrderOperator):
                env[node] = self.copy_body(node, env)
            else:
                env[node] = self.call(node, env, inside)
            if node not in self.places:
                self.put(node, next((used for used in node.all_input_nodes if env[used] is env[node]), node))
        raise NotSimple("no output")

    def copy_body(self, node: fx.Node, env: Values) -> Any:
        if node.target not in WRAPPERS:
            raise NotSimple(node.name)
        first = WRAPPERS[node.target]
        body = env[node.args[first - 1]]  # type: ignore[index]
        inner = [each for each in body.graph.nodes if each.op == "placeholder"]
        operands = [env[each] if isinstance(each, fx.Node) else each for each in node.args[first:]]
        return self.copy(body.graph, body, dict(zip(inner, operands, strict=True)), inside=True)

    def call(self, node: fx.Node, env: Values, inside: bool) -> Any:
        operands = {used: env[used] for used in node.all_input_nodes}
        if node.target is operator.getitem and isinstance(env[node.args[0]], (list, tuple)):  # type: ignore[index]
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        if not all(isinstance(value, fx.Node) for value in operands.values()):
            raise NotSimple(node.name)
        if is_vmap(node.target):
            raise NotSimple(node.name)  # what lies between is recorded without the mapped dim
        if not isinstance(node.target, OpOverload):
            return self.keep(node, node.target, env)
        if updates_statistics(node):
            raise NotSimple(node.name)
        if not node.target._schema.is_mutable:
            return self.decompose(node, node.target, env)
        if inside:
            raise NotSimple(node.name)
        return self.overwrite(node, env)

    def overwrite(self, node: fx.Node, env: Values) -> fx.Node:
        """Replace a write in place by a new value of the memory that it writes to, for all later readers.

        A write to a view puts the new part into what it is a view of, and so on up to the owner of the memory.
        """
        op, target = functional_op(node.target), node.args[0]
        if op is None or not isinstance(target, fx.Node):
            raise NotSimple(node.name)
        # The source has the same dtype and layout already (`spell_out`).
        result = env[node.args[1]] if op is aten.copy.default else self.decompose(node, op, env)  # type: ignore[index]
        if not isinstance(result, fx.Node) or _shapes(edit.fake(result)) != _shapes(edit.fake(target)):
            raise NotSimple(node.name)
        owner = target
        while self.places[owner].isdisjoint(memory := _own_memory(owner)):
            view = next((each for each in self.places[owner] if each.target in SCATTERS), None)
            if view is None:
                raise NotSimple(node.name)
            result, owner = self.put_back(node, view, result, env), view.all_input_nodes[0]
        if key(edit.fake(result)) != key(edit.fake(owner)):
            raise NotSimple(node.name)
        names = set(self.places[owner])
        env.update(dict.fromkeys(names, result))
        self.overwritten |= names
        self.put(node, target)
        for view in self.find_views_read_later(node, names, memory, env):
            if writes(view):
                env[view] = env[view.all_input_nodes[0]]
            elif view.target is operator.getitem or _is_always_view(view.target):
                env[view] = self.call(view, env, inside=False)
            else:
                raise NotSimple(node.name)
        return env[target]  # type: ignore[no-any-return]

    def put(self, node: fx.Node, value: fx.Node) -> None:
        """Record that a node stands for the same tensor as another, or for a new one."""
        self.order[node] = len(self.order)
        self.places[node] = self.places.get(value, set())
        self.places[node].add(node)

    def put_back(self, node: fx.Node, view: fx.Node, part: fx.Node, env: Values) -> fx.Node:
        """Return what this is a view of, with another part in its place."""
        base = view.all_input_nodes[0]
        if key(edit.fake(view)) == key(edit.fake(base)):  # a slice of everything
            return part
        (whole, *place), kwargs = fx.node.map_arg((view.args, dict(view.kwargs)), lambda used: env[used])
        op, args = SCATTERS[view.target], (whole, part, *place)
        return self.make(node, args, kwargs, {**node.meta, "val": self.run(base, op, args, kwargs)}, op)

    def find_views_read_later(
        self, node: fx.Node, names: Set[fx.Node], memory: Set[fx.Node], env: Values
    ) -> list[fx.Node]:
        """Return the views of memory that are read after this write, each after those that it is a view of."""
        found, known = list(names), set(names)
        for each in found:  # it grows
            own = memory | {each, self.owner_of(each)}
            shares = (user for user in each.users if user in env and self.may_share(user, own, env))
            found += [user for user in shares if user not in known]
            known.update(found)
        late = {node} if node.users else set()
        order = sorted(found, key=self.order.__getitem__)
        for each in reversed(order):
            if any(user in late or (user not in env and user is not node) for user in each.users):
                late.add(each)
        return [each for each in order if each in late and each not in names]

    def owner_of(self, value: fx.Node) -> fx.Node:
        if value not in self.owners:
            self.owners[value] = memory_of(value)
        return self.owners[value]

    def may_share(self, value: fx.Node, memory: Set[fx.Node], env: Values) -> bool:
        """Return True if a call's result is, or may be, in this memory."""
        if value.op != "call_function":
            return False
        if not isinstance(value.target, HigherOrderOperator):
            if value not in self.memory:
                self.memory[value] = {self.owner_of(each) for each in (value, *hidden_bases(value))}
            return not memory.isdisjoint(self.memory[value])
        first = WRAPPERS[value.target]
        body: fx.Graph = env[value.args[first - 1]].graph  # type: ignore[index]
        inner = (node for node in body.nodes if node.op == "placeholder")
        inputs = {given for given, operand in zip(inner, value.args[first:], strict=True) if operand in memory}
        return any(user.op == "output" or self.may_share(user, inputs, env) for given in inputs for user in given.users)

    def decompose(self, node: fx.Node, op: Any, env: Values) -> Any:
        if isinstance(op, OpOverload) and op.overloadpacket in DROPOUTS and _drops_nothing(node):
            return env[node.all_input_nodes[0]]
        op = aten.clone.default if op is aten.lift_fresh_copy.default else op  # a constant is already a fresh copy
        if stays_whole(op, self.how, self.table):
            return self.keep(node, op, env)
        if node.meta.get("unbacked_bindings"):
            if op is aten.item.default:
                return self.keep(node, aten._local_scalar_dense.default, env)
            raise NotSimple(node.name)  # a new trace would rename data-dependent sizes
        number = {used: at for at, used in enumerate(node.all_input_nodes)}
        operands = [env[used] for used in number]
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: ("node", number[used]))
        call = op, key(args), key(operands)
        if call not in self.bodies:
            self.bodies[call] = _trace(node, op, list(map(edit.fake, operands)), self.mode, self.table)
        body = self.bodies[call]
        copies: Values = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
        for inner in body.nodes:
            if inner.op == "call_function":
                args, kwargs = fx.node.map_arg((inner.args, dict(inner.kwargs)), lambda used: copies[used])
                copies[inner] = self.make(inner, args, kwargs, {"val": inner.meta.get("val")})
                edit.inherit_meta(copies[inner], node)
        return fx.node.map_arg(body.output_node().args[0], lambda used: copies[used])

    def keep(self, node: fx.Node, op: Any, env: Values) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: env[used])
        meta = dict(node.meta)
        if isinstance(op, OpOverload) and not node.meta.get("unbacked_bindings"):
            # A write has the layout of the view that it writes to, which its functional form need not have.
            is_relaid = node.target is not op and node.target._schema.is_mutable  # type: ignore[union-attr]
            is_relaid |= any(_has_other_layout(used, env[used]) for used in node.all_input_nodes)
            if is_relaid or not self.is_as_recorded(op, args, kwargs, meta.get("val")):
                meta["val"] = self.run(node, op, args, kwargs)
        return self.make(node, args, kwargs, meta, op)

    def is_as_recorded(self, op: OpOverload, args: Any, kwargs: Any, value: Any) -> bool:
        """Return True if tensors on the meta device show that a call takes its operands and gives this result.

        That takes a tenth of the time of fake tensors, but only for tensors of fixed sizes on one device.
        """
        operands = list[fx.Node]()
        fx.node.map_arg((args, kwargs), operands.append)
        tensors = [*(used.meta.get("val") for used in operands), *tree_flatten(value)[0]]
        if not operands or not all(map(_has_fixed_sizes, tensors)) or len({each.device for each in tensors}) > 1:
            return False
        if any(kwargs.get(name) is not None for name in ("device", "layout")):
            return False
        call = op, key(args), key(kwargs)
        if call not in self.seen:
            args, kwargs = fx.node.map_arg((args, kwargs), lambda used: without_memory(used.meta["val"]))
            with contextlib.suppress(Exception), torch.no_grad():  # fake tensors know ops without such a kernel
                self.seen[call] = _shapes(op(*args, **kwargs))
        return bool(self.seen.get(call) == _shapes(value))

    def run(self, node: fx.Node, op: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on fake values, once per layout, to check that it takes them and that sizes satisfy it."""
        call = op, key(args), key(kwargs)
        if call not in self.results:
            args, kwargs = fx.node.map_arg((args, kwargs), lambda used: used.meta.get("val"))
            env = self.mode.shape_env
            try:
                fresh = env.ignore_fresh_unbacked_symbols() if env is not None else contextlib.nullcontext()
                with self.mode, torch.no_grad(), enable_python_dispatcher(), fresh:
                    self.results[call] = op(*args, **kwargs)
            except Exception as error:  # torch's own error is clearer
                raise NotSimple(node.name) from error
        if _shapes(self.results[call]) != _shapes(node.meta.get("val")):
            raise NotSimple(node.name)
        return self.results[call]

    def make(self, node: fx.Node, args: Any, kwargs: Any, meta: dict[str, Any], op: Any = None) -> fx.Node:
        """Create a node like this one, or a call of `op`; return the existing node for a size that already has one."""
        value = meta.get("val")
        size = value.node.expr if isinstance(value, torch.SymInt) else None
        if node.op == "call_function" and size in self.sizes:
            return self.sizes[size]
        name = node.name if op in (None, node.target) else op.overloadpacket.__name__
        created = self.graph.create_node(node.op, node.target if op is None else op, args, kwargs, name=name)
        if node.op == "placeholder":
            created.name = node.name  # fx would rename names in the signature, such as an input called `input`
        created.meta = meta
        if size is not None:
            self.sizes[size] = created
        return created


def _drops_nothing(node: fx.Node) -> bool:
    args = edit.arguments(node)
    return args.train is False or args.p == 0


def _has_other_layout(value: fx.Node, now: fx.Node) -> bool:
    """Return True if a value's replacement has other strides: a decomposition may lay out its result differently."""
    was, is_now = value.meta.get("val"), now.meta.get("val")
    return was is not is_now and key(was) != key(is_now)


def _is_always_view(op: object) -> bool:
    """Return True if every call of an op returns views of its operand; composite ops return copies of some."""
    return isinstance(op, OpOverload) and declares_view(op) and not calls_others(op)


def _own_memory(value: fx.Node) -> set[fx.Node]:
    """Return the owner of a value's memory; of one of several results of an op, also that result."""
    memory = {memory_of(value)}
    source = value.args[0] if value.target is operator.getitem else None
    is_result = isinstance(source, fx.Node) and isinstance(source.target, OpOverload) and memory == {source}
    return memory | {value} if is_result else memory


def _has_fixed_sizes(value: Any) -> bool:
    """Return True for a tensor without symbolic sizes; a complex one may have bits that no shape shows."""
    return isinstance(value, torch.Tensor) and not value._has_symbolic_sizes_strides and not value.is_complex()


def _shapes(value: Any) -> Any:
    return [key((v.dtype, *v.shape)) for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]
