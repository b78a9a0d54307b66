"""What counts as a kernel, and which bytes pass through memory: a model of what a compiler leaves of a graph.

Products and attentions are kernels. Any other op fuses with the ops that it exchanges values with, as long as no
product, attention or collective lies on a path between two of them; what is fused is one kernel. That is close to what
Inductor's greedy fusion gives, and it depends on the graph alone, so every op keeps a price of its own. Views are no
kernels, nor is what is computed of sizes and single numbers for ops that fuse, such as the indices of a slice. A
look-up reads what it returns, a write into a buffer moves what it writes, and a weight that is widened for one product,
such as one of int8, is widened there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import fx

from tpcompiler._torch import OpOverload, sym_hint
from tpcompiler.ir import edit
from tpcompiler.ir.experts import BY_BLOCK
from tpcompiler.ir.program import pin
from tpcompiler.ir.rank_numbers import rank_number
from tpcompiler.ir.text import op_name
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

Floor = Literal["product", "attention", "other", ""]
INDICES = frozenset((torch.int64, torch.int32, torch.bool))
NAMES_OF_VIEWS = frozenset(("_unsafe_view", "wait_tensor", "_assert_async", "sym_size"))
LOOKUPS = frozenset(("embedding", "gather", "index", "index_select"))
WRITES = frozenset(("index_copy", "index_put", "scatter", "select_scatter", "slice_scatter"))


class Kernel(NamedTuple):
    """An op's part in a kernel.

    Attributes:
        floor: which floor the op pays; "" if its kernel's is paid by another op.
        moves: the share of each operand, then of each result, that the op reads from memory or writes to it.
    """

    floor: Floor
    moves: tuple[float, ...]


NO_KERNEL = Kernel("", ())  # of a view, or an op that is part of a product


def find_kernels(graph: fx.Graph) -> dict[fx.Node, Kernel]:
    """The kernels of a program, by each op that has a part in one."""
    return _Fusion(graph).kernels()


def is_attention(node: fx.Node) -> bool:
    return "scaled_dot_product" in op_name(node)


def factors_of_product(node: fx.Node, rule: Rule | None) -> tuple[frozenset[str], frozenset[str]] | None:
    """The factors of the two operands that an op multiplies and sums over; None for any other op.

    Of matrices that stand in a row, one is used for each row: their number counts for neither operand.
    """
    if rule is None or is_attention(node):
        return None
    terms, dealt = list[frozenset[str]](), set[str]()
    for at, (term, operand) in enumerate(zip(rule.pattern.inputs, edit.operands(node), strict=True)):
        own = frozenset(factor for dim in term for factor in dim)
        if operand.meta["val"].dtype in INDICES:
            dealt |= own
        elif at not in rule.pattern.addends:
            terms.append(own)
    if len(terms) != 2 or not rule.reduced - dealt:
        return None
    left, right = terms
    return (left, right - dealt) if dealt & (right - left) else (left, right)


def rows_share(node: fx.Node) -> float:
    """The share of its rows that an op multiplies: of experts in blocks, each block has its own, as many in each."""
    if node.target is not BY_BLOCK:
        return 1.0
    blocks, rows = (sym_hint(size) for size in edit.operands(node)[0].meta["val"].shape[:2])
    return math.ceil(rows / blocks) / max(1, rows)


class _Fusion:
    """Which ops run in one kernel."""

    def __init__(self, graph: fx.Graph) -> None:
        self.calls = list[fx.Node]()  # but views and collectives
        self.source: dict[fx.Node, fx.Node] = {}  # what a view is a view of
        self.depth: dict[fx.Node, int] = {}  # products, attentions and collectives before an op
        self.parent: dict[fx.Node, fx.Node] = {}  # among the ops that fuse
        self.alone: set[fx.Node] = set()
        self.made_of_sizes = _find_made_of_sizes(graph)
        for node in edit.calls(graph):
            if node not in self.made_of_sizes:
                self._add(node)
        self.users = self._find_users(graph)
        self.widened = dict(self._find_widened())

    def _add(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        if _is_view(node) and operands:
            self.source[node] = self.of(operands[0])
            return
        if not edit.is_collective(node):
            self.calls.append(node)
        sources = [self.of(operand) for operand in operands]
        self.depth[node] = max((self.depth.get(s, 0) + (s in self.alone) for s in sources), default=0)
        if not _fuses(node):
            self.alone.add(node)
            return
        self.parent[node] = node
        for source in sources:
            if source in self.parent and self.depth[source] == self.depth[node]:
                self.parent[self.root(source)] = self.root(node)

    def of(self, value: fx.Node) -> fx.Node:
        """The op or placeholder that makes what a value is a view of."""
        return self.source.get(value, value)

    def root(self, node: fx.Node) -> fx.Node:
        while self.parent.get(node, node) is not node:
            node = self.parent[node]
        return node

    def _find_users(self, graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
        """The ops of other kernels, and the output, that use what an op makes."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            own = self.root(node)
            for operand in () if node in self.source else node.all_input_nodes:
                if self.root(self.of(operand)) is not own:
                    found.setdefault(self.of(operand), set()).add(node)
        return found

    def _find_widened(self) -> Iterator[tuple[fx.Node, float]]:
        """The kernels that make an operand of one product of placeholders alone; what share of its bytes they read."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.parent:
            members.setdefault(self.root(node), []).append(node)
        for own, nodes in members.items():
            made = [node for node in nodes if node in self.users]
            given = {
                operand for node in nodes for operand in node.all_input_nodes if self.of(operand) not in self.parent
            }
            if len(made) != 1 or len(self.users[made[0]]) != 1 or not given:
                continue
            (user,) = self.users[made[0]]
            is_product = user in self.alone and _floor(user) == "product"
            share = sum(map(_bytes, given)) / max(1, _bytes(made[0]))
            if is_product and share < 1 and all(self.of(operand).op == "placeholder" for operand in given):
                yield own, share

    def kernels(self) -> dict[fx.Node, Kernel]:
        found, paid, read = dict[fx.Node, Kernel](), set[fx.Node](), set[tuple[fx.Node, fx.Node]]()
        for node in self.calls:
            own, reads = self.root(node), list[float]()
            if own in self.widened:
                continue
            for operand in edit.operands(node):
                other = self.root(self.of(operand))
                is_computed = other in self.made_of_sizes and not _is_number(other)
                is_read = other is not own and not is_computed and (own, operand) not in read
                read.add((own, operand))
                reads.append(self.widened.get(other, 1.0) if is_read else 0.0)
            writes = [float(node in self.users)] * len(edit.outputs(node))
            found[node] = Kernel("" if own in paid else _floor(node), _moves(node, reads, writes))
            paid.add(own)
        return found


def _find_made_of_sizes(graph: fx.Graph) -> set[fx.Node]:
    """The calls that are computed of sizes and of whole numbers, such as a rank's own, where all that use them fuse."""
    found = set[fx.Node]()
    for node in edit.calls(graph):
        read = [operand for operand in node.all_input_nodes if edit.outputs(operand)]
        if node.target is rank_number or (_fuses(node) and all(each in found or _is_number(each) for each in read)):
            found.add(node)
    for node in reversed(graph.nodes):
        if node in found and not all(user in found or (user.op != "output" and _fuses(user)) for user in node.users):
            found.discard(node)
    return found


