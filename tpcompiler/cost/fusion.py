"""A model of execution: the ops that form a kernel, and the bytes that pass through memory.

With a compiler, products and attentions are kernels. Any other op fuses with the ops that it exchanges values with, as
long as no path between two of them contains a product, attention or collective; each fused group is one kernel. That is
close to Inductor's greedy fusion, and it depends on the graph alone, so every op has its own price. Views are no
kernels, and neither are ops on sizes and single numbers for ops that fuse, such as the indices of a slice. A look-up
reads as much as it returns, and a write into a buffer moves as much as it writes. A weight that is widened for one
product, such as an int8 weight, is widened in the product's kernel. Only the experts that tokens are expected to choose
are read, if tokens choose all experts equally often.

Without a compiler every op is a kernel that reads its operands and writes its results, and a view takes time too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.machine import DTYPES
from tpcompiler.cost.peak import is_view
from tpcompiler.ir import edit
from tpcompiler.ir.program import pin
from tpcompiler.ir.rank_numbers import rank_number
from tpcompiler.ir.text import op_name
from tpcompiler.rules.experts import BY_BLOCK
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

Floor = Literal["product", "attention", "other", "view", ""]
Part = Literal["weights", "attention", "copies", "other"]  # of a call's time
PARTS: tuple[Part, ...] = ("weights", "attention", "copies", "other")
INDICES = frozenset((torch.int64, torch.int32, torch.bool))
UNCALLED = frozenset(("wait_tensor", "sym_size"))  # these call neither a kernel nor a torch function that takes time
NAMES_OF_VIEWS = UNCALLED | {"_unsafe_view", "_assert_async"}
LOOKUPS = frozenset(("embedding", "gather", "index", "index_select"))
WRITES = frozenset(("index_copy", "index_put", "scatter", "select_scatter", "slice_scatter"))
MOVES = WRITES | {"cat", "clone", "constant_pad_nd", "copy", "flip", "repeat", "reshape", "roll", "stack"}


class Kernel(NamedTuple):
    """An op's part in a kernel.

    Attributes:
        floor: the floor that the op pays; "" if another op pays its kernel's.
        moves: for each operand, then each result, the share that the op reads from memory or writes to it.
        stored: for each of these, True if it is an input or state, False if another kernel just wrote it.
        dtype: the narrow operands of a product (`machine.DTYPES`), which may have other rates.
    """

    floor: Floor
    moves: tuple[float, ...] = ()
    stored: tuple[bool, ...] = ()
    dtype: str = ""


NO_KERNEL = Kernel("")  # for a view, or an op that is part of a product


def find_kernels(graph: fx.Graph, fuses: bool = True) -> dict[fx.Node, Kernel]:
    """Return each op's part in a kernel, for ops that have one; `fuses`: a compiler fuses ops."""
    fusion = _Fusion(graph, fuses)
    return fusion.kernels() if fuses else fusion.calls_alone()


def is_attention(node: fx.Node) -> bool:
    return "scaled_dot_product" in op_name(node)


def part_of(node: fx.Node, kernel: Kernel) -> Part:
    """Return the part of a call's time that an op counts to."""
    if (floor := _floor(node)) == "other":
        return "copies" if op_name(node) in MOVES else "other"
    return "weights" if floor == "product" and (any(kernel.stored) or kernel.dtype) else "attention"


def factors_of_product(node: fx.Node, rule: Rule | None) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the factors of the two operands that an op multiplies and sums over; None for any other op.

    If each row uses one matrix of a stack, the number of matrices counts for neither operand.
    """
    product = _multiplied(node, rule)
    if product is None:
        return None
    ((_, left), (_, right)), dealt = product
    return (left, right - dealt) if dealt & (right - left) else (left, right)


def _multiplied(node: fx.Node, rule: Rule | None) -> tuple[list[tuple[fx.Node, frozenset[str]]], set[str]] | None:
    """Return a product's two operands with their factors, and the factors that indices select from."""
    if rule is None or not rule.reduced or is_attention(node):
        return None
    terms, dealt = list[tuple[fx.Node, frozenset[str]]](), set[str]()
    for at, (term, operand) in enumerate(zip(rule.pattern.inputs, edit.operands(node), strict=True)):
        own = frozenset(factor for dim in term for factor in dim)
        if edit.fake(operand).dtype in INDICES:
            dealt |= own
        elif at not in rule.pattern.addends:
            terms.append((operand, own))
    if len(terms) > 2:  # such as scales of the result
        terms = [(operand, own) for operand, own in terms if own & rule.reduced]
    return None if len(terms) != 2 or not rule.reduced - dealt else (terms, dealt)


