"""Check by the op's rule that a rank's call computes its share of the call on the whole."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import FakeTensorMode, OpOverload, aten, enable_python_dispatcher, symbols_of, tree_map
from tpcompiler.errors import RuleError, reason
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import WHOLE, Size
from tpcompiler.ir.local import key
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.judge.sound.drawn import DrawnSizes
from tpcompiler.judge.sound.folded import LAYOUT, Folded, Shardings, reads_data
from tpcompiler.judge.sound.numbering import key_of
from tpcompiler.judge.sound.shares import local_shape, local_size
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.rules.infer import Option, Refusal, follow, merge, pass_through, shardings
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.terminal.progress import counted

DRAWS = 4  # number of draws of sizes at which an op may agree with its recorded value


def check_ops(made: Folded, rank: int) -> int:
    """Check every call of the rank outside of regions, and every value's shape.

    Returns the number of calls that could not be run and are believed: every rank makes the single device's call.

    Raises:
        Unsound: the op's rule does not give the shardings, an argument is not the rank's own size, or a local value has
            another shape or dtype than claimed or than the call makes.
    """
    here = made.mesh.coordinate(rank)
    believed = 0
    for node in counted(list(made.program.graph.nodes), "checking the ops", "ops"):
        if node.op == "call_function":
            believed += not _check_value(made, node)
        if node in made.whole and node.op != "output":
            _check_shapes(made, node, here)
    for node in made.ops:
        _check_op(made, node, here)
    return believed


def _check_shapes(made: Folded, node: fx.Node, here: Mapping[str, int]) -> None:
    wholes = edit.outputs(made.whole[node])
    if not edit.outputs(node):
        return
    if [whole.ndim for whole in wholes] != [local.ndim for local in edit.outputs(node)]:
        raise Unsound(node, f"makes {_shapes(edit.outputs(node))}, and the whole {_shapes(wholes)}")
    for whole, sharding, local in zip(wholes, made.shardings[node], edit.outputs(node), strict=True):
        claimed = local_shape(sharding, whole.shape, made.mesh, here)
        if not all(map(statically_equal, claimed, local.shape)):
            raise Unsound(
                node,
                f"is {list(local.shape)}, and {sharding.text(made.mesh)} of {list(whole.shape)} is {list(claimed)}",
            )
        if whole.dtype != local.dtype:
            raise Unsound(node, f"is of {local.dtype}, and the whole of {whole.dtype}")


def _shapes(values: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(value.shape)) for value in values)


def _check_value(made: Folded, node: fx.Node) -> bool:
    """Check that the recorded value is the call's result on recorded operands; return True if the call could run."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: edit.fake(n))
    if isinstance(node.meta.get("val"), (int, torch.SymInt)):
        _check_number(made, node, args, kwargs)
    if not isinstance(node.target, OpOverload) or not edit.outputs(node):
        return True
    try:
        result = made.run(node.target, args, kwargs)
    except Exception as error:  # torch raises anything for arguments that do not fit
        if _is_the_whole_call(made, node):
            return False  # the export compared dynamic sizes, which the file does not record
        if _has_dynamic_sizes(node) and _holds_at_numbers(made, node, args, kwargs):
            return True
        raise Unsound(node, f"cannot be run: {reason(error)}") from error
    every = edit.tensors_in(result)
    shapes, known = _read_names(made, node, every)
    # The length of a list that depends on a dynamic size is that of the example.
    few = len(every) != len(edit.outputs(node)) and _has_dynamic_sizes(node)
    for value, shape, said in zip(every, shapes, edit.outputs(node), strict=not few):
        kind = value.ndim == said.ndim and value.dtype == said.dtype
        apart = [ends for ends in zip(shape, said.shape, strict=False) if not statically_equal(*ends)]
        dynamic = kind and not any(isinstance(a, int) and isinstance(b, int) for a, b in apart)
        if apart and dynamic and _is_the_whole_call(made, node) and _agree_somewhere(made, apart):
            return False  # the export took a dynamic size for its value in the example
        if apart or not kind:
            raise Unsound(node, f"makes {value.dtype} {list(value.shape)}, and records {said.dtype} {list(said.shape)}")
        if any(result != recorded for result, recorded in _known_strides(value, said)):
            raise Unsound(node, f"makes the strides {value.stride()}, and records {said.stride()}")
    return known and not few


