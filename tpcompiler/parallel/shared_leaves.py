"""Leaves that share memory with another one, in part or in another order of dims: shares of them cannot."""

from __future__ import annotations

from tpcompiler.errors import ShardingError
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.program import PlacedProgram
from tpcompiler.ir.shared_memory import find_shared, is_same_view


def refuse_cut_shared(program: PlacedProgram) -> None:
    """Refuse to cut a leaf that changes with another one, or lets it change: ranks would hold old values.

    Raises:
        ShardingError: two leaves share memory, not as a whole, of which one is trained or written, and one is cut.
    """
    changed = {name for _, name in (*program.gradients(), *program.mutations())}
    if not changed:
        return
    nodes = {fqn: node for node, fqn in program.leaves()}
    values = {fqn: program.state(fqn) for fqn in nodes}
    for one, other in find_shared(values):
        if changed.isdisjoint((one, other)) or is_same_view(values[one], values[other]):
            continue
        shardings = {fqn: placement_of(nodes[fqn]).shardings[0] for fqn in (one, other)}
        if cut := next((fqn for fqn, sharding in shardings.items() if not sharding.is_replicated), None):
            raise ShardingError(
                f"{one!r} {list(values[one].shape)} and {other!r} {list(values[other].shape)} share memory, so a "
                f"change of one changes the other, and {cut!r} is sharded as {shardings[cut].text(program.mesh)}: the "
                "shares of ranks cannot share it",
                help="give both the style replicate in the plan, or compute one from the other in the forward",
            )
