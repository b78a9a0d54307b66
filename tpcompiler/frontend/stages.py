"""Cut programs into pipeline stages: programs that run one after the other, each on other ranks.

A cut is a place in the order of the ops. The values that later ops use cross it: a stage returns them, and the stages
that use them take them as inputs. Values of inputs and small constants alone (positions, masks, angles) are computed in
each stage. Cuts are those for which the slowest stage takes least, its received values included: the minimum of a
maximum over contiguous parts (Bokhari, "Partitioning problems in parallel, pipelined, and distributed computing", IEEE
Transactions on Computers 37, 1988), by dynamic programming over the places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from tpcompiler._torch import GRADIENT_KINDS, LEAF_KINDS, check_built, sym_hint, symbols_of, tree_flatten
from tpcompiler.errors import MeshError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.draws import draws
from tpcompiler.ir.exported import rebuilt
from tpcompiler.ir.program import CanonicalProgram, results_of, tied

SMALL = 1 << 16  # elements of a leaf with one dim that every stage may hold
NEVER = float("inf")


@dataclass(frozen=True)
class PipelineStage:
    """A part of a program as a program that takes and returns values by name.

    Attributes:
        receives: its inputs that earlier stages return, by name, with the number of that stage.
        outputs: the outputs of the whole program that it returns.
    """

    program: ExportedProgram
    receives: Mapping[str, int]
    outputs: Sequence[str]


@dataclass(frozen=True)
class Prices:
    """The cost of a stage: seconds of a call by node, seconds of values received, and the most bytes of leaves."""

    seconds: Callable[[fx.Graph], Mapping[str, float]]
    received: Callable[[float], float]
    limit: float


def cut_stages(
    programs: Mapping[str, CanonicalProgram], count: int, prices: Prices, calls: Mapping[str, float]
) -> dict[str, list[PipelineStage]]:
    """Cut programs of one model into `count` stages, each leaf in the same stage of all programs.

    Raises:
        UnsupportedError: a program has gradients, draws random numbers, writes to an input, returns a size or a text.
        MeshError: no places for the cuts, or the leaves of no stages fit the limit.
    """
    orders = {name: _Order(name, program) for name, program in programs.items()}
    places = _common_places(list(orders.values()))
    every = [(order, prices.seconds(order.program.graph), calls.get(name, 1.0)) for name, order in orders.items()]
    sums = [own.sums(seconds, weight) for own, seconds, weight in every]
    crossing = [own.sum_across(prices.received) for own, _, _ in every]

    def cost(before: int, after: int) -> float:
        """Return the seconds of the stage between two places, or infinity."""
        total = 0.0
        for at, (order, _, weight) in enumerate(every):
            first = places[before][at] if before >= 0 else 0
            last = places[after][at] if after < len(places) else len(order.calls)
            if order.held_bytes(first, last) > prices.limit:
                return NEVER
            total += sums[at][last] - sums[at][first]
            total += weight * crossing[at][first] if first else 0.0
        return total

    chosen = _least_maximum(cost, len(places), count)
    if chosen is None:
        raise MeshError(
            f"{', '.join(programs)} cannot be cut into {count} stages: there are {len(places)} places for a cut"
            + (f", and a rank may hold {prices.limit:,.0f} bytes" if prices.limit < NEVER else ""),
            help="use fewer stages, or more memory" if len(places) >= count - 1 else _fewer_stages(len(places) + 1),
        )
    return {name: order.cut([places[place][at] for place in chosen]) for at, (name, order) in enumerate(orders.items())}


def _fewer_stages(most: int) -> str:
    return f"write pp={most}" if most > 1 else "leave pp out of the mesh"


def _least_maximum(cost: Callable[[int, int], float], count: int, stages: int) -> list[int] | None:
    """Return the places of the cuts with the least maximum of the costs between them; None if there is no way."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {-1: (0.0, 0.0, ())}
    for stage in range(stages):
        ends = [count] if stage == stages - 1 else range(count)
        found = dict[int, tuple[float, float, tuple[int, ...]]]()
        for end in ends:
            for start, (most, total, way) in best.items():
                if start < end and (own := cost(start, end)) < NEVER:
                    made = max(most, own), total + own, (*way, end)
                    found[end] = min(found.get(end, made), made)
        best = found
    return list(best[count][2][:-1]) if count in best else None


