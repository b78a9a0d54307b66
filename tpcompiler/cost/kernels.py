"""What counts as a kernel, and which bytes pass through memory: a model of what runs of a graph.

With a compiler, products and attentions are kernels. Any other op fuses with the ops that it exchanges values with, as
long as no product, attention or collective lies on a path between two of them; what is fused is one kernel. That is
close to what Inductor's greedy fusion gives, and it depends on the graph alone, so every op keeps a price of its own.
Views are no kernels, nor is what is computed of sizes and single numbers for ops that fuse, such as the indices of a
slice. A look-up reads what it returns, a write into a buffer moves what it writes, and a weight that is widened for one
product, such as one of int8, is widened there. Of experts, those are read that tokens are expected to take, if they
take all of them alike.

Without a compiler every op is a kernel that reads its operands and writes its results, and a view takes its time too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import fx

from tpcompiler._torch import OpOverload, sym_hint
from tpcompiler.cost.machine import DTYPES
from tpcompiler.ir import edit
from tpcompiler.ir.experts import BY_BLOCK
from tpcompiler.ir.program import pin
from tpcompiler.ir.rank_numbers import rank_number
from tpcompiler.ir.text import op_name
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

Floor = Literal["product", "attention", "other", "view", ""]
INDICES = frozenset((torch.int64, torch.int32, torch.bool))
UNCALLED = frozenset(("wait_tensor", "sym_size"))  # they call no kernel, nor a function of torch that takes its time
NAMES_OF_VIEWS = UNCALLED | {"_unsafe_view", "_assert_async"}
LOOKUPS = frozenset(("embedding", "gather", "index", "index_select"))
WRITES = frozenset(("index_copy", "index_put", "scatter", "select_scatter", "slice_scatter"))


class Kernel(NamedTuple):
    """An op's part in a kernel.

    Attributes:
        floor: which floor the op pays; "" if its kernel's is paid by another op.
        moves: the share of each operand, then of each result, that the op reads from memory or writes to it.
        stored: which of these are inputs or state, and not what another kernel has just written.
        dtype: of a product of narrow operands, which ones (`machine.DTYPES`): it may have other rates.
    """

    floor: Floor
    moves: tuple[float, ...] = ()
    stored: tuple[bool, ...] = ()
    dtype: str = ""


NO_KERNEL = Kernel("")  # of a view, or an op that is part of a product


def find_kernels(graph: fx.Graph, fuses: bool = True) -> dict[fx.Node, Kernel]:
    """Return the kernels of a program, by each op that has a part in one; `fuses`: a compiler makes kernels of ops."""
    found = _Fusion(graph, fuses)
    return found.kernels() if fuses else found.calls_alone()


def is_attention(node: fx.Node) -> bool:
    return "scaled_dot_product" in op_name(node)


def factors_of_product(node: fx.Node, rule: Rule | None) -> tuple[frozenset[str], frozenset[str]] | None:
    """The factors of the two operands that an op multiplies and sums over; None for any other op.

    Of matrices that stand in a row, one is used for each row: their number counts for neither operand.
    """
    found = _multiplied(node, rule)
    if found is None:
        return None
    ((_, left), (_, right)), dealt = found
    return (left, right - dealt) if dealt & (right - left) else (left, right)


def _multiplied(node: fx.Node, rule: Rule | None) -> tuple[list[tuple[fx.Node, frozenset[str]]], set[str]] | None:
    """The two operands of a product with their factors, and the factors that indices deal out."""
    if rule is None or is_attention(node):
        return None
    terms, dealt = list[tuple[fx.Node, frozenset[str]]](), set[str]()
    for at, (term, operand) in enumerate(zip(rule.pattern.inputs, edit.operands(node), strict=True)):
        own = frozenset(factor for dim in term for factor in dim)
        if operand.meta["val"].dtype in INDICES:
            dealt |= own
        elif at not in rule.pattern.addends:
            terms.append((operand, own))
    if len(terms) > 2:  # such as scales of the result
        terms = [(operand, own) for operand, own in terms if own & rule.reduced]
    return None if len(terms) != 2 or not rule.reduced - dealt else (terms, dealt)


def rows_share(node: fx.Node) -> float:
    """The share of its rows that an op multiplies: of experts in blocks, each block has its own, as many in each."""
    if node.target is not BY_BLOCK:
        return 1.0
    blocks, rows = (sym_hint(size) for size in edit.operands(node)[0].meta["val"].shape[:2])
    return math.ceil(rows / blocks) / max(1, rows)


class _Fusion:
    """Which ops run in one kernel."""

    def __init__(self, graph: fx.Graph, fuses: bool) -> None:
        self.calls = list[fx.Node]()  # but views and collectives
        self.source: dict[fx.Node, fx.Node] = {}  # what a view is a view of
        self.depth: dict[fx.Node, int] = {}  # products, attentions and collectives before an op
        self.parent: dict[fx.Node, fx.Node] = {}  # among the ops that fuse
        self.alone: set[fx.Node] = set()
        self.made_of_sizes = _find_made_of_sizes(graph) if fuses else set[fx.Node]()
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

    def _find_widened(self) -> Iterator[tuple[fx.Node, tuple[float, torch.dtype]]]:
        """The kernels that make an operand of one product of placeholders alone: the share of its bytes that they read,
        and the dtype of the largest of these."""
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
                yield own, (share, max(given, key=_bytes).meta["val"].dtype)

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
                share, _ = self.widened.get(other, (1.0, None))
                reads.append(share if is_read else 0.0)
            writes = [float(node in self.users)] * len(edit.outputs(node))
            found[node] = self._kernel("" if own in paid else _floor(node), node, reads, writes)
            paid.add(own)
        return found

    def calls_alone(self) -> dict[fx.Node, Kernel]:
        """Return every op as a kernel of its own, and every view as one that moves nothing."""
        found = {node: Kernel("view") for node in self.source if _is_called(node)}
        for node in self.calls:
            reads, writes = [1.0] * len(edit.operands(node)), [1.0] * len(edit.outputs(node))
            found[node] = self._kernel(_floor(node), node, reads, writes)
        return found

    def _kernel(self, floor: Floor, node: fx.Node, reads: list[float], writes: list[float]) -> Kernel:
        stored = (*(self.of(operand).op == "placeholder" for operand in edit.operands(node)), *(False for _ in writes))
        dtype = self._dtype(node) if floor == "product" else ""
        return Kernel(floor, _moves(node, reads, writes), stored, dtype)

    def _dtype(self, product: fx.Node) -> str:
        """The narrow dtype of both operands of a product, or of its weights."""
        operands, _ = _multiplied(product, rule_of(product)) or ([], set())
        names = []
        for operand, _ in operands:
            known = self.widened.get(self.root(self.of(operand)))
            dtype = operand.meta["val"].dtype if known is None else known[1]
            names.append(next((each for each in DTYPES if str(dtype).startswith(f"torch.{each}")), ""))
        narrow = max(names, default="")
        return narrow if names.count(narrow) == len(names) else f"{narrow}_weights"


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
    if "grouped_mm" in name and len(reads) == 3:
        reads[0] *= rows_share(node)
        reads[1] *= _share_of_experts(node)
    return (*reads, *writes)


def _is_number(value: fx.Node) -> bool:
    """True for one whole number."""
    tensors = edit.outputs(value)
    return len(tensors) == 1 and tensors[0].ndim == 0 and tensors[0].dtype in INDICES


def _share_of_experts(node: fx.Node) -> float:
    """The share of matrices that rows are expected to use, each token some of them, if it takes all alike.

    In blocks, as many as if each block had as many rows as the one that has most.
    """
    rows, matrices, ends = edit.operands(node)
    if matrices.meta["val"].ndim != 3:
        return 1.0
    blocks = sym_hint(rows.meta["val"].shape[0]) if node.target is BY_BLOCK else 1
    count = blocks * rows_share(node) * sym_hint(rows.meta["val"].shape[-2])
    experts = sym_hint(matrices.meta["val"].shape[0])
    each = min(_chosen_by_token(ends), experts)
    return float(1 - (1 - each / experts) ** (count / each))


def _chosen_by_token(ends: fx.Node) -> int:
    """How many experts a token takes: those of the nearest topk that the ends of groups come of, or 1."""
    ahead, seen = [ends], {ends}
    for node in ahead:
        if op_name(node) == "topk":
            return int(edit.bound(node)["k"])
        fresh = [operand for operand in node.all_input_nodes if operand not in seen]
        ahead += fresh
        seen.update(fresh)
    return 1


def _bytes(value: fx.Node) -> int:
    return sum(sym_hint(tensor.numel()) * tensor.element_size() for tensor in edit.outputs(value))


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if target in (operator.getitem, pin) or (isinstance(target, OpOverload) and target.is_view):
        return True
    return op_name(node) in NAMES_OF_VIEWS


def _is_called(view: fx.Node) -> bool:
    """True for a view that calls a function of torch."""
    return view.target not in (operator.getitem, pin) and op_name(view) not in UNCALLED


def _fuses(node: fx.Node) -> bool:
    """True for an op that may share a kernel with others."""
    if edit.is_collective(node) or is_attention(node):
        return False
    rule = rule_of(node) if edit.outputs(node) else None
    return (rule is not None or not edit.operands(node)) and factors_of_product(node, rule) is None
