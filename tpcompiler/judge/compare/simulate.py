"""Run all ranks of a program in lock step, in one process, without process groups.

Each rank is a generator that runs its graph up to a collective, yields its operand and waits; when all ranks of its
group wait at the same collective, it is computed and they continue. Graphs may differ by rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from tpcompiler._torch import RETURNED_KINDS, WRITTEN_KINDS, tree_map
from tpcompiler.errors import ArtifactError, UnsupportedError
from tpcompiler.frontend.written_back import find_written
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import groups_named
from tpcompiler.ir.shares import REDUCE
from tpcompiler.judge.compare.promote import Promoted
from tpcompiler.terminal.progress import reporting

Seen = Callable[[int, fx.Node, Any], None]
RandomState = tuple[torch.Tensor, torch.Tensor | None]
T = TypeVar("T")
WEIGHTS = (InputKind.PARAMETER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class RankResult:
    """Flat user outputs, the values written back by name of the buffer or input, and the final generator state.

    Values written back include the weights, buffers and inputs that an op has changed in place, even if neither the
    signature nor the op's schema declares it: `instance_norm` in training changes its statistics undeclared.
    """

    outputs: list[Any]
    mutated: dict[str, torch.Tensor]
    drawn: RandomState | None = None  # unknown for separate processes


@dataclass(frozen=True)
class Waiting:
    """A rank at a collective, with its operand."""

    kind: str
    value: torch.Tensor
    details: tuple[Any, ...]
    node: str


def simulate(
    programs: Sequence[ExportedProgram | Promoted],
    flat_inputs: Sequence[Sequence[Any]],
    *,
    state: Sequence[Mapping[str, torch.Tensor]] | None = None,
    seen: Seen | None = None,
    failed: dict[int, Exception] | None = None,
) -> list[RankResult]:
    """Run rank i's program on rank i's flat inputs; state is cloned, the programs are unchanged.

    Every rank draws random numbers from the caller's seed, and the caller's generators are unchanged.

    Args:
        programs: one per rank. A group's name determines its ranks (`mesh.groups_named`); other groups span all ranks.
        flat_inputs: per rank, the flattened user inputs (`runtime/inputs.py`).
        state: per rank, buffers that replace the program's own: those that an earlier call has written.
        seen: called as `seen(rank, node, value)` for every value.
        failed: as in `lock_step`.

    Raises:
        ArtifactError: ranks wait at different collectives, which would hang or mix up data on real devices.
    """
    report = reporting("running the ranks" if len(programs) > 1 else "running the model", "ops")
    ran, total = itertools.count(1), sum(len(program.graph.nodes) for program in programs)
    report(0, total)
    return lock_step(
        [
            _run(
                program, inputs, rank, state[rank] if state is not None else {}, seen, lambda: report(next(ran), total)
            )
            for rank, (program, inputs) in enumerate(zip(programs, flat_inputs, strict=True))
        ],
        failed,
    )


def lock_step(runs: Sequence[Generator[Waiting, Any, T]], failed: dict[int, Exception] | None = None) -> list[T]:
    """Run all ranks and return their results; a run yields at every collective, and receives the answer from its group.

    Args:
        failed: receives the errors of ranks, which are raised if it is None. Ranks that wait for a failed rank fail
            with
            its error, as in the runtime, and only the results of the others are returned.

    Raises:
        ArtifactError: ranks wait at different collectives.
    """
    results: dict[int, T] = {}
    answers: dict[int, torch.Tensor] = {}
    waiting: dict[int, Waiting] = {}
    now = random_state()
    drawn = [now] * len(runs)
    try:
        with torch.inference_mode(False), torch.no_grad():  # inference mode does not count writes
            while True:
                for rank, run in enumerate(runs):
                    if rank not in results and rank not in waiting and rank not in (failed or ()):
                        set_random_state(drawn[rank])
                        try:
                            waiting[rank] = run.send(answers.get(rank))
                        except StopIteration as stop:
                            results[rank] = stop.value
                        except Exception as error:
                            if failed is None:
                                raise
                            failed[rank] = error
                        drawn[rank] = random_state()
                if not waiting:
                    return [results[rank] for rank in range(len(runs)) if rank in results]
                if failed and (left := _without_answer(waiting, failed, len(runs))):
                    failed |= {rank: failed[cause] for rank, cause in left.items()}
                    waiting = {rank: call for rank, call in waiting.items() if rank not in failed}
                    answers = {}
                else:
                    answers = _collectives(waiting, len(runs))
    finally:
        set_random_state(now)


def random_state() -> RandomState:
    """Return the state of the generators of the CPU, and of the current GPU if it was used."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), gpu


