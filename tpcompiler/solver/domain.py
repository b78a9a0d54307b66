"""What every op may do: the choices among which the search takes one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.objective import Machine, compute_seconds
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PIN, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option, Refusal, follow, options, shardings
from tpcompiler.rules.notation import Rule, Term
from tpcompiler.rules.registry import rule_of

# Dims and factors that are samples or tokens of the inputs; False of those that are outermost in a dim of several.
Tokens = dict[int, bool]
Factors = dict[str, bool]
Both = tuple[tuple[Sharding, ...], tuple[Sharding, ...]]
MOST_CHOICES = 12  # of an op


class Choice(NamedTuple):
    """A way to run an op: what it needs of its operands, what it makes, and its own seconds."""

    wants: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    seconds: float
    option: Option = Option()


class _Ways:
    """What `rules.infer` says of a rule, which calls alike share: once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.known: dict[Any, Any] = {}

    def options(self, rule: Rule) -> list[Option]:
        return list(self._once((id(rule),), lambda: list(options(rule, self.mesh))))

    def both(self, rule: Rule, option: Option) -> Both | Refusal:
        """What an option needs, and what it makes."""
        return self._once((id(rule), id(option)), lambda: (option, shardings(rule, option, self.mesh)))[1]  # type: ignore[no-any-return]

    def follow(self, rule: Rule, term: Term, sharding: Sharding) -> Option | Refusal:
        return self._once((id(rule), id(term), sharding), lambda: follow(rule, term, sharding, self.mesh))  # type: ignore[no-any-return]

    def _once(self, key: Any, find: Any) -> Any:
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]


def tensor_index(node: fx.Node, index: Any) -> int:
    """Which of the tensors that a node makes one of its results is."""
    return sum(isinstance(value, torch.Tensor) for value in node.meta["val"][:index])


def find_choices(program: PlannedProgram, mesh: Mesh, machine: Machine) -> dict[fx.Node, list[Choice]]:
    """The choices of every call but `getitem`, in order.

    The op whole, each factor of its rule cut, each pending operand passed through; and what users want and operands
    are, such as parts of a packed weight's output. No samples or tokens of the inputs are cut.
    """
    ways = _Ways(mesh)
    tokens: dict[fx.Node, Tokens] = {}
    for node in program.user_inputs():
        value = node.meta["val"]
        tokens[node] = dict.fromkeys([0] if value.is_floating_point() else range(value.ndim), True)
    calls = [node for node in edit.calls(program.graph) if node.target is not operator.getitem]
    rules = {node: rule_of(node) for node in calls if node.target is not pin and edit.outputs(node)}
    kept: dict[fx.Node, list[Option]] = {}
    forbidden: dict[fx.Node, Factors] = {}
    for node, rule in rules.items():
        if rule is None:
            continue
        forbidden[node] = _token_factors(node, rule, tokens)
        kept[node] = [option for option in ways.options(rule) if _leaves_tokens(option, forbidden[node])]
        for user in [node] if edit.is_tensor(node) else node.users:
            index = 0 if user is node else tensor_index(node, user.args[1])
            if edit.is_tensor(user):
                tokens[user] = _token_dims(rule.pattern.outputs[index], rule, forbidden[node])
    for node in [*reversed(kept), *kept]:
        _spread(node, rules, kept, forbidden, ways)
    return {node: _priced(node, rules.get(node), kept.get(node, []), ways, machine) for node in calls}


def _token_factors(node: fx.Node, rule: Rule, tokens: Mapping[fx.Node, Tokens]) -> Factors:
    """The factors of samples and tokens, as far as they are dims of the inputs."""
    found: Factors = {}
    for operand, term in zip(edit.operands(node), rule.pattern.inputs, strict=True):
        for at, alone in tokens.get(operand, {}).items():
            dim = [factor for factor in term[at] if rule.extent[factor] != 1]
            for factor in dim if alone else dim[:1]:
                found[factor] = found.get(factor, False) or alone or len(dim) > 1
    return found


