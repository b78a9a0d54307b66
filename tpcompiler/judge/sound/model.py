"""Check that the program that all ranks fold to is the model in the artifact (`model.pt2`)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, sym_expr
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import copy_body, is_cond
from tpcompiler.ir.draws import draws
from tpcompiler.ir.program import BOTH, CanonicalProgram
from tpcompiler.judge.sound.agreement import call_text, describe_input, describe_output, describe_value
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.numbering import Known, Numbering, call_of, key_of
from tpcompiler.judge.sound.pieces import Pieces
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.rules.index_range import Ranges, door_ranges
from tpcompiler.rules.speculation import obstacle
from tpcompiler.runtime.artifact import MODEL


def check_model(made: Folded, model: CanonicalProgram) -> int:
    """Compare the program that a rank's claims fold to with the model, in canonical form.

    Both are numbered value by value: the same op on the same values has the same number. Where the compiler has
    replaced a piece of the model (a variant, experts dealt to the ranks), both pieces are run on random values. A cond
    of which the ranks compute both branches is expanded first. Each value must claim the model's name for it as its
    origin.

    Returns the number of pieces that are too large to run here, or that no tried sizes fit.

    Raises:
        Unsound: inputs, outputs or sizes differ, or the first value that differs.
    """
    _check_signature(made, model)
    _check_sizes(made, model)
    conds = {node.name for node in edit.calls(made.graph) if is_cond(node)}
    return _Comparison(made, _with_both_branches(model, conds)).run()


def _check_signature(made: Folded, model: CanonicalProgram) -> None:
    """Check that inputs, leaves and outputs are the model's, in order."""
    ours, theirs = made.program.graph_signature, model.source.graph_signature
    taken = [spec for node, spec in edit.placeholders(made.program) if node not in made.numbers.nodes]
    for what, describe, specs in (
        ("input", describe_input, (taken, theirs.input_specs)),
        ("output", describe_output, (ours.output_specs, theirs.output_specs)),
    ):
        for at, pair in enumerate(itertools.zip_longest(*specs)):
            one, other = ("none" if spec is None else describe(spec) for spec in pair)
            if one != other:
                raise Unsound(None, f"{what} {at} of the ranks is {one}, and that of {MODEL} is {other}")


def _check_sizes(made: Folded, model: CanonicalProgram) -> None:
    """Check the dtype and sizes of every input; a dynamic size may be a multiple of the original one, in its range."""
    standing: dict[Any, Any] = {}
    theirs = {node.name: node.meta.get("val") for node, _ in model.inputs()}
    for node in made.whole.values():
        if node.op != "placeholder" or not isinstance(value := node.meta.get("val"), torch.Tensor):
            continue
        wanted = theirs[node.name]
        same = isinstance(wanted, torch.Tensor) and (value.dtype, value.ndim) == (wanted.dtype, wanted.ndim)
        sizes = zip(value.shape, wanted.shape, strict=True) if same else ()  # type: ignore[union-attr]
        if not same or not all(_stands_for(*ends, standing) for ends in sizes):
            said = " and ".join(describe_value(each) for each in (value, wanted))
            raise Unsound(None, f"'{node.name}' of the ranks and of {MODEL} are {said}")
    ours, ranges = made.program.range_constraints, model.source.range_constraints
    for symbol, size in standing.items():
        count, own = size.as_coeff_Mul()
        if symbol not in ranges or own not in ours:
            continue
        for end, wanted in ((ours[own].lower, ranges[symbol].lower), (ours[own].upper, ranges[symbol].upper)):
            own_end = count * end
            if own_end != wanted and not (own_end.is_Integer and wanted.is_Integer and abs(own_end - wanted) < count):
                raise Unsound(None, f"size {symbol} of {MODEL} ends at {wanted}, and that of the ranks at {own_end}")