def set_random_state(state: RandomState) -> None:
    cpu, gpu = state
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)


def _run(
    program: ExportedProgram | Promoted,
    inputs: Sequence[Any],
    rank: int,
    state: Mapping[str, torch.Tensor],
    seen: Seen | None,
    ran: Callable[[], None],
) -> Generator[Waiting, torch.Tensor | None, RankResult]:
    waiting: dict[fx.Node, Any] = {}
    env = _Values(lambda node: _input(program, waiting[node], feed, state))
    targets = {s.target for s in program.graph_signature.output_specs if s.kind in WRITTEN_KINDS}
    written = program.written if isinstance(program, Promoted) else find_written(program)
    held: dict[str, Any] = {}
    feed = iter(inputs)
    specs = iter(program.graph_signature.input_specs)
    outputs: list[Any] = []
    last_use = _last_uses(program.graph)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            name = str(node.name if spec.kind is InputKind.USER_INPUT else spec.target)
            if seen is None and spec.kind in WEIGHTS and name not in targets and name not in written:
                waiting[node] = spec
                ran()
                continue
            env[node] = _input(program, spec, feed, state)
            held[name] = env[node]
        elif node.op == "output":
            outputs = [env[a] if isinstance(a, fx.Node) else a for a in node.args[0]]
        elif node.op == "get_attr":
            env[node] = program.graph_module.get_submodule(str(node.target))
        else:
            env[node] = yield from run_call(node, env)
            if edit.is_collective(node):  # ranks share one tensor, and an op may write to its own
                env[node] = tree_map(torch.clone, env[node])
        if seen is not None and node.op != "output":
            seen(rank, node, env[node])
        for dead in last_use.get(node, ()):
            env.pop(dead, None)
        ran()
    user, mutated = [], {}
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind in RETURNED_KINDS:
            user.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else value)
        elif spec.target is not None:
            mutated[spec.target] = _written_back(held.get(spec.target), value)
    changed = {
        name: value
        for name, value in held.items()
        if isinstance(value, torch.Tensor) and (value._version or name in written) and name not in mutated
    }
    return RankResult(user, mutated | changed, random_state())


class _Values(dict[fx.Node, Any]):
    """Values by node; a weight is read when an op needs it, and freed after its last use, to save memory."""

    def __init__(self, read: Callable[[fx.Node], Any]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, node: fx.Node) -> Any:
        value = self[node] = self._read(node)
        return value


def _written_back(held: Any, value: Any) -> Any:
    """Write an output back like torch's module: an output in the memory of the buffer changes with it."""
    both = isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor)
    return held.copy_(value) if both and held.shape == value.shape else value


def run_call(node: fx.Node, env: Mapping[fx.Node, Any]) -> Generator[Waiting, torch.Tensor | None, Any]:
    """Run a call on the values in `env`."""
    args: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
    if edit.is_collective(node):
        kind, details = str(node.target).split(".")[1], tuple(args[1:])
        if kind != "all_reduce_coalesced":
            return (yield Waiting(kind, args[0], details, node.name))
        results = []
        for value in args[0]:
            results.append((yield Waiting("all_reduce", value, details, node.name)))
        return results
    return args[0] if edit.is_wait(node) else node.target(*args, **kwargs)  # type: ignore[operator]


def _input(program: ExportedProgram | Promoted, spec: Any, feed: Any, state: Mapping[str, torch.Tensor]) -> Any:
    if spec.kind is InputKind.USER_INPUT:
        value = next(feed)
    elif spec.target in state:
        value = state[spec.target]
    else:
        value = program.state_dict.get(spec.target)
        value = value if value is not None else program.constants[spec.target]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    out: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        if user.op != "output" and node.op != "output":
            out.setdefault(user, []).append(node)
    return out


