"""The answers that commands print with --json where no function returns them; docs/json.md is rendered from types."""

from __future__ import annotations

from typing import Any

from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.report.measured import CountedCollectives
from tpcompiler.runtime.records import Package, Record
from tpcompiler.runtime.run import ReturnedTensor


class FoundPlan(Record, frozen=True, kw_only=True):
    """A plan that the search has found."""

    out: str | None  # the file that was written
    mesh: dict[str, int | list[int]]  # axis -> degree, or the unequal shares of its ranks
    plan: dict[str, Any]  # as a plan file has it


class WrittenFile(Record, frozen=True, kw_only=True):
    """The only file that a command writes: a machine's description, or a single-device model or its weights."""

    out: str  # the file


class ExportedFiles(Record, frozen=True, kw_only=True):
    """Files of a model without its weights."""

    out: list[str]  # the files that were written
    weights: list[str]  # those without values
    sizes: str  # the sizes that are dynamic and those that are fixed; empty for a factory and for `--prefill-decode`


class CutWeights(Record, frozen=True, kw_only=True):
    """Weights that were cut into an artifact."""

    out: str  # the artifact
    ranks: list[int] | None  # whose weights were written; null for all


class ReshardedArtifact(Record, frozen=True, kw_only=True):
    """An artifact for other ranks."""

    out: str  # the directory that was written
    mesh: dict[str, int | list[int]]  # axis -> degree, or the unequal shares of its ranks


class WrittenPackage(Package, frozen=True, kw_only=True):
    """A compiled package."""

    out: str | None  # the package; null where it was not right, and was deleted
    report: VerifyReport | None  # as `verify` prints it; null with `--no-check`


class Returned(Record, frozen=True, kw_only=True):
    """The result of one call; rank 0 prints it."""

    outputs: list[ReturnedTensor]  # the tensors that it returned
    out: str | None  # the file that was written
    counts: list[CountedCollectives] | None  # with `--count`


class GeneratedTokens(Record, frozen=True, kw_only=True):
    """Tokens that were generated; rank 0 prints them."""

    tokens: list[list[int]]  # of each row
    out: str | None  # the file that was written
