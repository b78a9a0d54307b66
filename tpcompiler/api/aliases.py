"""The functions that were called before artifacts had methods: each is one call of `ParallelProgram`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from tpcompiler.api.parallel_program import ParallelProgram, open
from tpcompiler.ask.costs import CostTable
from tpcompiler.ask.difference import ArtifactDifference
from tpcompiler.ask.explanation import Explanation
from tpcompiler.ir.mesh import MeshLike
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.sound.check import CheckReport
from tpcompiler.runtime.records import Package

PathLike = str | os.PathLike[str]


def check(
    directory: PathLike, original: ExportedProgram | None = None, *, trust: bool = False, **how: Any
) -> CheckReport:
    return open(directory, trust).check(original, **how)


def check_budget(made: ParallelProgram | PathLike, limits: Sequence[str] = (), **limited: Any) -> None:
    (made if isinstance(made, ParallelProgram) else open(made)).check_budget(limits, **limited)


def cost_artifact(
    directory: PathLike, at: Mapping[str, int] | None = None, *, trust: bool = False, **how: Any
) -> CostTable:
    return open(directory, trust).cost(at, **how)


def cut_checkpoint(
    directory: PathLike, checkpoint: Any, ranks: Sequence[int] | None = None, *, trust: bool = False, **how: Any
) -> None:
    open(directory, trust).cut(checkpoint, ranks, **how)


def diff_artifacts(first: PathLike, second: PathLike, *, trust: bool = False, **how: Any) -> ArtifactDifference:
    return open(first, trust).diff(open(second, trust), **how)


def explain_artifact(directory: PathLike, name: str, *, trust: bool = False, **how: Any) -> Explanation:
    return open(directory, trust).explain(name, **how)


def load_state_dict(directory: PathLike, state: Mapping[str, Any]) -> None:
    open(directory).load_state_dict(state)


def merge(directory: PathLike, path: PathLike, *, trust: bool = False, **how: Any) -> None:
    open(directory, trust).merge(path, **how)


def package(directory: PathLike, *, trust: bool = False, **how: Any) -> tuple[Package, VerifyReport | None]:
    return open(directory, trust).package(**how)


def reshard(directory: PathLike, mesh: MeshLike, out: PathLike, *, trust: bool = False, **how: Any) -> None:
    open(directory, trust).reshard(mesh, out, **how)


def state_dict(directory: PathLike, mesh: DeviceMesh, *, trust: bool = False) -> dict[str, Any]:
    return open(directory, trust).state_dict(mesh)


def verify_artifact(
    directory: PathLike, original: ExportedProgram, args: Sequence[Any], *rest: Any, trust: bool = False, **how: Any
) -> VerifyReport:
    return open(directory, trust).verify(args, *rest, original=original, **how)


def verify_package(directory: PathLike, *, trust: bool = False, **how: Any) -> VerifyReport:
    return open(directory, trust).verify_package(**how)


def visualize_sharding(
    thing: ParallelProgram | PathLike, name: str | None = None, *, format: Literal["text", "svg"] = "text"
) -> str:
    return (thing if isinstance(thing, ParallelProgram) else open(thing)).show(name or "*", format=format)
