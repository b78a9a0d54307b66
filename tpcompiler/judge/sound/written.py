"""The programs of all ranks as they are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.export import ExportedProgram

from tpcompiler._torch import guards_of
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.ir.symm_mem import Room, rooms_of

Prepare = Callable[[ExportedProgram], ExportedProgram]


@dataclass(frozen=True)
class WrittenRank:
    """One rank's program and its tensors; ranks with one graph may share a program.

    `guards`: the file's assertions on inputs; `rooms`: its symmetric memory. Passes on the program lose both.
    """

    program: ExportedProgram
    state: Mapping[str, Any]
    guards: Sequence[str]
    rooms: Mapping[str, Room] = field(default_factory=dict)


def written(program: ExportedProgram, prepare: Prepare = lambda program: program) -> WrittenRank:
    held = {**program.constants, **program.state_dict}
    return WrittenRank(prepare(program), held, guards_of(program), rooms_of(program))


def read_ranks(program: ArtifactProgram, prepare: Prepare = lambda program: program) -> list[WrittenRank]:
    """Return all ranks' programs; a program that ranks share is prepared once.

    Raises:
        ArtifactError: as `ArtifactProgram.ranks`.
    """
    known: dict[int, tuple[ExportedProgram, WrittenRank]] = {}
    ranks = []
    for own, state in program.ranks():
        if id(own) not in known:
            known[id(own)] = own, written(own, prepare)
        ranks.append(replace(known[id(own)][1], state=state))
    return ranks