def _holds_at_numbers(made: Folded, node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Return True if the call has its recorded results with numbers for sizes: torch cannot compare all symbols."""
    for draw in range(DRAWS):
        made.sizes = DrawnSizes(made.sizes.chosen, fits=True, scaled=draw >= DRAWS // 2)
        try:
            with FakeTensorMode(), torch.no_grad(), enable_python_dispatcher():
                given = tree_map(lambda value: _in_numbers(value, made), (args, kwargs))
                result = node.target(*given[0], **given[1])  # type: ignore[operator]
        except Exception:  # they do not fit
            continue
        every = edit.tensors_in(result)
        said = [([made.plain(size) for size in each.shape], each.dtype) for each in edit.outputs(node)]
        return said == [(list(value.shape), value.dtype) for value in every]
    return False


def _in_numbers(value: Any, made: Folded) -> Any:
    if not isinstance(value, torch.Tensor):
        return made.plain(value)
    sizes, strides = ([made.plain(each) for each in layout] for layout in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _known_strides(one: torch.Tensor, other: torch.Tensor) -> list[tuple[int, int]]:
    """Return the known strides of dims with more than one element, in pairs; none of a tensor without elements."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return []
    if any(statically_equal(size, 0) for size in one.shape):
        return []
    every = zip(one.shape, one.stride(), other.stride(), strict=True)
    return [
        (a, b) for size, a, b in every if isinstance(a, int) and isinstance(b, int) and not statically_equal(size, 1)
    ]


def _agree_somewhere(made: Folded, apart: Sequence[tuple[Any, Any]]) -> bool:
    """Return True if sizes that look different are equal for some sizes an export may have found: multiples of many."""
    symbolic = [ends for ends in apart if not any(isinstance(size, int) for size in ends)]
    for _ in range(DRAWS):
        made.sizes = DrawnSizes(fits=True)
        if all(made.plain(one) == made.plain(other) for one, other in symbolic):
            return True
    return False


def _is_the_whole_call(made: Folded, node: fx.Node) -> bool:
    """Return True for the single device's call on the same values on every rank, with dynamic sizes."""
    shardings = [made.shardings.get(each) for each in (node, *edit.operands(node))]
    whole = all(found is not None and all(each.is_replicated for each in found) for found in shardings)
    dynamic = _has_dynamic_sizes(node) or bool(node.meta.get("unbacked_bindings"))
    return whole and made.claim(node).call is None and dynamic


def _has_dynamic_sizes(node: fx.Node) -> bool:
    sizes = [size for operand in edit.operands(node) for value in edit.outputs(operand) for size in value.shape]
    return not all(isinstance(size, int) for size in sizes)


def _check_number(made: Folded, node: fx.Node, args: Any, kwargs: Any) -> None:
    """Check a recorded number. A data-dependent one needs a unique name, and has no known value."""
    if isinstance(node.target, OpOverload) and node.target not in LAYOUT:
        names = symbols_of([edit.fake(node)])
        of_inputs = symbols_of(each.meta.get("val") for each in made.program.graph.nodes if each.op == "placeholder")
        if edit.operands(node) and (not names or names & of_inputs):
            raise Unsound(node, f"makes a number that the data decide, and records {edit.fake(node)}")
        return
    actual = args[0].shape[args[1]] if node.target is aten.sym_size.int else node.target(*args, **kwargs)  # type: ignore[operator]
    if not statically_equal(actual, edit.fake(node)) and not _is_asserted(node):
        raise Unsound(node, f"makes {actual}, and records {edit.fake(node)}")


def _is_asserted(node: fx.Node) -> bool:
    """Return True if a run stops unless the number is the recorded one: the export found that it must be."""
    equal = [user for user in node.users if user.target is operator.eq and user.args == (node, edit.fake(node))]
    return any(user.target is aten._assert_scalar.default for each in equal for user in each.users)


def _check_op(made: Folded, node: fx.Node, here: Mapping[str, int]) -> None:
    gives, whole = made.shardings[node], made.whole[node]
    operands = edit.operands(node)
    if node.target is aten.full.default and statically_equal(edit.outputs(node)[0].numel(), 0):
        operands = made.named.get(node, operands)  # only the shape of an empty share can be wrong
    elif [made.whole.get(operand) for operand in operands] != edit.operands(whole):
        raise Unsound(node, f"is given {operands}, and the whole {edit.operands(whole)}")
    wants = tuple(made.shardings[operand][0] for operand in operands)
    if all(sharding.is_replicated for sharding in (*wants, *gives)):
        _check_arguments(made, node, {})
        return
    rule, option = find_option(made, node, whole, wants, gives)
    if rule.local.keys() & option.cuts.keys():
        raise Unsound(node, "is run as it is, and would be wrong on a share")
    if operands == edit.operands(node):
        _check_arguments(made, node, _own_arguments(rule, option, node, made, here))


def find_option(
    made: Folded, node: fx.Node, whole: fx.Node, wants: Shardings, gives: Sequence[Sharding | None]
) -> tuple[Rule, Option]:
    """Return the rule of an op on the whole, and its only option with these shardings; None for an unused result.

    Raises:
        Unsound: at `node`, if there is no such option.
    """
    values = fx.node.map_arg((whole.args, dict(whole.kwargs)), lambda n: edit.fake(n))
    known = ("rule", id(made.mode), whole.target, key(values), wants, tuple(gives))
    if known not in made.results:
        made.results[known] = _ruled(node, whole, wants, gives, made.mesh)
    rule, option = made.results[known]
    return rule, option


def _ruled(
    node: fx.Node, whole: fx.Node, wants: Shardings, gives: Sequence[Sharding | None], mesh: Mesh
) -> tuple[Rule, Option]:
    try:
        rule = rule_of(whole)
    except RuleError as error:
        raise Unsound(node, f"does not fit its op's rule: {error.message}") from error
    if rule is None:
        raise Unsound(node, "has no rule, and is run on shares")
    option = _option(rule, node, wants, gives, mesh)
    both = shardings(rule, option, mesh)
    if isinstance(both, Refusal):
        raise Unsound(node, f"cannot be run so: {both.text}")
    made = tuple(own if given is None else given for own, given in zip(both[1], gives, strict=True))
    if both != (wants, made):
        said = [", ".join(s.text(mesh) for s in each) for each in (*both, wants, made)]
        raise Unsound(node, f"takes {said[0]} and makes {said[1]} by its rule, and claims {said[2]} and {said[3]}")
    _check_pending(node, rule, option, wants, made)
    return rule, option


def _check_pending(node: fx.Node, rule: Rule, option: Option, wants: Shardings, gives: Shardings) -> None:
    """Check the pending axes by the rule's text alone, without the algorithm that the compiler shares.

    Raises:
        Unsound: a factor is cut that must be whole, an axis cuts a reduced factor and is not pending in an addend or
            an output, or an operand is pending in which the op is not linear.
    """
    if rule.pattern.whole & option.cuts.keys():
        raise Unsound(node, "is cut in a dim that its rule needs whole")
    reduced = {axis: rule.reduce for factor in rule.reduced & option.cuts.keys() for axis in option.cuts[factor].axes}
    taken = [dict(sharding.partial) for sharding in wants]
    passed = {axis: op for each in taken for axis, op in each.items() if axis not in reduced}
    for axis, op in reduced.items():
        terms = {index for index, each in enumerate(taken) if each.get(axis) == op}
        if terms != set(rule.pattern.addends):
            raise Unsound(node, f"reduces over {axis!r}, and its addends alone must be pending there")
    for axis, op in passed.items():
        terms = {index for index, each in enumerate(taken) if axis in each}
        if terms not in map(set, rule.linear) or any(taken[index][axis] != op for index in terms):
            raise Unsound(node, f"is not linear in what it is given pending over {axis!r}")
    for sharding, summed in zip(gives, rule.pattern.sums, strict=True):
        own = {axis: "sum" for factor in summed & option.cuts.keys() for axis in option.cuts[factor].axes}
        if dict(sharding.partial) != {**reduced, **passed, **own}:
            raise Unsound(node, f"leaves { ({**reduced, **passed, **own}) } pending by its rule, and claims {sharding}")


def _option(rule: Rule, node: fx.Node, wants: Shardings, gives: Sequence[Sharding | None], mesh: Mesh) -> Option:
    """Return the only option of the rule for these shardings."""
    candidates: list[Option] = []
    for term, sharding in zip((*rule.pattern.inputs, *rule.pattern.outputs), (*wants, *gives), strict=True):
        if sharding is None:
            continue
        followed = follow(rule, term, sharding.without_partial, mesh)
        if isinstance(followed, Refusal):
            raise Unsound(node, f"cannot be run on {sharding.text(mesh)}: {followed.text}")
        candidates.append(followed)
    cuts = merge(candidates)
    if cuts is None:
        raise Unsound(node, "has operands that are cut differently")
    pending = {axis for f, cut in cuts.cuts.items() if f in rule.reduced for axis in cut.axes}
    for index, sharding in enumerate(wants):
        for axis, op in sharding.partial:
            if axis in pending and index in rule.pattern.addends:
                continue
            through = pass_through(rule, index, axis, op)
            if isinstance(through, Refusal):
                raise Unsound(node, f"cannot be run so: {through.text}")
            candidates.append(through)
    both = merge(candidates)
    if both is None:
        raise Unsound(node, "has operands that wait for different reductions")
    return both


def _own_arguments(
    rule: Rule, option: Option, node: fx.Node, made: Folded, here: Mapping[str, int]
) -> dict[str, list[Size | None]]:
    """Return the rule's local sizes for size arguments; None for entries that stay as in the whole call."""
    mesh, (sharding, *_), out = made.mesh, made.shardings[node], rule.pattern.outputs[0]
    shape = local_shape(sharding, edit.outputs(made.whole[node])[0].shape, mesh, here)
    own: dict[str, list[Size | None]] = {}
    for name, term in rule.sizes.items():
        positions = [out.index(dim) if dim else -1 for dim in term]
        own[name] = [shape[at] if at >= 0 and sharding.dims[at].axes else None for at in positions]
    for name, groups in rule.counts.items():
        if any(f in option.cuts for group in groups for f in group):
            own[name] = [
                sum(local_size(option.cuts.get(f, WHOLE), rule.extent[f], mesh, here) for f in group)
                for group in groups
            ]
    return own


def _check_arguments(made: Folded, node: fx.Node, own: Mapping[str, list[Size | None]]) -> None:
    """Check that all arguments equal the whole call's, except those that the rule names."""
    whole = made.whole[node]
    if not isinstance(node.target, OpOverload):
        return
    theirs, mine = edit.bound(whole), edit.bound(node)
    if node.target in edit.VIEWS and whole.target in edit.VIEWS:
        mine = dict(zip(theirs, mine.values(), strict=True))  # reshape names its size `shape`
    elif node.target != whole.target:
        raise Unsound(node, f"calls {node.target} for a share of {whole.target}")
    for name, value in mine.items():
        wanted = theirs[name]
        if name not in own:
            if not _equal(value, wanted, made):
                raise Unsound(node, f"is given {name}={value}, and the whole {name}={wanted}")
            continue
        entries, wanted = _as_list(value), _as_list(wanted)
        for entry, entry_of_whole, size in zip(entries, wanted, own[name], strict=True):
            if size is None:
                fits = _equal(entry, entry_of_whole, made) or entry_of_whole == -1
            else:
                if isinstance(entry, fx.Node) and reads_data(entry):
                    raise Unsound(node, f"is given {name}={value}, of which '{entry.name}' is read from data")
                fits = statically_equal(edit.fake(entry) if isinstance(entry, fx.Node) else entry, size) or entry == -1
            if not fits:
                raise Unsound(node, f"is given {name}={value}, where its share of {wanted} has {size}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _equal(value: Any, wanted: Any, made: Folded) -> bool:
    """Return True for the same argument: a node for the same value, or an equal constant."""
    return key_of(value, made.whole.get) == key_of(wanted, lambda node: node)


def _read_names(made: Folded, node: fx.Node, values: Sequence[torch.Tensor]) -> tuple[list[list[Any]], bool]:
    """Return a call's result shapes with the file's names for data-dependent sizes, and True if these are proved.

    Torch renames such sizes in every run, while a file has the names of the export.

    The first op that counts something names the count, and others that count the same (`nonzero(m)` after `h[m]`) must
    use that name. Any other name must be believed.

    Raises:
        Unsound: a name that another count has, or another name for the same count.
    """
    given = symbols_of(fx.node.map_arg([node.args, dict(node.kwargs)], lambda used: used.meta.get("val")))
    shapes: list[list[Any]] = []
    symbols: dict[str, Any] = {}
    for value, recorded in zip(values, edit.outputs(node), strict=False):
        shape = list(value.shape)
        for dim, size in enumerate(shape):
            if dim < recorded.ndim and isinstance(size, torch.SymInt) and symbols_of([size]) - given:
                shape[dim] = recorded.shape[dim]
                symbols.setdefault(str(size), recorded.shape[dim])
        shapes.append(shape)
    if not symbols:
        return shapes, True
    names = list(symbols.values())
    what = _counted(made, node)
    if node.meta.get("unbacked_bindings"):
        for other, theirs in made.counts.items():
            if other != what and symbols_of(names) & symbols_of(theirs):
                raise Unsound(node, f"counts {_text(names)}, which is what another op counts")
        made.counts[what] = names
        return shapes, True
    if what not in made.counts:
        return shapes, False
    known = made.counts[what]
    if len(known) != len(names) or not all(map(statically_equal, known, names)):
        raise Unsound(node, f"counts {_text(names)}, and what it counts is {_text(known)}")
    return shapes, True


def _counted(made: Folded, node: fx.Node) -> Any:
    """Return a key for the count of an op: the true elements of masks, the distinct elements, or the op's own count."""
    whole = made.whole[node]
    if node.target in (aten.index.Tensor, aten.nonzero.default):
        masks = edit.operands(whole)
        if node.target is aten.index.Tensor:
            masks = [m for m in masks[1:] if edit.outputs(m)[0].dtype in (torch.bool, torch.uint8, torch.int8)]
        return ("true", *masks)
    if node.target in (aten._unique.default, aten._unique2.default):
        return "different", edit.operands(whole)[0]
    return whole.target, *edit.operands(whole)


def _text(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names))
