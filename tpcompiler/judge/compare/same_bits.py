"""Run the ranks of programs on every number of processes that can share them, and compare the results bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import RETURNED_KINDS
from tpcompiler.errors import InputsError, MeshError
from tpcompiler.ir import edit
from tpcompiler.ir.hosting import Hosts, host_ranks, join_tensors, name_leaves, split_tensor
from tpcompiler.ir.mesh import groups_named
from tpcompiler.ir.shares import same_bits
from tpcompiler.judge.compare.compare import Call
from tpcompiler.judge.compare.judge import Difference
from tpcompiler.judge.compare.simulate import RankResult, simulate
from tpcompiler.judge.compare.subject import Subject, shares_of
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.terminal.printed import format_bytes

Shares = Sequence[Sequence[Any]]  # every rank's flat inputs


def one_a_process(subject: Subject) -> Subject:
    """Return the subject whose sums follow the tree, on a process for each rank."""
    return replace(subject, programs=_on(subject, Hosts(subject.layout.mesh, len(subject.programs))))


def _on(subject: Subject, hosts: Hosts) -> list[ExportedProgram]:
    ranks = [(program, {**program.constants, **program.state_dict}) for program in subject.programs]
    own = [[ranks[rank] for rank in hosts.ranks(process)] for process in range(hosts.processes)]
    return [host_ranks(each, hosts, process, subject.layout.shardings) for process, each in enumerate(own)]


def compare_bits(subjects: Mapping[str, Subject], calls: Sequence[Call]) -> tuple[list[Difference], str]:
    """Return what has other bits on fewer processes than ranks, and what a process does on each number of them.

    Args:
        calls: (name, args, kwargs) of each, on the buffers that earlier ones of the family have written.

    Raises:
        InputsError: a program rejects the arguments, or they follow from outputs.
    """
    cut = [(name, _shares(subjects[name], args, kwargs)) for name, args, kwargs in calls]
    meshes = [subject.layout.mesh for subject in subjects.values()]
    found, does = list[Difference](), list[str]()
    first: list[list[RankResult]] = []
    for processes in range(meshes[0].world_size, 0, -1):
        try:
            hosts = [Hosts(mesh, processes) for mesh in meshes]
        except MeshError:
            continue
        own = dict(zip(subjects, hosts, strict=True))
        results, ops, sent = _run(subjects, own, cut)
        does.append(f"on {processes}: {ops} calls of ops, {format_bytes(sent)} sent")
        first = first or results
        for number, ((name, _), whole, got) in enumerate(zip(cut, first, results, strict=True)):
            of = f"call {number + 1}: " if len(calls) > 1 else ""
            wrong = _differing(subjects[name], own[name], whole, got)
            found += [
                Difference(f"{of}{each} has other bits on {processes} processes", apart, apart, 0.0, False)
                for each, apart in wrong.items()
            ]
    return found, f"a process does, {'; '.join(does)}"


def join_shares_of(subject: Subject, hosts: Hosts, shares: Shares) -> list[list[Any]]:
    """Return the flat inputs of every process, for those of every rank."""
    return [_inputs(subject, hosts, [shares[rank] for rank in hosts.ranks(at)]) for at in range(hosts.processes)]


def split_results(
    subject: Subject, manifest: Manifest, hosts: Hosts, results: Sequence[RankResult]
) -> list[RankResult]:
    """Return what every rank would return, for what processes return of a program without gradients."""
    shapes, split = {name: row.shape for name, row in manifest.placed()}, list[RankResult]()
    leaves = [row.name for row in manifest.tensors]
    for process, got in enumerate(results):

        def parts_of(name: str, value: Any, process: int = process) -> Sequence[Any]:
            sharding = subject.layout.shardings.get(name)
            if sharding is None or not isinstance(value, torch.Tensor):
                return [value] * hosts.each
            return split_tensor(value, sharding, hosts, process, shapes[name])

        outputs = [
            parts_of(f"output {name}", value) for name, value in zip(subject.output_names, got.outputs, strict=True)
        ]
        written = {name: parts_of(name, got.mutated[name]) for name in subject.input_names if name in got.mutated}
        for at, names in enumerate(name_leaves(hosts, process, leaves, subject.layout.shardings)):
            own = {leaf: got.mutated[name] for leaf, name in names.items() if name in got.mutated}
            split.append(RankResult([parts[at] for parts in outputs], own | {n: v[at] for n, v in written.items()}))
    return split


def _shares(subject: Subject, args: Any, kwargs: Mapping[str, Any]) -> Shares:
    if callable(args):
        raise InputsError("same_bits takes the inputs of each call, not a function", help="give tensors")
    return shares_of(subject, args, kwargs)


def _run(
    subjects: Mapping[str, Subject], hosts: Mapping[str, Hosts], calls: Sequence[tuple[str, Shares]]
) -> tuple[list[list[RankResult]], int, int]:
    """Return the results of each call, and the first process's calls of ops and the bytes that it sends, in all."""
    programs = {name: _on(subject, hosts[name]) for name, subject in subjects.items()}
    state = dict[str | None, list[dict[str, torch.Tensor]]]()
    results, ops, sent = [], 0, 0

    def count(rank: int, node: fx.Node, value: Any) -> None:
        nonlocal ops, sent
        if rank == 0 and node.op == "call_function":
            ops += 1
            if edit.is_collective(node):
                others = len(groups_named(str(node.args[-1]))[0]) - 1
                sent += value.numel() * value.element_size() * others // (others + 1)

    for name, shares in calls:
        subject, own = subjects[name], hosts[name]
        held = state.setdefault(subject.family, [{} for _ in range(own.processes)])
        results.append(simulate(programs[name], join_shares_of(subject, own, shares), state=held, seen=count))
        for each, result in zip(held, results[-1], strict=True):
            each.update(result.mutated)
    return results, ops, sent