def _collectives(waiting: dict[int, Waiting], world: int) -> dict[int, torch.Tensor]:
    """Return the answers for all ranks whose group has reached one collective, and remove them from `waiting`."""
    answers: dict[int, torch.Tensor] = {}
    for rank, call in waiting.items():
        group = _group(call, rank, world)
        if rank not in answers and all(r in waiting and _call(waiting[r]) == _call(call) for r in group):
            answers.update(zip(group, _collective([waiting[r] for r in group]), strict=True))
    if not answers:
        first = min(waiting)
        other = next(
            r
            for r in _group(waiting[first], first, world)
            if r not in waiting or _call(waiting[r]) != _call(waiting[first])
        )
        at = f"{_call(waiting[other])} ('{waiting[other].node}')" if other in waiting else "the end"
        raise ArtifactError(
            f"ranks disagree: rank {first} is at {_call(waiting[first])} ('{waiting[first].node}'), "
            f"rank {other} at {at}",
            help="the written programs do not belong together; convert the model again",
        )
    for rank in answers:
        del waiting[rank]
    return answers


def _without_answer(waiting: Mapping[int, Waiting], failed: Collection[int], world: int) -> dict[int, int]:
    """Return the ranks that wait for a failed rank, and that rank."""
    causes = {rank: [r for r in _group(call, rank, world) if r in failed] for rank, call in waiting.items()}
    return {rank: failures[0] for rank, failures in causes.items() if failures}


def _group(call: Waiting, rank: int, world: int) -> Sequence[int]:
    groups = groups_named(str(call.details[-1])) or [range(world)]
    return next((group for group in groups if rank in group), range(world))


def _collective(waiting: Sequence[Waiting]) -> Sequence[torch.Tensor]:
    """Return each rank's result; ranks with equal results share one tensor."""
    first, values = waiting[0], [call.value for call in waiting]
    if first.kind == "all_to_all_single":
        return _all_to_all(waiting)
    shapes = {tuple(v.shape) for v in values}
    if len(shapes) > 1:
        raise ArtifactError(
            f"'{first.node}' ({first.kind}) has shapes {sorted(shapes)}", help="convert the model again"
        )
    if first.kind in ("all_gather_into_tensor", "reduce_scatter_tensor") and first.details[-2] != len(values):
        raise ArtifactError(
            f"'{first.node}' ({first.kind}) is for {first.details[-2]} ranks, and its group has {len(values)}",
            help="convert the model again",
        )
    if first.kind == "all_reduce":
        return [_reduced(first.details[0], torch.stack(values))] * len(values)
    if first.kind == "all_gather_into_tensor":
        return [torch.cat(values)] * len(values)
    if first.kind == "reduce_scatter_tensor":
        return _reduced(first.details[0], torch.stack(values)).chunk(len(values))
    raise UnsupportedError(f"'{first.node}': the simulator does not know {first.kind}", help="report this")


def _reduced(op: str, values: torch.Tensor) -> torch.Tensor:
    """Reduce over ranks as the worst backend does.

    If some ranks have NaN, the maximum of floats depends on the order of ranks and on the size: gloo may return NaN or
    any of the other values, even the smallest (torch 2.13: 0 for 0, NaN, 2 and 3).
    """
    reduced = REDUCE[op](values)
    if op not in ("max", "min") or not values.dtype.is_floating_point:
        return reduced
    lost = values.isnan()
    worst = REDUCE["min" if op == "max" else "max"](values.masked_fill(lost, math.inf if op == "max" else -math.inf))
    return torch.where(lost.any(0) & ~lost.all(0), worst, reduced)


def _call(waiting: Waiting) -> str:
    """Return the part of a call on which all ranks must agree; the sizes of an all_to_all differ by rank."""
    details = waiting.details[2:] if waiting.kind == "all_to_all_single" else waiting.details
    return f"{waiting.kind}({', '.join(map(str, (str(waiting.value.dtype), *details)))})"


def _all_to_all(waiting: Sequence[Waiting]) -> list[torch.Tensor]:
    for to, w in enumerate(waiting):
        sizes = [other.details[1][to] for other in waiting]
        if list(w.details[0]) != sizes:
            raise ArtifactError(
                f"'{w.node}' (all_to_all_single) on rank {to} expects {list(w.details[0])}, is sent {sizes}",
                help="the written programs do not belong together; convert the model again",
            )
    sent = [torch.split(w.value, list(w.details[1])) for w in waiting]
    return [torch.cat([parts[rank] for parts in sent]) for rank in range(len(waiting))]