def _token_dims(term: Term, rule: Rule, factors: Factors) -> Tokens:
    found: Tokens = {}
    for at, dim in enumerate(term):
        inside = [factor for factor in dim if rule.extent[factor] != 1]
        if inside and inside[0] in factors:
            found[at] = all(factors.get(factor, False) for factor in inside)
    return found


def _leaves_tokens(option: Option, factors: Factors) -> bool:
    """Whether no samples or tokens are cut, nor what an op leaves out of its operand.

    What lies within each token may be cut, such as heads that are merged with samples.
    """
    return not any(
        factor.startswith("_") or (factor in factors and (factors[factor] or not (cut.levels and cut.levels[0].block)))
        for factor, cut in option.cuts.items()
    )


def _spread(
    node: fx.Node,
    rules: Mapping[fx.Node, Rule | None],
    kept: Mapping[fx.Node, list[Option]],
    forbidden: Mapping[fx.Node, Factors],
    ways: _Ways,
) -> None:
    """Let an op take what its operands are, and those who make them make what it wants."""
    rule = rules[node]
    assert rule is not None
    operands = edit.operands(node)
    for position, (operand, term) in enumerate(zip(operands, rule.pattern.inputs, strict=True)):
        source: Any = operand.args[0] if operand.target is operator.getitem else operand
        theirs = rules.get(source)
        if theirs is None:
            continue
        at = 0 if source is operand else tensor_index(source, operand.args[1])
        made = (both[1][at] for both in _shardings(theirs, kept[source], ways))
        _add(kept[node], rule, _follow_all(rule, term, made, ways), forbidden[node], ways)
        wanted = (both[0][position] for both in _shardings(rule, kept[node], ways))
        found = _follow_all(theirs, theirs.pattern.outputs[at], wanted, ways)
        _add(kept[source], theirs, found, forbidden[source], ways)


def _shardings(rule: Rule, found: Sequence[Option], ways: _Ways) -> Iterator[Both]:
    both = (ways.both(rule, option) for option in list(found))
    return (each for each in both if not isinstance(each, Refusal))


def _follow_all(rule: Rule, term: Term, wanted: Iterable[Sharding], ways: _Ways) -> Iterator[Option]:
    for sharding in dict.fromkeys(s for s in wanted if s.cut_axes and not s.partial):
        option = ways.follow(rule, term, sharding)
        if isinstance(option, Option):
            yield option


def _add(found: list[Option], rule: Rule, more: Iterator[Option], forbidden: Factors, ways: _Ways) -> None:
    for option in more:
        fits = len(found) < MOST_CHOICES and option not in found and _leaves_tokens(option, forbidden)
        if fits and not isinstance(ways.both(rule, option), Refusal):
            found.append(option)


def _priced(node: fx.Node, rule: Rule | None, found: Sequence[Option], ways: _Ways, machine: Machine) -> list[Choice]:
    operands, mesh = edit.operands(node), ways.mesh
    if node.target is pin:
        sharding = node.meta[PIN].sharding.only(*mesh.names)
        return [Choice((sharding,), (sharding,), 0.0)]
    if rule is None:
        whole = tuple(Sharding.replicated(o.meta["val"].ndim) for o in operands)
        return [Choice(whole, tuple(Sharding.replicated(v.ndim) for v in edit.outputs(node)), 0.0)]
    choices: dict[Both, Choice] = {}
    tensors = [*(o.meta["val"] for o in operands), *edit.outputs(node)]
    flops = _flops(rule)
    for option in found:
        both = ways.both(rule, option)
        if isinstance(both, Refusal):
            continue
        moved = list(zip(tensors, (*both[0], *both[1]), strict=True))
        degree = mesh.world_size if option.cuts else 1
        seconds = compute_seconds(flops / degree, moved, mesh, machine) if flops else 0.0
        choices.setdefault(both, Choice(*both, seconds, option))
    return list(choices.values())


def _flops(rule: Rule) -> float:
    """Of a product of two operands that is summed. All else is taken to run within what makes or takes its values."""
    if len(rule.pattern.inputs) - len(rule.pattern.addends) != 2 or not rule.reduced:
        return 0.0
    total = 2.0
    for factor in rule.factors:
        total *= sym_hint(rule.extent[factor])
    return total