def rows_share(node: fx.Node) -> float:
    """Return the share of its rows that an op multiplies, if tokens choose all experts equally often."""
    if node.target is not BY_BLOCK:
        return 1.0
    rows = sym_hint(edit.shape(edit.operands(node)[0])[1])
    return float(math.ceil(rows * edit.arguments(node).used - 1e-6) / max(1, rows))


class _Fusion:
    """The grouping of a graph's ops into kernels."""

    def __init__(self, graph: fx.Graph, fuses: bool) -> None:
        self.calls = list[fx.Node]()  # without views and collectives
        self.source: dict[fx.Node, fx.Node] = {}  # a view -> the value it is a view of
        self.depth: dict[fx.Node, int] = {}  # the number of products, attentions and collectives before an op
        self.parent: dict[fx.Node, fx.Node] = {}  # a union-find forest of ops that fuse
        self.alone: set[fx.Node] = set()
        self.fuses = cache(_fuses)
        self.made_of_sizes = self._find_made_of_sizes(graph) if fuses else set[fx.Node]()
        for node in edit.calls(graph):
            if node not in self.made_of_sizes:
                self._add(node)
        self.users = self._find_users(graph)
        self.widened = dict(self._find_widened())

    def _find_made_of_sizes(self, graph: fx.Graph) -> set[fx.Node]:
        """Return the calls computed from sizes and whole numbers, such as rank numbers, whose users all fuse."""
        computed = set[fx.Node]()
        for node in edit.calls(graph):
            tensors = [operand for operand in node.all_input_nodes if edit.outputs(operand)]
            if node.target is rank_number or (
                self.fuses(node) and all(each in computed or _is_number(each) for each in tensors)
            ):
                computed.add(node)
        for node in reversed(graph.nodes):
            if node in computed and not all(
                user in computed or (user.op != "output" and self.fuses(user)) for user in node.users
            ):
                computed.discard(node)
        return computed

    def _add(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        if _is_view(node) and operands:
            self.source[node] = self.of(operands[0])
            return
        if not edit.is_collective(node):
            self.calls.append(node)
        sources = [self.of(operand) for operand in operands]
        self.depth[node] = max((self.depth.get(s, 0) + (s in self.alone) for s in sources), default=0)
        if not self.fuses(node):
            self.alone.add(node)
            return
        self.parent[node] = node
        for source in sources:
            if source in self.parent and self.depth[source] == self.depth[node]:
                self.parent[self.root(source)] = self.root(node)

    def of(self, value: fx.Node) -> fx.Node:
        """Return the op or placeholder that made the value that `value` is a view of."""
        return self.source.get(value, value)

    def root(self, node: fx.Node) -> fx.Node:
        parent = self.parent
        while parent.get(node, node) is not node:
            parent[node] = parent[parent[node]]  # halves the path, which grows with every op that is added
            node = parent[node]
        return node

    def _find_users(self, graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
        """Return the ops of other kernels, and the output, that use an op's result."""
        users: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            own = self.root(node)
            for operand in () if node in self.source else node.all_input_nodes:
                if self.root(self.of(operand)) is not own:
                    users.setdefault(self.of(operand), set()).add(node)
        return users

    def _find_widened(self) -> Iterator[tuple[fx.Node, tuple[float, torch.dtype]]]:
        """Yield the kernels that compute a single product's operand from placeholders alone.

        With each: the share of the operand's bytes that the kernel reads, and the dtype of the largest placeholder.
        """
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.parent:
            members.setdefault(self.root(node), []).append(node)
        for own, nodes in members.items():
            results = [node for node in nodes if node in self.users]
            inputs = {
                operand
                for node in nodes
                for operand in node.all_input_nodes
                if self.of(operand) not in self.parent and edit.outputs(operand)  # sizes are no operands
            }
            if len(results) != 1 or len(self.users[results[0]]) != 1 or not inputs:
                continue
            (user,) = self.users[results[0]]
            is_product = user in self.alone and _floor(user) == "product"
            share = sum(map(_bytes, inputs)) / max(1, _bytes(results[0]))
            if is_product and share < 1 and all(self.of(operand).op == "placeholder" for operand in inputs):
                yield own, (share, edit.fake(max(inputs, key=_bytes)).dtype)

    def kernels(self) -> dict[fx.Node, Kernel]:
        kernel_of, floors_charged, read = dict[fx.Node, Kernel](), set[fx.Node](), set[tuple[fx.Node, fx.Node]]()
        for node in self.calls:
            own, reads = self.root(node), list[float]()
            if own in self.widened:
                continue
            for operand in edit.operands(node):
                other = self.root(self.of(operand))
                is_computed = other in self.made_of_sizes and not _is_number(other)
                is_read = other is not own and not is_computed and (own, operand) not in read
                read.add((own, operand))
                share, _ = self.widened.get(other, (1.0, None))
                reads.append(share if is_read else 0.0)
            writes = [float(node in self.users)] * len(edit.outputs(node))
            floor = "" if own in floors_charged else "other" if node in self.parent else _floor(node)
            kernel_of[node] = self._kernel(floor, node, _moves(node, reads, writes))
            floors_charged.add(own)
        return kernel_of

    def calls_alone(self) -> dict[fx.Node, Kernel]:
        """Return every op as its own kernel, and every view as a kernel that moves nothing."""
        kernel_of = {node: Kernel("view") for node in self.source if _is_called(node)}
        for node in self.calls:
            kernel_of[node] = self._kernel(_floor(node), node, moves_alone(node))
        return kernel_of

    def _kernel(self, floor: Floor, node: fx.Node, moves: tuple[float, ...]) -> Kernel:
        stored = (*(self.of(o).op == "placeholder" for o in edit.operands(node)), *(False for _ in edit.outputs(node)))
        dtype = self._dtype(node) if floor == "product" else ""
        return Kernel(floor, moves, stored, dtype)

    def _dtype(self, product: fx.Node) -> str:
        """Return the narrow dtype of a product's operands, or of its weights alone."""
        operands, _ = _multiplied(product, rule_of(product)) or ([], set())
        names = []
        for operand, _ in operands:
            widened = self.widened.get(self.root(self.of(operand)))
            dtype = edit.fake(operand).dtype if widened is None else widened[1]
            names.append(next((each for each in DTYPES if str(dtype).startswith(f"torch.{each}")), ""))
        narrow = max(names, default="")
        return narrow if names.count(narrow) == len(names) else f"{narrow}_weights"


def moves_alone(node: fx.Node) -> tuple[float, ...]:
    """Return the share of each operand and result that a call moves in a kernel by itself; a view has none."""
    if _is_view(node) and node.all_input_nodes:
        return ()
    return _moves(node, [1.0] * len(edit.operands(node)), [1.0] * len(edit.outputs(node)))


def _floor(node: fx.Node) -> Floor:
    if is_attention(node):
        return "attention"
    return "other" if factors_of_product(node, rule_of(node)) is None else "product"


def _moves(node: fx.Node, reads: list[float], writes: list[float]) -> tuple[float, ...]:
    """Return the shares of an op, adjusted for look-ups, writes and experts, which touch parts of their operands."""
    name = op_name(node)
    if name in LOOKUPS:
        return (0.0, *reads[1:], *(1 + write for write in writes))
    if name in WRITES:
        return (0.0, *(1 + read for read in reads[1:]), *(0.0 for _ in writes))
    if "grouped_mm" in name and len(reads) == 3:
        reads[0] *= rows_share(node)
        reads[1] *= _share_of_experts(node)
    return (*reads, *writes)


def _is_number(value: fx.Node) -> bool:
    """Return True for one whole number."""
    tensors = edit.outputs(value)
    return len(tensors) == 1 and tensors[0].ndim == 0 and tensors[0].dtype in INDICES


def _share_of_experts(node: fx.Node) -> float:
    """Return the share of matrices that rows are expected to use, if tokens choose all experts equally often.

    In blocks, the share is that of blocks as large as the largest one.
    """
    rows, matrices, ends = edit.operands(node)
    if edit.ndim(matrices) != 3:
        return 1.0
    blocks = sym_hint(edit.shape(rows)[0]) if node.target is BY_BLOCK else 1
    count = blocks * rows_share(node) * sym_hint(edit.shape(rows)[-2])
    experts = sym_hint(edit.shape(matrices)[0])
    each = min(_chosen_by_token(ends), experts)
    return float(1 - (1 - each / experts) ** (count / each))


def _chosen_by_token(ends: fx.Node) -> int:
    """Return how many experts a token uses: k of the nearest topk that the groups' ends depend on, or 1."""
    topk = next((node for node in edit.nodes_behind([ends]) if op_name(node) == "topk"), None)
    return int(edit.arguments(topk).k) if topk is not None else 1


def _bytes(value: fx.Node) -> int:
    return sum(sym_hint(tensor.numel()) * tensor.element_size() for tensor in edit.outputs(value))


def _is_view(node: fx.Node) -> bool:
    return is_view(node) or op_name(node) in NAMES_OF_VIEWS


def _is_called(view: fx.Node) -> bool:
    """Return True for a view that calls a torch function."""
    return view.target not in (operator.getitem, pin) and op_name(view) not in UNCALLED


def _fuses(node: fx.Node) -> bool:
    """Return True for an op that may share a kernel with others."""
    if edit.is_collective(node) or is_attention(node):
        return False
    rule = rule_of(node) if edit.outputs(node) else None
    return (rule is not None or not edit.operands(node)) and factors_of_product(node, rule) is None