def _stands_for(ours: Any, theirs: Any, standing: dict[Any, Any]) -> bool:
    expr, wanted = sym_expr(ours), sym_expr(theirs)  # torch may have found that a dynamic size is one number
    if expr.is_number or wanted.is_number:
        return bool(expr == wanted)
    if wanted.is_Symbol:
        return bool(standing.setdefault(wanted, expr) == expr)
    return bool(not wanted.free_symbols <= standing.keys() or wanted.xreplace(standing) == expr)


def _draws(node: fx.Node) -> bool:
    return node.op == "call_function" and draws(node)


class _Comparison:
    """The comparison of the folded program (ours) with the model (theirs)."""

    def __init__(self, made: Folded, model: CanonicalProgram) -> None:
        self.made, self.model = made, model
        graphs = (made.graph, model.graph)
        drawn = {node: at for graph in graphs for at, node in enumerate(filter(_draws, graph.nodes))}
        self.numbering = Numbering(drawn)
        self.ours: Known = {}
        self.theirs: Known = {}
        self.whole: dict[int, fx.Node] = {}
        self.believed = 0
        for node in model.graph.nodes:
            self.numbering.of(node, self.theirs)
        self.wanted = set(self.theirs.values())
        self.named = {node.name: node for node in model.graph.nodes}
        self.pieces = Pieces(made, model, self.ours, self.theirs, self.whole, drawn)
        self.owner = {whole: node for node, whole in reversed(made.whole.items())}

    def run(self) -> int:
        """Number all of our values, and compare values whose numbers differ.

        A file may give other names to a program that torch traces as a whole. So a difference between values of one
        name is a finding only if the outputs are not shown to be equal.
        """
        first = None
        for node in self.made.graph.nodes:
            self._number(node)
            if node.op == "output":
                self._compare_outputs(node, first)
            elif first is None and (same := self._namesake(node)) is not None and self.ours[node] not in self.wanted:
                cause = self._equate_operands(node, same, near=True)
                self._number(node)
                if self.ours[node] not in self.wanted and (finding := self._equate(node, same)) is not None:
                    first = cause or finding
        self._check_effects()
        return self.believed

    def _compare_outputs(self, ours: fx.Node, first: Unsound | None) -> None:
        """Raise the `first` finding, or one of the outputs, unless all outputs are the model's."""
        theirs = self.model.graph.output_node()
        believed = self.believed
        finding = self._equate_operands(ours, theirs)
        self._number(ours)
        if finding is None and self.ours[ours] != self.theirs[theirs]:
            finding = Unsound(None, f"the ranks return {ours.args[0]}, and {MODEL} {theirs.args[0]}")
        if finding is not None or (first is not None and self.believed > believed):
            raise cast(Unsound, first or finding)

    def _number(self, node: fx.Node) -> None:
        self.ours.pop(node, None)
        self.whole.setdefault(self.numbering.of(node, self.ours), node)

    def _namesake(self, whole: fx.Node) -> fx.Node | None:
        """Return the model's node that a value claims as its origin; torch keeps no claims of getitems."""
        node = self.owner.get(whole)
        if node is None or node.op != "call_function" or node.target is operator.getitem or not edit.outputs(node):
            return None
        return self.named.get(self.made.claim(node).origin or "")

    def _equate_operands(self, ours: fx.Node, theirs: fx.Node, *, near: bool = False) -> Unsound | None:
        """Equate the operands of two calls of one op, with `near` those that are shown to be equal.

        Return the first that differs if it is why the calls do: a piece that ends at a call may be written in another
        way, then with other arguments.
        """
        if (head := call_of(ours))[0] != (other := call_of(theirs))[0]:
            return None
        uses: tuple[list[fx.Node], list[fx.Node]] = ([], [])
        for arguments, nodes in zip((head[1], other[1]), uses, strict=True):
            fx.node.map_arg(arguments, nodes.append)
        pairs = zip(*uses, strict=True) if len(uses[0]) == len(uses[1]) else ()
        apart = (pair for pair in pairs if self.ours[pair[0]] != self.theirs[pair[1]])
        findings = [self._equate(*pair, near=near) for pair in apart]
        alike = len({key_of(arguments, lambda _: "") for _, arguments in (head, other)}) == 1
        return next(filter(None, findings), None) if alike else None

    def _equate(self, ours: fx.Node, theirs: fx.Node, *, near: bool = False) -> Unsound | None:
        """Give two values one number if they are equal, or cannot be run here and `near` is not set."""
        difference = self.pieces.compare(ours, theirs, near=near)
        if difference:
            text = f"is {call_text(ours)}, and {MODEL} has '{theirs.name}' = {call_text(theirs)} there: {difference}"
            return Unsound(self.owner.get(ours), text)
        if difference == "" or not near:
            self.believed += difference is None
            self.ours[ours] = self.theirs[theirs]
            self.whole.setdefault(self.ours[ours], ours)
        return None

    def _check_effects(self) -> None:
        """Check that the ranks make all assertions, random draws and choices of the model."""
        numbers = set(self.ours.values())
        silent = [node for node in self.ours if _is_silent(node)]
        for node, number in self.theirs.items():
            if number in numbers or not (_is_silent(node) or _draws(node) or BOTH in node.meta):
                continue
            if not any(self._is_same(each, node) for each in silent):
                raise Unsound(None, f"{MODEL} calls '{node.name}' = {call_text(node)}, and the ranks do not")

    def _is_same(self, ours: fx.Node, theirs: fx.Node) -> bool:
        """Return True if two calls without results take equal values, however these are computed."""
        self._equate_operands(ours, theirs)
        self._number(ours)
        return self.ours[ours] == self.theirs[theirs]