def _inputs(subject: Subject, hosts: Hosts, shares: Shares) -> list[Any]:
    names, shardings = iter(subject.input_names), subject.layout.shardings
    return [
        join_tensors(own, shardings[next(names)], hosts) if isinstance(own[0], torch.Tensor) else own[0]
        for own in zip(*shares, strict=True)
    ]


def _differing(
    subject: Subject, hosts: Hosts, first: Sequence[RankResult], results: Sequence[RankResult]
) -> dict[str, float]:
    """Return the outputs and written values of other bits, each with its largest difference."""
    specs = [spec for spec in subject.programs[0].graph_signature.output_specs if spec.kind in RETURNED_KINDS]
    shardings = subject.layout.shardings
    leaves = [name for name in shardings if not name.startswith("output ") and name not in subject.input_names]
    found = dict[str, float]()
    for process, got in enumerate(results):
        own = [first[rank] for rank in hosts.ranks(process)]
        names = name_leaves(hosts, process, leaves, shardings)
        pairs = list[tuple[str, Any, Any]]()
        made = iter(got.outputs)
        for at, (name, spec) in enumerate(zip(subject.output_names, specs, strict=True)):
            values = [each.outputs[at] for each in own]
            if spec.kind is OutputKind.GRADIENT_TO_PARAMETER:
                shares = dict.fromkeys(each[spec.target] for each in names)
                given = dict(zip(shares, made, strict=False))
                pairs += [
                    (f"output {name}", value, given[each[spec.target]])
                    for value, each in zip(values, names, strict=True)
                ]
            elif isinstance(value := next(made), torch.Tensor):
                pairs.append((f"output {name}", join_tensors(values, shardings[f"output {name}"], hosts), value))
        for name in own[0].mutated:
            values = [each.mutated[name] for each in own]
            if name in names[0]:
                pairs += [(name, v, got.mutated.get(held[name])) for v, held in zip(values, names, strict=True)]
            else:
                pairs.append((name, join_tensors(values, shardings[name], hosts), got.mutated.get(name)))
        for name, want, value in pairs:
            if value is None or not same_bits(want, value):
                apart = float("inf") if value is None or want.shape != value.shape else _apart(want, value)
                found[name] = max(found.get(name, 0.0), apart)
    return found


def _apart(want: torch.Tensor, made: torch.Tensor) -> float:
    wide = torch.complex128 if want.is_complex() else torch.float64
    return float((want.to(wide) - made.to(wide)).abs().nan_to_num(nan=float("inf")).amax()) if want.numel() else 0.0