def _common_places(orders: Sequence[_Order]) -> list[tuple[int, ...]]:
    """Return the places that put every leaf into the same stage of all programs, as a position in each."""
    first, *rest = orders
    of_others = frozenset[str]().union(*(order.leaf_names for order in rest)) if rest else first.leaf_names
    found: list[tuple[int, ...]] = [(at,) for at in first.find_places([first.leaf_names & of_others]).values()]
    for number, order in enumerate(rest, 1):
        shared = [order.leaf_names & earlier.leaf_names for earlier in orders[:number]]
        places, longer = order.find_places(shared), list[tuple[int, ...]]()
        for ats in found:
            split = tuple(each.split(at, own) for each, at, own in zip(orders, ats, shared, strict=False))
            longer += [(*ats, places[split])] if split in places else []
        found = longer
    return sorted(found)


def _refuse_uncut(name: str, program: CanonicalProgram) -> None:
    """Raise UnsupportedError for a program that cannot be cut into stages."""
    whole = "leave pp out of the mesh"
    if any(spec.kind in GRADIENT_KINDS for spec in program.source.graph_signature.output_specs):
        raise UnsupportedError(f"{name} has gradients, and stages have none", help=whole)
    if drawing := [node.name for node in edit.calls(program.graph) if draws(node)]:
        raise UnsupportedError(
            f"{name} draws random numbers ({drawing[0]!r}), and each stage would draw others",
            help=f"export the model in eval mode, or {whole}",
        )
    leaves = {fqn for _, fqn in program.leaves()}
    if given := [target for _, target in program.mutations() if target not in leaves]:
        raise UnsupportedError(
            f"{name} writes to its input {given[0]!r}, which all stages take", help=f"make it a buffer, or {whole}"
        )
    for key, value in results_of(program).items():
        if isinstance(value, fx.Node) and not edit.is_tensor(value):
            raise UnsupportedError(f"{name} returns the size {key!r}", help=f"return tensors, or {whole}")
        if isinstance(value, str):
            raise UnsupportedError(
                f"output '{key}' is the text {value!r}, which no stage returns", help="return tensors and numbers only"
            )


