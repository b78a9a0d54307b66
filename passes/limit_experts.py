"""Let experts take no more rows than their capacity: the single-device program, with the rows that ranks drop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tpcompiler._torch import aten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import CanonicalProgram, Dispatch
from tpcompiler.ir.region import Region
from tpcompiler.ir.sizes import sym_quotient
from tpcompiler.passes._routes import Route, find_routes
from tpcompiler.passes.apply_plan import names_of
from tpcompiler.passes.regions.dispatch_experts import Places
from tpcompiler.passes.regions.spread_experts import leaf_behind
from tpcompiler.plan.plan import Plan, PlanEntry
from tpcompiler.runtime.artifact import DROPPED


def limit_experts(program: CanonicalProgram, plan: Plan, mesh: Mesh) -> CanonicalProgram:
    """Drop the rows that find no place with their expert, where the plan gives experts a capacity.

    Before    expert, order = sort(ids); y = grouped_mm(x[order // k], w, ends)
              return y[order.argsort()]
    After     dropped = the rows of a rank, in order, behind the first c of their expert
              return y.masked_fill(dropped[order], 0)[order.argsort()]

    Dropping changes the model, so the model of the artifact drops too: all ranks are compared with it. Each rank has a
    capacity for its own tokens.

    Raises:
        PlanError: the program drops other rows already.
    """
    if not any(entry.style.capacity for entry in plan.entries):
        return program
    graph, names = edit.copy_graph(program.graph), names_of(program)
    assigned, fqns = plan.assign(names), {node.name: fqn for node, fqn in program.leaves()}
    with no_new_guards(graph):
        for route in find_routes(graph):
            leaf = leaf_behind(edit.operands(route.calls[0])[1])
            entry = _entry(assigned, fqns.get(leaf.name, "")) if leaf is not None else None
            if entry is None or entry.style.capacity is None:
                continue
            axis = entry.style.axis if entry.style.axis in mesh.names else mesh.model_axis
            _limit(route, Dispatch(axis, entry.style.capacity, entry.where), mesh.degree(axis))
    return replace(program, graph=graph)


def _entry(assigned: dict[str, PlanEntry], fqn: str) -> PlanEntry | None:
    found = (assigned.get(name) for name in (fqn, weight_of(fqn), layer_of(fqn), fqn.rpartition(".")[0]))
    return next((entry for entry in found if entry is not None and entry.style.dispatches), None)


def _limit(route: Route, asked: Dispatch, ranks: int) -> None:
    if sym_quotient(route.rows, ranks) is None:
        return  # a dynamic number, which is divided later
    masks = [each.value for each in route.sources.values() if edit.fake(each.value).dtype is torch.bool]

    def find_dropped(ids: Tensor) -> Tensor:
        own = aten.unflatten.int(ids, 0, [ranks, -1])
        places = Places.of(own, route.experts, route.experts)
        behind: Tensor = places.place >= asked.slots(own.shape[1], route.experts)
        return behind.scatter(1, places.order, behind).flatten(0, 1)

    if any(route.equals(mask, find_dropped) for mask in masks):
        return  # the model of an artifact
    if any(mask.name.startswith(DROPPED) for mask in masks):
        raise PlanError(
            f"the model drops rows of '{route.end.name}' already, for another number of ranks or another capacity",
            help="convert the original model, which drops none",
            asked_by=asked.asked_by,
        )
    dropped = edit.insert_before(route.end, aten.ne.Scalar, (route.ids, 0), DROPPED)
    edit.record(dropped, torch.empty_like(edit.fake(route.ids), dtype=torch.bool))
    edit.inherit_meta(dropped, route.end)
    (*_, mask) = Region(dropped, [route.ids], find_dropped, asked_by=asked.asked_by).write()
    end = route.end
    rows = edit.operands(end)

    def mask_rows(dropped_rows: Tensor, order: Tensor, *values: Tensor) -> Any:
        masked = dropped_rows[order]

        def change(at: int, operand: fx.Node) -> Any:
            if operand is not route.last:
                return values[at]
            return values[at].masked_fill(masked.view(-1, *[1] * (values[at].ndim - 1)), 0)

        args, kwargs = edit.map_operands(end, change)
        return end.target(*args, **kwargs)  # type: ignore[operator]

    Region(end, [mask, route.order, *rows], mask_rows, asked_by=asked.asked_by).write()
