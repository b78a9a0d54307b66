"""Find how a program's batch runs through it, so that stages can work on parts of a batch in turn.

A value *counts* the batch along a dim if that dim grows with the batch: by its dynamic size, or in a program for one
batch size by the rules of the ops. A value that is computed from such a value and counts the batch along no dim is
*reduced*: a mean or a count of all samples, which no micro-batch has. An output *follows* the batch if, by the rules of
the ops, it has the samples in their order: a size alone also fits their numbers, or two copies of the batch in a row.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, sym_expr, tree_flatten
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram, results_of
from tpcompiler.ir.sizes import are_equal, statically_equal
from tpcompiler.rules.notation import Dim, Joined, Rule
from tpcompiler.rules.registry import rule_of


class Batches(NamedTuple):
    """The inputs that are cut into micro-batches along dim 0, the outputs that are joined, and what prevents it.

    The other inputs, such as a mask or positions, are the same for every micro-batch; so are the other outputs.
    """

    inputs: Collection[str]
    outputs: Collection[str]
    obstacle: str = ""


class _Counts(NamedTuple):
    """The dims of a value that count the batch.

    Attributes:
        dims: the dims that count it.
        is_reduced: it is reduced, or computed from a reduced value.
        follows: the dims that also have the samples in their order.
        is_made: it is made without inputs, with a dim of the batch's size, or computed from such a value.
        is_numbered: its elements are computed with the number of samples.
    """

    dims: frozenset[int] = frozenset()
    is_reduced: bool = False
    follows: frozenset[int] = frozenset()
    is_made: bool = False
    is_numbered: bool = False


NONE = _Counts()
SIZES = ("size", "shape", "sizes", "sym_size", "split_size", "split_sizes", "repeats", "output_size", "dim")
ENDS = ("start", "end")  # of a slice, which may be of the whole dim


def find_batches(programs: Mapping[str, CanonicalProgram]) -> dict[str, Batches]:
    """Return the inputs and outputs of programs that share buffers, of which some count the batch along dim 0."""
    caches = dict[str, frozenset[int]]()  # the dims of buffers that count the batch, which any program may write
    while True:
        before, found = dict(caches), {name: _find(program, caches) for name, program in programs.items()}
        if caches == before:
            return found


def _find(program: CanonicalProgram, caches: dict[str, frozenset[int]]) -> Batches:
    """Try every input as the batch, with those of the same dynamic size, and then all of its size together.

    Where a batch is one sample, a dim of one element may count anything: inputs with further dims come first.
    """
    candidates = [node for node in program.user_inputs() if edit.is_tensor(node) and edit.ndim(node)]
    candidates.sort(key=lambda node: (_is_single(node), edit.ndim(node) == 1))
    trials = {node: _Trial(program, _inputs_with(node, candidates), caches).run() for node in candidates}
    alone = [node for node, trial in trials.items() if not trial.obstacle]
    if not alone:
        return Batches((), (), trials[candidates[0]].obstacle if trials else "it takes no batch")
    first, best = alone[0], trials[alone[0]]
    alike = [node for node in alone if statically_equal(edit.shape(node)[0], edit.shape(first)[0])]
    alike = [node for node in alike if node is first or edit.ndim(node) > 1 or not _is_single(node)]
    together = _Trial(program, [node for node in program.user_inputs() if node in alike], caches).run()
    if not together.obstacle:
        best = together
    caches.update({name: caches.get(name, frozenset()) | dims for name, dims in best.written.items()})
    return Batches([node.name for node in best.inputs], best.outputs)


def _inputs_with(node: fx.Node, candidates: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the inputs of one dynamic size, which is one number; of a fixed size only the input itself."""
    if isinstance(edit.shape(node)[0], int):
        return [node]
    return [each for each in candidates if statically_equal(edit.shape(each)[0], edit.shape(node)[0])]


def _is_single(node: fx.Node) -> bool:
    return isinstance(edit.shape(node)[0], int) and bool(edit.shape(node)[0] == 1)