class _Order:
    """The ops of a program in order, and what crosses each place between two of them."""

    def __init__(self, name: str, program: CanonicalProgram) -> None:
        self.program, self.graph = program, program.graph
        _refuse_uncut(name, program)
        self.leaves = dict(program.leaves())
        self.written = {target for _, target in program.mutations()}
        self.inputs = dict(program.inputs())
        self.free = self._find_free()
        self.calls = self._order_calls()
        self.at = {node: at for at, node in enumerate(self.calls)}

    def _find_free(self) -> set[fx.Node]:
        """Return the calls that every stage may make: of inputs and small constants alone."""
        free: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                name = self.leaves.get(node, node.name)
                value = node.meta.get("val")
                is_small = isinstance(value, torch.Tensor) and value.ndim <= 1 and sym_hint(value.numel()) <= SMALL
                if name not in self.written and (node not in self.leaves or is_small):
                    free.add(node)
            elif node.op == "call_function" and free.issuperset(node.all_input_nodes):
                free.add(node)
        return free

    def _order_calls(self) -> list[fx.Node]:
        """Return the calls in order, each write to a leaf directly behind what it needs: an export may put it last."""
        calls = [node for node in edit.calls(self.graph) if node not in self.free]
        at, writes = {node: at for at, node in enumerate(calls)}, {value for value, _ in self.program.written()}

        def place(node: fx.Node) -> tuple[int, int]:
            needs = [at[operand] for operand in node.all_input_nodes if operand in at] if node in writes else []
            return max(needs, default=at[node]), at[node]

        return sorted(calls, key=place)

    @cached_property
    def leaf_names(self) -> frozenset[str]:
        """The leaves that ops use."""
        return frozenset(fqn for node, fqn in self.leaves.items() if node in self.used)

    @cached_property
    def used(self) -> dict[fx.Node, tuple[int, int]]:
        """The positions of the first and the last call that uses a leaf or an input, or writes it."""
        found = {node: [self.at[user] for user in node.users if user in self.at] for node in self.inputs}
        named = {self.leaves.get(node, node.name): node for node in self.inputs}
        for value, target in self.program.written():
            if value in self.at:
                found[named[target]].append(self.at[value])
        return {node: (min(own), max(own)) for node, own in found.items() if own}

    def split(self, at: int, shared: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return the leaves that ops use before a place, and those that they use after it."""
        used = {fqn: self.used[node] for node, fqn in self.leaves.items() if node in self.used and fqn in shared}
        before, after = (
            frozenset(fqn for fqn, (first, last) in used.items() if (first < at if is_before else last >= at))
            for is_before in (True, False)
        )
        return before, after

    def find_places(self, shared: Sequence[Collection[str]]) -> dict[Any, int]:
        """Return the places by how they split some sets of leaves; of equal splits that with the fewest bytes."""
        by_bytes = sorted(self.places, key=self.bytes_across.__getitem__, reverse=True)
        return {tuple(self.split(at, own) for own in shared): at for at in by_bytes}

    @cached_property
    def last_use(self) -> list[int]:
        """The position of the last call that uses the value of each."""
        return [max((self.at[user] for user in node.users if user in self.at), default=-1) for node in self.calls]

    def sum_across(self, price: Callable[[float], float]) -> list[float]:
        """Return the sum of a price of the bytes of each value that crosses each place; infinite where none can."""
        change, barred = ([zero] * (len(self.calls) + 1) for zero in (0.0, 0))
        for at, (node, last) in enumerate(zip(self.calls, self.last_use, strict=True)):
            if last > at and edit.is_tensor(node):
                value = edit.fake(node)
                own = price(sym_hint(value.numel()) * value.element_size())
                change[at + 1] += own
                change[last + 1] -= own
            elif last > at:
                barred[at + 1] += 1
                barred[last + 1] -= 1
        for node, (first, last) in self.used.items():
            if self.leaves.get(node, node.name) in self.written:
                barred[first + 1] += 1
                barred[last + 1] -= 1
        sums = zip(itertools.accumulate(change), itertools.accumulate(barred), strict=True)
        return [NEVER if bars else max(0.0, total) for total, bars in sums]

    @cached_property
    def bytes_across(self) -> list[float]:
        return self.sum_across(float)

    @cached_property
    def places(self) -> list[int]:
        """The places where no more crosses than at the places next to them."""
        across = [NEVER, *self.bytes_across[1:-1], NEVER]  # nothing crosses the ends
        return [
            at
            for at in range(1, len(self.calls))
            if across[at] < NEVER and across[at] <= min(across[at - 1], across[at + 1])
        ]

    def sums(self, seconds: Mapping[str, float], weight: float) -> list[float]:
        """Return the seconds of the calls up to each place."""
        total = [0.0]
        for node in self.calls:
            total.append(total[-1] + weight * seconds.get(node.name, 0.0))
        return total

    def held_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the leaves that the calls between two places use."""
        return sum(size for (first, last), size in self.leaf_bytes if first < stop and last >= start)

    @cached_property
    def leaf_bytes(self) -> list[tuple[tuple[int, int], int]]:
        leaves = ((node, edit.fake(node)) for node in self.used if node in self.leaves)
        return [(self.used[node], value.numel() * value.element_size()) for node, value in leaves]

    def cut(self, places: Sequence[int]) -> list[PipelineStage]:
        """Cut the program at these places."""
        bounds = [0, *places, len(self.calls)]
        stages = {
            node: stage
            for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
            for node in self.calls[start:stop]
        }
        return [_StageWriter(self, stages, stage).written() for stage in range(len(places) + 1)]


class _StageWriter:
    """The program of one stage."""

    def __init__(self, order: _Order, stages: Mapping[fx.Node, int], stage: int) -> None:
        """`stages`: of each call that is not free."""
        self.order, self.stages, self.stage = order, stages, stage
        self.own = [node for node in order.calls if stages[node] == stage]
        self.graph, self.env = fx.Graph(), dict[fx.Node, fx.Node]()

    def written(self) -> PipelineStage:
        source = self.order.program.source
        kept, outputs = self._find_results()
        sent = {node.name: node for node in self.own if any(self.stages.get(u, 0) > self.stage for u in node.users)}
        returned = {**outputs, **sent}
        ended = [*(value for _, _, value in kept), *returned.values()]
        written = [self._input_named(name) for _, name, _ in kept]  # also where nothing reads the old value
        needed, received = self._find_needed([*self.own, *written, *ended])
        first_of = tied(self.order.program)  # a checkpoint may know a tied weight by any of its names
        held = {first_of[node.name] for node in needed if node in self.order.leaves}
        needed |= {node for node in self.order.leaves if first_of[node.name] in held}
        specs = []
        for node, spec in self.order.inputs.items():
            if node in needed:
                self.env[node] = edit.copy_node(self.graph, node, self.env)
                specs.append(spec)
        for node in received:
            self.env[node] = edit.add_input(self.graph, node.name)
            self.env[node].meta["val"] = node.meta["val"]
            specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None))
        for node in self.order.graph.nodes:
            if node.op in ("get_attr", "call_function") and node in needed:
                self.env[node] = edit.copy_node(self.graph, node, self.env)
                edit.allow_copy(self.env[node])  # a view may rely on the memory order of a kernel's fake result
        results = [self.env[value] for value in ended]
        self.graph.output(tuple(results))
        kinds = [*((kind, name) for kind, name, _ in kept), *((OutputKind.USER_OUTPUT, None) for _ in returned)]
        ends = [
            OutputSpec(kind, TensorArgument(name=value.name), name)
            for (kind, name), value in zip(kinds, results, strict=True)
        ]
        held = {str(spec.target) for spec in specs if spec.kind in LEAF_KINDS}
        symbols = symbols_of(node.meta.get("val") for node in self.graph.nodes)
        program = rebuilt(
            source,
            self.graph,
            ExportGraphSignature(specs, ends),
            {name: value for name, value in source.constants.items() if name in held},
            {name: value for name, value in source.state_dict.items() if name in held},
            {symbol: bounds for symbol, bounds in source.range_constraints.items() if symbol in symbols},
        )
        takes = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
        _describe(program, takes, list(returned))
        check_built(program, takes)
        return PipelineStage(program, {node.name: self.stages[node] for node in received}, list(outputs))

    def _find_results(self) -> tuple[list[tuple[OutputKind, str, Any]], dict[str, Any]]:
        """Return the values that the stage writes back, and the outputs of the model that it returns, by name."""
        kept, outputs = list[tuple[OutputKind, str, Any]](), dict[str, Any]()
        names = iter(self.order.program.output_names())
        values: Any = self.order.graph.output_node().args[0]
        for value, spec in zip(values, self.order.program.source.graph_signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                name = next(names)
                if isinstance(value, fx.Node) and self._stage_of_returned(value) == self.stage:
                    outputs[name] = value
            elif self._stage_of_written(value, str(spec.target)) == self.stage:
                kept.append((spec.kind, str(spec.target), value))
        return kept, outputs

    def _stage_of_returned(self, value: fx.Node) -> int:
        """Return the stage that makes a value, or uses a leaf first; the last for what every stage may make."""
        users = value.users if value in self.order.leaves else ()
        return next((self.stages[node] for node in (value, *users) if node in self.stages), max(self.stages.values()))

    def _stage_of_written(self, value: fx.Node, name: str) -> int:
        """Return the stage that uses a leaf or an input that is written, or makes its new value."""
        users = (*self._input_named(name).users, value)
        return next((self.stages[user] for user in users if user in self.stages), 0)

    def _input_named(self, name: str) -> fx.Node:
        return next(each for each in self.order.inputs if self.order.leaves.get(each, each.name) == name)

    def _find_needed(self, roots: Sequence[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
        """Return the nodes that make these values in this stage, and those that earlier stages make for it."""
        needed, received, waiting = set[fx.Node](), dict[fx.Node, None](), list(roots)
        while waiting:
            node = waiting.pop()
            if self.stages.get(node, self.stage) != self.stage:
                received[node] = None
            elif node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        return needed, sorted(received, key=self.order.at.__getitem__)


def _describe(program: ExportedProgram, takes: Sequence[str], returns: Sequence[str]) -> None:
    """Say that the program takes and returns values by name."""
    root = next(each.signature for each in program.module_call_graph if each.fqn == "")
    assert root is not None
    root.in_spec = tree_flatten(((), dict.fromkeys(takes, 0)))[1]
    root.out_spec = tree_flatten(dict.fromkeys(returns, 0))[1]
    root.inputs, root.outputs, root.forward_arg_names = [], [], list(takes)
    program.example_inputs = None
