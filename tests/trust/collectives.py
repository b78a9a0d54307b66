"""Damages of collectives, and of the slices and pads beside them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import fx

from tests.trust.damage import Artifact, at, claim, inserted, kind, members, region, shape, static
from tests.zoo.faults import local_stand_in
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim

aten = torch.ops.aten
Site = Sequence[fx.Node]


def _starts(artifact: Artifact, name: str = "", op: str | None = None) -> list[tuple[fx.Node, ...]]:
    return artifact.each(
        lambda n: edit.is_collective(n) and name in str(n.target) and (op is None or op in (n.args[1], n.args[-3]))
    )


def _wait(start: fx.Node) -> fx.Node:
    return next(iter(start.users))


def _operand(start: fx.Node) -> fx.Node:
    (operand,) = start.all_input_nodes
    return operand


def _without(start: fx.Node) -> None:
    wait = _wait(start)
    wait.replace_all_uses_with(_operand(start))
    edit.erase(wait)
    edit.erase(start)


@kind
def no_all_reduce(artifact: Artifact, nth: int) -> bool:
    """A reduction is left out, and all else says what it said."""
    site = at(_starts(artifact, "all_reduce"), nth)
    for start in site or ():
        _without(start)
    return site is not None


@kind
def no_all_reduce_and_no_word_of_it(artifact: Artifact, nth: int) -> bool:
    """A reduction is left out, and what it reduced claims to be reduced already."""
    sites = [site for site in _starts(artifact, "all_reduce") if read_claim(_operand(site[0])).sharding is not None]
    site = at(sites, nth)
    for start in site or ():
        claim(_operand(start))["sharding"] = read_claim(_wait(start)).sharding
        _without(start)
    return site is not None


@kind
def no_all_reduce_on_one_rank(artifact: Artifact, nth: int) -> bool:
    """One rank does not come to a reduction."""
    site = at(_starts(artifact, "all_reduce"), nth)
    if site is not None:
        _without(site[-1])
    return site is not None


@kind
def nothing_from_other_ranks(artifact: Artifact, nth: int) -> bool:
    """A gather (scatter, exchange) is made of what the rank has itself, of the same shape."""
    sites = [s for s in _starts(artifact) if "all_reduce" not in str(s[0].target) and static(s[0])]
    site = at(sites, nth)
    for start in site or ():
        wait = _wait(start)
        before = set(start.graph.nodes)
        with start.graph.inserting_before(start):
            local = local_stand_in(start.graph, start, start.all_input_nodes[0])
        for node in (n for n in start.graph.nodes if n not in before):
            node.meta = {**start.meta, "custom": copy.deepcopy(start.meta["custom"])}
            with torch.no_grad():
                args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args)
        wait.replace_all_uses_with(local)
        edit.erase(wait)
        edit.erase(start)
    return site is not None


@kind
def all_reduced_twice(artifact: Artifact, nth: int) -> bool:
    """A sum is summed again. (A maximum of a maximum is the same: not done there.)"""
    site = at(_starts(artifact, "all_reduce", "sum"), nth)
    for start in site or ():
        _again(start)
    return site is not None


@kind
def all_reduced_twice_in_two_changes(artifact: Artifact, nth: int) -> bool:
    """A sum is summed again, and claims to be pending until then."""
    site = at(_starts(artifact, "all_reduce", "sum"), nth)
    for start in site or ():
        first, pending = _wait(start), str(read_claim(start).change).partition(" -> ")[0]
        _again(start)
        for node in (start, first):
            claim(node)["reshard"] = f"{read_claim(node).reshard}_before"
            claim(node)["change"] = f"{pending} -> {pending}"
        claim(first)["sharding"] = [pending]
    return site is not None


def _again(start: fx.Node) -> None:
    wait = _wait(start)
    users = set(wait.users)
    again = inserted(wait.next, start.target, (wait, *start.args[1:]), start)
    second = inserted(again.next, wait.target, (again,), wait)
    wait.replace_all_uses_with(second, delete_user_cb=lambda user: user in users)


def _reduced_by(op: str) -> Callable[[Artifact, int], bool]:
    def damage(artifact: Artifact, nth: int) -> bool:
        site = at(_starts(artifact, "reduce", "sum"), nth)
        for start in site or ():
            start.args = tuple(op if arg == "sum" else arg for arg in start.args)
        return site is not None

    damage.__doc__ = f"A sum over ranks is their {op}, on all ranks."
    damage.__name__ = f"reduced_by_{op}"
    return kind(damage)


reduced_by_max, reduced_by_avg = _reduced_by("max"), _reduced_by("avg")


@kind
def reduced_by_another_op_on_one_rank(artifact: Artifact, nth: int) -> bool:
    """One rank asks for the minimum of what the others add."""
    site = at(_starts(artifact, "reduce", "sum"), nth)
    if site is not None:
        site[-1].args = tuple("min" if arg == "sum" else arg for arg in site[-1].args)
    return site is not None


def _other_group(artifact: Artifact, start: fx.Node) -> str | None:
    """A group of as many ranks, but other ones."""
    groups = artifact.manifest.groups
    own = groups[str(start.args[-1])]
    return next((n for n, g in groups.items() if g != own and len(g[0]) == len(own[0])), None)


@kind
def another_group(artifact: Artifact, nth: int) -> bool:
    """A collective runs over another axis, on all ranks."""
    site = at([site for site in _starts(artifact) if _other_group(artifact, site[0])], nth)
    for start in site or ():
        start.args = (*start.args[:-1], _other_group(artifact, start))
    return site is not None


@kind
def another_group_on_one_rank(artifact: Artifact, nth: int) -> bool:
    """One rank meets others than those that wait for it."""
    site = at([site for site in _starts(artifact) if _other_group(artifact, site[0])], nth)
    if site is not None:
        site[-1].args = (*site[-1].args[:-1], _other_group(artifact, site[-1]))
    return site is not None


@kind
def two_collectives_in_another_order(artifact: Artifact, nth: int) -> bool:
    """One rank starts two collectives in the other order.

    Only two over one group: over others, each group meets as before, and nothing is another value.
    """
    starts = [node for node in edit.calls(artifact.last.graph) if edit.is_collective(node)]
    places = {node: place for place, node in enumerate(artifact.last.graph.nodes)}
    found = []
    for one, two in itertools.pairwise(starts):
        needed, todo = {two}, [two]
        while todo:
            new = {n for n in todo.pop().all_input_nodes if places[n] >= places[one]} - needed
            needed |= new
            todo += new
        if one not in needed and one.args[-1] == two.args[-1]:
            found.append((one, sorted(needed, key=places.__getitem__)))
    pair = at(found, nth)
    for node in pair[1] if pair else ():
        pair[0].prepend(node)
    return pair is not None


@kind
def no_wait(artifact: Artifact, nth: int) -> bool:
    """What a collective is still writing is read."""
    site = at(_starts(artifact), nth)
    for start in site or ():
        wait = _wait(start)
        start.meta["custom"] = wait.meta["custom"]
        wait.replace_all_uses_with(start)
        edit.erase(wait)
    return site is not None


@kind
def two_waits(artifact: Artifact, nth: int) -> bool:
    """A collective is waited for twice."""
    site = at(_starts(artifact), nth)
    for start in site or ():
        wait = _wait(start)
        user = next(iter(wait.users))
        second = inserted(wait.next, wait.target, (start,), wait)
        user.replace_input_with(wait, second)
    return site is not None


@kind
def read_before_the_wait(artifact: Artifact, nth: int) -> bool:
    """One user takes the start of a collective, the others wait."""
    site = at([site for site in _starts(artifact) if all(len(_wait(s).users) > 1 for s in site)], nth)
    for start in site or ():
        next(iter(_wait(start).users)).replace_input_with(_wait(start), start)
    return site is not None


@kind
def gathered_along_the_first_dim(artifact: Artifact, nth: int) -> bool:
    """What ranks have is put together along dim 0, whatever dim they cut.

    Where all dims before the cut one are of size 1 the two are the same, and it is not done.
    """
    sites = []
    for site in _starts(artifact, "all_gather"):
        ends = [members(start)[-1] for start in site]
        cut = str(read_claim(ends[0]).change).partition("S(")[2][:1]
        before = shape(ends[0])[: int(cut)] if cut.isdigit() else []
        if static(ends[0]) and any(size > 1 for size in before) and _count(site[0]) == _count(ends[0]):
            sites.append(tuple(zip(site, ends, strict=True)))
    site = at(sites, nth)
    for start, end in site or ():
        flat = inserted(end, aten.reshape.default, (_wait(start), shape(end)), end)
        end.replace_all_uses_with(flat)
        for node in reversed(list(members(start))):
            if not node.users and node is not flat and node not in (start, _wait(start)):
                edit.erase(node)
    return site is not None


def _count(node: fx.Node) -> int:
    return torch.Size(shape(node)).numel()


@kind
def reduced_in_half_precision(artifact: Artifact, nth: int) -> bool:
    """A sum over ranks is made in bfloat16."""
    site = at([s for s in _starts(artifact, "all_reduce") if s[0].meta["val"].dtype == torch.float32], nth)
    for start in site or ():
        wait, operand = _wait(start), _operand(start)
        down = inserted(start, aten._to_copy.default, (operand,), start)
        down.kwargs = {"dtype": torch.bfloat16}
        start.args = (down, *start.args[1:])
        for node in (down, start):
            node.meta["val"] = node.meta["val"].to(torch.bfloat16)
        up = inserted(wait.next, aten._to_copy.default, (wait,), wait)
        up.kwargs = {"dtype": torch.float32}
        wait.replace_all_uses_with(up, delete_user_cb=lambda user, up=up: user is not up)
        wait.meta["val"] = wait.meta["val"].to(torch.bfloat16)
    return site is not None


@kind
def one_row_to_the_wrong_rank(artifact: Artifact, nth: int) -> bool:
    """In an exchange, ranks 0 and 1 send one row more to each other and one less to themselves."""
    site = at([site for site in _starts(artifact, "all_to_all") if _row_to_spare(site)], nth)
    for rank, start in enumerate((site or ())[:2]):
        own, other = rank, 1 - rank
        for index in (1, 2):
            sizes = list(start.args[index])  # type: ignore[call-overload]
            sizes[own], sizes[other] = sizes[own] - 1, sizes[other] + 1
            start.update_arg(index, sizes)
    return site is not None


def _row_to_spare(site: Site) -> bool:
    lists = [arg for start in site for arg in start.args[1:3]]
    return all(isinstance(arg, (list, tuple)) and all(isinstance(n, int) for n in arg) for arg in lists) and all(
        site[rank].args[index][rank] > 0 for rank in (0, 1) for index in (1, 2)
    )


@kind
def a_slice_shifted_by_one(artifact: Artifact, nth: int) -> bool:
    """One rank's slice, in a change or a body, begins and ends one later (or earlier, where it ends with the whole)."""
    found = []
    for node in edit.calls(artifact.last.graph):
        if node.target is aten.slice.Tensor and region(node) and static(node.all_input_nodes[0]):
            bound = edit.bound(node)
            size = shape(node.all_input_nodes[0])[bound["dim"]]
            start, end = bound["start"] or 0, min(size if bound["end"] is None else bound["end"], size)
            shift = 1 if end < size else -1 if start > 0 else 0
            if shift and isinstance(start, int) and end > start:
                found.append((node, bound["dim"], start + shift, end + shift))
    place = at(found, nth)
    if place:
        node, dim, start, end = place
        node.args, node.kwargs = (node.args[0], dim, start, end), {}
    return place is not None


@kind
def the_share_of_another_rank(artifact: Artifact, nth: int) -> bool:
    """Where the last rank takes its part of a whole, it takes the first rank's."""
    parts = [n for n in edit.calls(artifact.last.graph) if n.target is aten.index_select.default and region(n)]
    node = at([part for part in parts if 0 not in shape(part)], nth)
    if node is not None:
        whole, dim, _ = node.args
        node.target, node.args = aten.slice.Tensor, (whole, dim, 0, shape(node)[dim])  # type: ignore[index]
    return node is not None


@kind
def padded_on_the_other_side(artifact: Artifact, nth: int) -> bool:
    """What makes uneven shares equal for a gather is put before them, on the rank that needs it."""

    def where(node: fx.Node) -> bool:
        return node.target is aten.cat.default and any(n.target is aten.new_zeros.default for n in node.all_input_nodes)

    node = at([node for node in edit.calls(artifact.last.graph) if region(node) and where(node)], nth)
    if node is not None:
        node.update_arg(0, list(reversed(node.args[0])))  # type: ignore[call-overload]
    return node is not None