@dataclass
class _Trial:
    """A program whose batch is dim 0 of some inputs."""

    program: CanonicalProgram
    inputs: Sequence[fx.Node]
    caches: Mapping[str, frozenset[int]]
    outputs: Sequence[str] = ()
    obstacle: str = ""

    def run(self) -> _Trial:
        self.counts: dict[fx.Node, tuple[_Counts, ...]] = {}
        self.constants = set[fx.Node]()  # computed from no input, parameter or buffer
        inputs = {node: str(spec.target or node.name) for node, spec in self.program.inputs()}
        sizes = [edit.shape(node)[0] for node in self.inputs]
        self.symbols = {symbol for size in sizes for symbol in sym_expr(size).free_symbols}  # none for one batch size
        self.is_single = all(map(_is_single, self.inputs))
        for node in self.program.graph.nodes:
            if node in inputs:
                dims = frozenset({0}) if node in self.inputs else self.caches.get(inputs[node], frozenset())
                self.counts[node] = (_Counts(dims, follows=dims),)
            elif node.op == "call_function":
                self.counts[node] = tuple(self._of_call(node))
        self.written = {name: self._of(value).dims for value, name in self.program.written()}
        results = {name: value for name, value in results_of(self.program).items() if edit.is_tensor(value)}
        self.outputs = [name for name, value in results.items() if self._of(value).dims]
        self.obstacle = self._find_obstacle(results)
        return self

    def _find_obstacle(self, results: Mapping[str, fx.Node]) -> str:
        for name, value in results.items():
            dims, is_reduced, follows, is_made, is_numbered = self._of(value)
            shape = list(edit.shape(value))
            if is_numbered:
                return f"output {name!r} of shape {shape} is computed with the number of samples, and a part has fewer"
            if not dims and is_reduced:
                return f"output {name!r} of shape {shape} is computed from all samples, not one value for each"
            if dims and (dims != {0} or not self._is_proportional(shape[0])):
                return f"output {name!r} of shape {shape} does not have the batch along dim 0 alone"
            if dims and follows != {0}:
                return f"output {name!r} of shape {shape} does not have the samples of the batch in their order"
            if not dims and is_made and any(map(self._is_size, shape)):
                return f"output {name!r} of shape {shape} is made with the size of the batch, and a part has its own"
        for value, name in self.program.written():
            if not self._of(value).dims and self._of(value).is_reduced:
                return f"buffer {name!r} is computed from all samples, and each micro-batch has its own"
            if self._of(value).is_numbered:
                return f"buffer {name!r} is computed with the number of samples, and a part has fewer"
        if not self.outputs and not any(self.written.values()):
            return f"no output counts the samples of {', '.join(node.name for node in self.inputs)}"
        return ""

    def _is_proportional(self, size: int | torch.SymInt) -> bool:
        expression = sym_expr(size)
        doubled = expression.subs({symbol: 2 * symbol for symbol in self.symbols})
        return not self.symbols or bool(sympy.expand(doubled - 2 * expression) == 0)

    def _of(self, value: object) -> _Counts:
        node, index = edit.producer(value) if isinstance(value, fx.Node) else (None, 0)
        found = self.counts.get(node, ()) if node is not None else ()
        return found[index] if index < len(found) else NONE

    def _of_call(self, node: fx.Node) -> Iterable[_Counts]:
        if node.target is operator.getitem:
            return ()  # its producer has it
        own = [self._of(operand) for operand in edit.operands(node)]
        is_behind = any(each.dims or each.is_reduced for each in own)
        follows = self._dims_by_rule(node, [each.follows for each in own])
        found = self._dims_by_size(node) if self.symbols else follows
        if not own and node.target is aten.full.default and not isinstance(node.args[1], fx.Node):
            follows = found  # the same number for each sample
        is_made = any(each.is_made for each in own) or self._makes_size(node, own)
        is_numbered = any(each.is_numbered for each in own) or self._takes_number(node)
        if all(edit.producer(operand)[0] in self.constants for operand in edit.operands(node)):
            self.constants.add(node)
            is_numbered |= _mixes(node, own)
        is_reduced = any(each.is_reduced for each in own)
        return [
            _Counts(dims, is_behind and (not dims or is_reduced), alike, is_made, is_numbered)
            for dims, alike in zip(found, follows, strict=True)
        ]

    def _is_size(self, size: int | torch.SymInt) -> bool:
        return any(statically_equal(size, edit.shape(node)[0]) for node in self.inputs)

    def _makes_size(self, node: fx.Node, own: Sequence[_Counts]) -> bool:
        """Return True if, in a program for one batch size, an op of no sample has a result with a dim of that size."""
        if self.symbols or any(each.dims for each in own) or node.target in edit.VIEWS or (own and self.is_single):
            return False
        sizes = [size for operand in edit.operands(node) for size in edit.shape(operand)]
        new = [size for made in edit.outputs(node) for size in made.shape if self._is_size(size)]
        return not all(any(statically_equal(size, other) for other in sizes) for size in new)

    def _takes_number(self, node: fx.Node) -> bool:
        """Return True if the number of samples is an operand, as in `y / len(x)`, and not a size of the result."""
        if node.target is aten.arange.start_step or not isinstance(node.target, OpOverload):
            return False  # positions of the samples are refused where they are an output
        numbers = [
            each
            for name, value in edit.bound(node).items()
            if name not in SIZES and not (name in ENDS and _is_whole(node))
            for each in tree_flatten(value)[0]
            if isinstance(each, fx.Node) and not edit.is_tensor(each)
        ]
        values = [each.meta["val"] for each in numbers]
        return any(
            isinstance(each, torch.SymInt | torch.SymFloat) and bool(sym_expr(each).free_symbols & self.symbols)
            for each in values
        )

    def _dims_by_size(self, node: fx.Node) -> list[frozenset[int]]:
        return [
            frozenset(dim for dim, size in enumerate(made.shape) if sym_expr(size).free_symbols & self.symbols)
            for made in edit.outputs(node)
        ]

    def _dims_by_rule(self, node: fx.Node, own: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        made = edit.outputs(node)
        if not any(own):
            return [frozenset()] * len(made)
        if self.is_single and node.target in (aten.unsqueeze.default, aten.squeeze.dim):
            return [_dims_of_ones(node, own[0])]
        is_first = self.is_single and any(0 in dims for dims in own)  # one sample has no factor in a view
        if is_first and node.target in edit.VIEWS:
            return [frozenset({0}) if value.ndim else frozenset() for value in made]
        try:
            rule = rule_of(node)
        except RuleError:
            rule = None
        if rule is None:
            return [_dims_alike(value, edit.operands(node), own) for value in made]
        factors = _factors(rule, own)
        found = [
            frozenset(dim for dim, each in enumerate(term) if _is_counted(rule, each, factors))
            for term in rule.pattern.outputs
        ]
        if is_first and not any(found) and not _is_reduced(rule, own):
            return [frozenset({0}) if value.ndim and value.shape[0] == 1 else frozenset() for value in made]
        return found


def _is_whole(node: fx.Node) -> bool:
    """Return True for a slice of a whole dim."""
    return are_equal(edit.shape(node), edit.shape(edit.operands(node)[0]))


def _dims_of_ones(node: fx.Node, dims: frozenset[int]) -> frozenset[int]:
    """Return the dims of a result that has a dim of size 1 more, or less, than its operand."""
    at: Any = node.args[1]
    is_more = node.target is aten.unsqueeze.default
    at %= edit.ndim(node) if is_more else edit.ndim(edit.operands(node)[0])
    if not is_more and edit.ndim(node) == edit.ndim(edit.operands(node)[0]):
        return dims
    return frozenset(dim + (is_more and dim >= at) - (not is_more and dim > at) for dim in dims if is_more or dim != at)


def _mixes(node: fx.Node, own: Sequence[_Counts]) -> bool:
    """Return True if a number for each sample is computed from those of others, as a cumulative sum is."""
    try:
        rule = rule_of(node) if any(each.follows for each in own) else None
    except RuleError:
        return True
    return rule is not None and bool(rule.pattern.whole & _factors(rule, [each.follows for each in own]))


def _is_reduced(rule: Rule, own: Sequence[frozenset[int]]) -> bool:
    """Return True if dims that count the batch have factors, and no result has one of them."""
    terms = [term[dim] for term, dims in zip(rule.pattern.inputs, own, strict=True) for dim in dims]
    return any(terms) and not any(rule.made.intersection(term) for term in terms)


def _factors(rule: Rule, own: Sequence[frozenset[int]]) -> set[str]:
    """Return the factors that count the batch: of a dim, the outermost; of a dim of pieces in a row, all or none."""
    found = set[str]()
    for term, dims in zip(rule.pattern.inputs, own, strict=True):
        for dim in dims:
            factors = _outer(rule, term[dim])
            if not isinstance(term[dim], Joined):
                found.update(factors[:1])
            elif not any(factor.startswith("_") for factor in term[dim]):  # a slice has some samples
                found.update(factors)
    found |= {made for factor in found if (made := rule.over(factor)) is not None}
    return found


def _outer(rule: Rule, dim: Dim) -> Sequence[str]:
    """Return the factors of a dim without those of size 1, except of one that is all of it."""
    return dim if len(dim) == 1 else [each for each in dim if not statically_equal(rule.extent[each], 1)]


def _is_counted(rule: Rule, dim: Dim, factors: Collection[str]) -> bool:
    own = _outer(rule, dim)
    return bool(own) and ({*own}.issubset(factors) if isinstance(dim, Joined) else own[0] in factors)


def _dims_alike(value: torch.Tensor, operands: Sequence[fx.Node], own: Sequence[frozenset[int]]) -> frozenset[int]:
    """Return the dims of the result of an op without a rule that have the size of such a dim of an operand."""
    return frozenset(
        dim
        for operand, dims in zip(operands, own, strict=True)
        for dim in dims
        if dim < value.ndim and statically_equal(value.shape[dim], edit.shape(operand)[dim])
    )