def _floor(node: fx.Node) -> Floor:
    if is_attention(node):
        return "attention"
    return "other" if factors_of_product(node, rule_of(node)) is None else "product"


def _moves(node: fx.Node, reads: list[float], writes: list[float]) -> tuple[float, ...]:
    """The shares of an op that reads or writes less than its operands and results."""
    name = op_name(node)
    if name in LOOKUPS:
        return (0.0, *reads[1:], *(1 + write for write in writes))
    if name in WRITES:
        return (0.0, *(1 + read for read in reads[1:]), *(0.0 for _ in writes))
    if "grouped_mm" in name:  # matrices that no row uses are not read, nor rows of other blocks
        rows, matrices = (operand.meta["val"] for operand in edit.operands(node)[:2])
        blocks = sym_hint(rows.shape[0]) if node.target is BY_BLOCK else 1
        own = rows_share(node) * sym_hint(rows.shape[-2])
        reads[0] *= rows_share(node)
        reads[1] *= min(1.0, own * blocks / sym_hint(matrices.shape[0]))
    return (*reads, *writes)


def _is_number(value: fx.Node) -> bool:
    """True for one whole number."""
    tensors = edit.outputs(value)
    return len(tensors) == 1 and tensors[0].ndim == 0 and tensors[0].dtype in INDICES


def _bytes(value: fx.Node) -> int:
    return sum(sym_hint(tensor.numel()) * tensor.element_size() for tensor in edit.outputs(value))


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if target in (operator.getitem, pin) or (isinstance(target, OpOverload) and target.is_view):
        return True
    return op_name(node) in NAMES_OF_VIEWS


def _fuses(node: fx.Node) -> bool:
    """True for an op that may share a kernel with others."""
    if edit.is_collective(node) or is_attention(node):
        return False
    rule = rule_of(node) if edit.outputs(node) else None
    return (rule is not None or not edit.operands(node)) and factors_of_product(node, rule) is None