def _is_silent(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def _with_both_branches(model: CanonicalProgram, called: Collection[str]) -> CanonicalProgram:
    """Expand every cond that the ranks do not call: both branches, and a choice by the predicate for each result.

    So the comparison holds for both values of the predicate. `called`: the names of the conds that the ranks call.

    Raises:
        Unsound: a branch may only run if it is chosen.
    """
    if all(node.name in called for node in edit.calls(model.graph) if is_cond(node)):
        return model
    graph = edit.copy_graph(model.graph)
    at_door = door_ranges(model, {})
    waiting = list(edit.calls(graph))
    for node in waiting:
        if is_cond(node) and node.name not in called:
            waiting += _write_out(node, at_door)
    return CanonicalProgram(model.source, graph)


def _write_out(cond: fx.Node, at_door: Ranges) -> list[fx.Node]:
    graph = cond.graph
    predicate, true, false, operands = cast(Any, cond.args)
    on_true, on_false = (copy_body(cond, side, body, operands) for side, body in (("true", true), ("false", false)))
    copies = on_true[0] + on_false[0]
    with graph.inserting_before(cond):
        if why := obstacle(copies, at_door):
            raise Unsound(None, f"the ranks compute both branches of '{cond.name}', and one of them {why}")
        value = predicate.meta.get("val")
        casts = isinstance(value, torch.Tensor) and value.dtype != torch.bool
        shapes = isinstance(value, torch.Tensor) and value.ndim > 0
        for target, argument in [(aten.ne.Scalar, 0)] * casts + [(aten.view.default, [])] * shapes:
            name = f"{cond.name}_predicate"
            predicate = graph.create_node("call_function", target, (predicate, argument), name=name)
        for part in list(cond.users):
            index: Any = part.args[1]
            ends = on_true[1][index], on_false[1][index]
            name = f"{cond.name}_chosen_{index}"
            chosen = graph.create_node("call_function", aten.where.self, (predicate, *ends), name=name)
            chosen.meta.update({"val": part.meta.get("val"), BOTH: cond.name})
            edit.replace_uses(part, chosen)
            edit.erase(part)
    edit.erase(cond)
    return copies
