"""Explain a value, a parameter or a collective of an artifact: its placement, the reason and the alternatives."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.artifact.collective_records import predict_call
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.cost.timeline import duration
from tpcompiler.errors import ArtifactError, option
from tpcompiler.ir import edit
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.placements import describe_sharding
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import mesh_of
from tpcompiler.ir.text import op_name, value_text
from tpcompiler.plan.plan import Plan
from tpcompiler.report.again import Again, Price, count_kinds, search_again
from tpcompiler.report.written import Operand, Written, read_claimed
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.runtime.artifact import MODEL
from tpcompiler.runtime.records import Collective, Record
from tpcompiler.terminal.printed import format_bytes, nearest_names
from tpcompiler.terminal.tables import Part, Shown, Table

Kind = Literal["op", "parameter", "collective", "input"]
MOST_RUNS = 4  # of elements that a rank holds of a dim, that are listed
EQUAL = 1e-15  # seconds: of equals the search takes the first, by less than that
Placed = tuple[Sharding, torch.Tensor]
NEVER = "never: the plan, the boundary or the ops leave no placement of the whole program with it"


class Slice(Record, frozen=True):
    """The part of a value that ranks hold."""

    ranks: tuple[int, ...]  # that hold it
    shape: str  # local
    indices: str  # of each dim, such as `[0:128, :]`, next to what is still to be reduced


class Alternative(Record, frozen=True):
    """A choice and its price: the least found of the whole program with it, above the least of these."""

    axis: str  # of the mesh, over which it is a choice; those over earlier axes are fixed
    needs: tuple[str, ...]  # of an op, the shardings of its operands
    makes: tuple[str, ...]  # the sharding of the op's results, or of the parameter
    # of a call on the machine, as docs/search.md counts them. None where the plan, the boundary or the ops leave no
    # placement with this choice, or where the cheapest one cannot be carried out
    seconds: float | None
    wire_bytes: int | None  # that a rank sends in a call, above those of the artifact's choice or below
    held_bytes: int | None  # of weights that a rank holds, likewise
    is_chosen: bool  # whether it is the artifact's
    is_tied: bool  # whether it is another one of the same seconds as the artifact's
    failed: str  # why the cheapest placement with it cannot be carried out; empty if it can, or has none
    sends: tuple[str, ...]  # of an op, the collectives of what it reads or makes, such as `4 all_to_all`
    form: str  # the style that makes it a choice, such as `attend_in_turns`; empty if it needs none

    def row(self) -> tuple[str, ...]:
        """Return the table cells."""
        notes = {(True, False): "the artifact's", (False, True): "a tie"}
        return (
            ", ".join(self.makes),
            ", ".join(self.needs),
            ("fails" if self.failed else "never") if self.seconds is None else f"{self.seconds * 1e6:+,.3f}",
            *(
                "" if count is None else f"{'+' * (count >= 0)}{format_bytes(count)}"
                for count in (self.wire_bytes, self.held_bytes)
            ),
            ", ".join(self.sends),
            self.form or notes.get((self.is_chosen, self.is_tied), ""),
        )


class OtherDim(Record, frozen=True):
    """A dim that could be sharded of an operand that is gathered: an all_to_all moves the shards there."""

    operand: str  # the value that the op reads
    axis: str  # of the mesh, over which it is gathered
    dim: int  # of the operand, that an all_to_all could shard instead
    size: str  # of that dim
    seconds: float | None  # of the whole program with it, above the least of the op's choices; None if it is no choice
    sends: tuple[str, ...]  # the collectives of what the op reads or makes then, such as `4 all_to_all`
    reason: str  # for which it is no choice; empty if it is one

    def row(self) -> tuple[str, ...]:
        """Return the table cells."""
        us = "" if self.seconds is None else f"{self.seconds * 1e6:+,.3f}"
        return self.operand, self.axis, f"{self.dim} of {self.size}", us, ", ".join(self.sends) or self.reason


class Explanation(Record, Shown, frozen=True, kw_only=True):
    """The treatment of one value in an artifact, with its reasons."""

    name: str  # of the node of the single-device program, the parameter or the collective
    kind: Kind  # `op`, `parameter`, `collective` or `input`
    what: str  # the op, or the kind of parameter or of collective
    module: str  # the layer
    source: str  # the line of code
    type: str  # dtype and global shape
    sharding: list[str]  # one for each result; of a collective what it changes, `P(sum) -> R`
    words: str  # the same in words
    reason: str  # the plan line, the rule or the search that placed it
    slices: list[Slice]  # which ranks hold what of the first result; sizes that are dynamic are as in the example
    operands: list[Operand]  # the values that it reads
    users: list[str]  # of a parameter, the ops that read it
    collectives: list[Collective]  # those that change what it reads or makes, as in the manifest
    machine: str  # whose seconds are meant
    seconds: float  # that a call of the artifact is predicted to take
    alternatives: list[Alternative]  # every choice over each axis, the cheapest first
    other_dims: list[OtherDim] = []  # of an op, the dims that an all_to_all could shard of the operands that it gathers

    def parts(self) -> Iterator[Part]:
        where = "".join(filter(None, (self.module and f" of {self.module}", self.source and f" at {self.source}")))
        yield f"{self.name}: {self.what}{where}"
        yield f"  {self.type}: {', '.join(self.sharding)}"
        yield from [f"  in words: {self.words}"] if self.words else []
        yield f"  why: {self.reason}"
        yield from [f"  read by: {', '.join(self.users)}"] if self.users else []
        yield ""
        slices = [(" ".join(map(str, each.ranks)), each.shape, each.indices) for each in self.slices]
        yield Table("what ranks hold", ("ranks", "shape", "indices"), slices)
        operands = [(each.name, each.sharding, each.needed) for each in self.operands]
        yield Table("operands", ("name", "sharding", "needed"), operands)
        rows = [
            (
                row.node,
                row.kind,
                format_bytes(row.payload_bytes),
                format_bytes(row.wire_bytes),
                f"{row.why}: {row.reason}",
            )
            for row in self.collectives
        ]
        yield Table("collectives", ("name", "kind", "bytes", "wire bytes", "why"), rows)
        makes = "makes" if any(each.needs for each in self.alternatives) else "sharding"
        axis = "axis" if len({each.axis for each in self.alternatives}) > 1 else ""
        sends = "sends" if any(each.sends for each in self.alternatives) else ""
        headers = (axis, makes, "needs", "us", "wire bytes", "held bytes", sends, "")
        call = f"a call of the artifact takes {duration(self.seconds)} on {self.machine}"
        yield Table(
            f"alternatives (us above the least of these; {call})",
            headers,
            [(axis and each.axis, *each.row()) for each in self.alternatives],
        )
        if self.other_dims:
            over = ("operand", "over", "dim", "us", "sends, or why not")
            yield Table(
                "instead of gathers, with shards of another dim", over, [each.row() for each in self.other_dims]
            )
        said = [f"{', '.join(each.makes)}: fails: {each.failed}" for each in self.alternatives if each.failed]
        if any(each.seconds is None and not each.failed for each in self.alternatives):
            said.append(NEVER)
        yield from (*said, "") if said else ()


@collector_rests()
def explain(program: ArtifactProgram, name: str, machine: str | os.PathLike[str] | None = None) -> Explanation:
    """Explain the placement of a value, a parameter or a collective, and price it (`ParallelProgram.explain`).

    Raises:
        ArtifactError: a file is damaged or, without trust, could run code; or nothing has this name.
        MachineError: the description of the machine cannot be read.
    """
    written = Written.of(program)
    described = machine_of(written.manifest.asked, machine)
    found = written.named(name)
    if found is None:
        known = nearest_names(name, written.names())
        list_all = option(f"tpcompiler inspect {program.title} --rank 0", "show()")
        raise ArtifactError(
            f"{program.title} has no node, parameter or collective {name!r}",
            help=f"did you mean {known}? {list_all} lists all",
        )
    name = found
    again = search_again(program, described)
    record = next((each for each in written.manifest.collectives if each.node == name), None)
    if record is not None:
        return _of_collective(written, again, record)
    leaf = next((node for node, fqn in again.program.leaves() if fqn == name), None)
    if leaf is not None:
        return _of_leaf(written, again, leaf, name)
    return _of_value(written, again, name)


def _of_collective(written: Written, again: Again, record: Any) -> Explanation:
    changed = written.change(record)
    node, leaves = _node(again, changed.name), dict(again.program.leaves())
    found = _of_leaf(written, again, node, leaves[node]) if node in leaves else _of_value(written, again, changed.name)
    mesh, value = mesh_of(written.manifest), edit.fake(node)
    return replace(
        found,
        name=record.node,
        kind="collective",
        what=f"{record.kind} over {record.axis}",
        module=record.module,
        source=record.source,
        sharding=[change := f"{changed.sharding} -> {changed.needed}"],
        words=describe_sharding(change, mesh),
        reason=f"{record.why}: {record.reason}",
        slices=list(_slices(value, read_claimed(changed.needed, mesh, value), mesh)),
        operands=[changed],
        users=[],
        collectives=[record],
        other_dims=list(_other_dims(again, node)) if record.kind == "all_gather" else [],
    )


def _other_dims(again: Again, value: fx.Node) -> Iterator[OtherDim]:
    """Find the dims of a value that the first op that gathers it could shard."""
    for user in (each for each in value.users if each in again.found.choices):
        pairs = zip(edit.operands(user), again.found.choices[user].wants, strict=True)
        if any(operand is value and want != again.found.seen(value) for operand, want in pairs):
            found = _find_other_dims(again, user, again.prices(user, {edit.module_path(user)}))
            return (each for each in found if each.operand == value.name)
    return iter(())


def _of_value(written: Written, again: Again, name: str) -> Explanation:
    mesh, node = mesh_of(written.manifest), _node(again, name)
    is_input = node.op == "placeholder"
    rows = [row.sharding for row in written.manifest.inputs if row.name == name]
    shardings, reason = (rows, "an input") if is_input else written.placed(name)
    tensors = edit.outputs(node)
    placed = [read_claimed(text, mesh, value) for text, value in zip(shardings, tensors, strict=False)]
    weights = [(leaf, fqn) for leaf, fqn in again.program.leaves() if leaf in edit.operands(node)]
    layers = {layer_of(fqn) for _, fqn in weights}
    asked = [(fqn, again.pinned_by(leaf)) for leaf, fqn in weights if again.program.is_searched]
    pins = [f"'{fqn}' is {entry}" for fqn, entry in asked if entry]  # a complete plan is in the reason
    is_call = node in again.found.choices
    prices = again.prices(node, layers) if is_call else []
    prices += [turns] if prices and (turns := again.price_turns(node, prices[-1].axes)) else []
    wants = again.found.choices[node].wants if is_call else ()
    reads = [edit.fake(operand) for operand in edit.operands(node)]
    made, taken = list(zip(placed, tensors, strict=False)), list(zip(wants, reads, strict=False))
    sent = written.sent(name)
    own = [
        replace(each, sends=count_kinds(record.kind for record in sent)) if each.is_chosen else each
        for each in _priced(prices, made, taken, again.found.mesh)
    ]
    return Explanation(
        name=name,
        kind="input" if is_input else "op",
        what="input" if is_input else op_name(node),
        module=edit.module_path(node),
        source=edit.source_line(node),
        type=", ".join(map(value_text, tensors)),
        sharding=shardings,
        words="; ".join(dict.fromkeys(describe_sharding(text, mesh) for text in shardings)),
        reason="; ".join([reason, *pins]),
        slices=list(_slices(tensors[0], placed[0], mesh)) if placed else [],
        operands=written.operands(name),
        users=[],
        collectives=sent,
        machine=again.machine.name,
        seconds=predict_call(written.graph, written.manifest, again.machine).total.total,
        alternatives=own,
        other_dims=list(_find_other_dims(again, node, prices)) if is_call else [],
    )


def _of_leaf(written: Written, again: Again, node: fx.Node, name: str) -> Explanation:
    mesh, value = mesh_of(written.manifest), edit.fake(node)
    row = next(row for row in written.manifest.tensors if row.name == name)
    placed, users = read_claimed(row.sharding, mesh, value), written.users(name)
    sent = {record.node: record for user in users for record in written.sent(user)}
    alternatives = _priced(again.prices(node, {layer_of(name)}), [(placed, value)], [], again.found.mesh)
    return Explanation(
        name=name,
        kind="parameter",
        what=row.kind,
        module=layer_of(name),
        source="",
        type=value_text(value),
        sharding=[row.sharding],
        words=describe_sharding(row.sharding, mesh),
        reason=_why(again, node, name, users, written),
        slices=list(_slices(value, placed, mesh)),
        operands=[],
        users=users,
        collectives=list(sent.values()),
        machine=again.machine.name,
        seconds=predict_call(written.graph, written.manifest, again.machine).total.total,
        alternatives=alternatives,
    )


def _why(again: Again, node: fx.Node, name: str, users: Sequence[str], written: Written) -> str:
    if asked_by := again.pinned_by(node):
        return asked_by
    found = again.found.styles
    style = found.get(layer_of(name)) or found.get(weight_of(name))
    uses = "; ".join(f"{user}: {written.placed(user)[1]}" for user in users)
    if style and (asked_by := again.layer_pinned_by(name)):
        return f"follows its layer: {asked_by}"
    own = _style_in_plan(written, name)
    if style and own and own != style:  # a plan that names all layers, by a person or by a search for another machine
        return f"the artifact's plan: {own} (a search for {again.machine.name}: {style})"
    return f"the search: {style}" if style else f"as its uses want it ({uses})"


def _style_in_plan(written: Written, name: str) -> str:
    """Return the style that the artifact's plan, completed by the search, gives a tensor's layer; or ""."""
    entries = [entry for entry in Plan.of(written.manifest.plan).entries if entry.pattern != "**"]
    return next((each.style.name for each in entries if any(map(each.matches, (name, layer_of(name))))), "")


def _node(again: Again, name: str) -> fx.Node:
    found: fx.Node | None = next((node for node in again.program.graph.nodes if node.name == name), None)
    if found is None:
        raise ArtifactError(
            f"{MODEL} has no value {name!r}, which a rank's program names", help="convert the model again"
        )
    return found


def _priced(prices: Sequence[Price], made: Sequence[Placed], wants: Sequence[Placed], mesh: Mesh) -> list[Alternative]:
    """The alternatives of each axis, the cheapest first. `made` and `wants`: of the artifact."""
    least = min((price.seconds for price in prices if price.seconds is not None), default=None)
    alternatives = list[Alternative]()
    for axes in dict.fromkeys(price.axes for price in prices):
        own_made, own_wants = (
            tuple(sharding.restrict_to(axes, value.shape, mesh) for sharding, value in each) for each in (made, wants)
        )
        own = [price for price in prices if price.axes == axes]
        alternatives += _of_axis(own, own_made, own_wants, least, mesh)
    return alternatives


def _of_axis(
    prices: Sequence[Price], made: tuple[Sharding, ...], wants: tuple[Sharding, ...], least: float | None, mesh: Mesh
) -> list[Alternative]:
    alike = [price for price in prices if price.made == made and not price.form]
    needs = [price for price in alike if not price.wants or price.wants == wants]
    chosen = next(iter(needs or alike), None)
    at = chosen.seconds if chosen else None

    def told(price: Price) -> Alternative:
        is_tied = at is not None and price.seconds is not None and abs(price.seconds - at) < EQUAL
        return Alternative(
            price.axes[-1],
            tuple(each.text(mesh) for each in price.wants),
            tuple(each.text(mesh) for each in price.made),
            None if price.seconds is None or least is None else price.seconds - least,
            _minus(price.wire_bytes, chosen and chosen.wire_bytes),
            _minus(price.held_bytes, chosen and chosen.held_bytes),
            is_chosen=price is chosen,
            is_tied=is_tied and price is not chosen,
            failed=price.failed,
            sends=price.sends,
            form=price.form,
        )

    def place(price: Price) -> tuple[float, bool]:
        return math.inf if price.seconds is None else price.seconds, price is not chosen

    return [told(price) for price in sorted(prices, key=place)]


def _minus(count: int | None, other: int | None) -> int | None:
    return None if count is None or other is None else count - other


def _slices(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> Iterator[Slice]:
    held: dict[tuple[str, str], list[int]] = {}
    for rank in range(mesh.world_size):
        here = mesh.coordinate(rank)
        shape = ", ".join(map(str, sharding.local_shape(value.shape, mesh, here)))
        dims = (
            _listed(by.runs(sym_hint(size), mesh, here)) if by.axes else ":"
            for size, by in zip(value.shape, sharding.dims, strict=True)
        )
        pending = "".join(f", a {op} pending over {axis}" for axis, op in sharding.join_factors(mesh)[0].partial)
        held.setdefault((f"[{shape}]", f"[{', '.join(dims)}]{pending}"), []).append(rank)
    yield from (Slice(tuple(ranks), *both) for both, ranks in held.items())


def _listed(runs: Sequence[range]) -> str:
    """`0:4 8:12`."""
    told = [f"{run.start}:{run.stop}" for run in runs[:MOST_RUNS]]
    return " ".join(told or ["none"]) + (" .." if len(runs) > MOST_RUNS else "")


def _find_other_dims(again: Again, op: fx.Node, prices: Sequence[Price]) -> Iterator[OtherDim]:
    """Find the dims that an op could shard of the operands that it gathers, with the price of each or why it has none.

    Args:
        prices: those of every choice of the op.
    """
    rule, wants = rule_of(op), again.found.choices[op].wants
    least = min((price.seconds for price in prices if price.seconds is not None), default=0.0)
    for at, (operand, want) in enumerate(zip(edit.operands(op), wants, strict=True)):
        have = again.found.seen(operand)
        for axis in (each for each in have.cut_axes if each not in want.axes):
            for dim, size in enumerate(edit.shape(operand)):
                if axis in have.dims[dim].axes:
                    continue
                alike = [each for each in prices if each.wants and axis in each.wants[at].dims[dim].axes]
                priced = [(each.seconds, each.sends) for each in alike if each.seconds is not None]
                seconds, sends = min(priced, default=(None, ()))
                reason = "" if priced else NEVER if alike else _reason(rule, at, dim, again.found.mesh.degree(axis))
                above = None if seconds is None else seconds - least
                yield OtherDim(operand.name, again.found.mesh.text((axis,)), dim, str(size), above, sends, reason)


def _reason(rule: Rule | None, at: int, dim: int, degree: int) -> str:
    """Say why a dim is no choice of an op."""
    if rule is None:
        return "the op has no rule, so it runs whole"
    factors = rule.pattern.inputs[at][dim]
    if factors and all(factor in rule.pattern.whole for factor in factors):
        return "the op needs it whole"
    sizes = [extent for factor in factors if isinstance(extent := rule.extent[factor], int)]
    if len(sizes) == len(factors) and max(sizes, default=1) < degree:
        return f"it has fewer than {degree} parts"
    return "left out: the op can take the operand as it is sharded, or has too many choices"
