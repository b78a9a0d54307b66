"""Convert a case and measure what it states: for the tests and for the table."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.export import ExportedProgram

import tpcompiler
from tests.zoo.case import OUTSIDE, Case
from tpcompiler import ParallelProgram
from tpcompiler.report import Collective
from tpcompiler.verify.compare import Difference

WORLDS = (2, 4)
FALLBACK = "fallback"
# The judge allows 8 times a model's float32 noise, which is about 1e-6; a dropped all_reduce gives about 1. A tolerance
# above this bound would say that the case is too ill-conditioned to judge by.
LOOSEST = 2e-5


@dataclass(frozen=True)
class Measured:
    """A case in one of its exports on one world.

    Attributes:
        program: None where only errors were asked for.
        differences: of every output at every size that the program was run at.
        found: (layer or OUTSIDE, kind) -> count; a fallback says so in its kind.
        cut: the share of all parameters' bytes that is cut.
    """

    case: Case
    dynamic: bool
    world: int
    program: ParallelProgram
    differences: tuple[Difference, ...]
    found: Counter[tuple[str, str]]
    cut: float
    seconds: float

    @property
    def equal(self) -> bool:
        """Every output, on every rank and at every size, is the single device's, at a tolerance that means something."""
        return bool(self.differences) and all(d.ok and d.tolerance < LOOSEST for d in self.differences)

    @property
    def counted(self) -> bool:
        return self.found == self.case.by_hand()

    @property
    def cut_enough(self) -> bool:
        return self.cut >= self.case.cut

    @property
    def ok(self) -> bool:
        return self.equal and self.counted and self.cut_enough

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=strain)


def strain(difference: Difference) -> float:
    """How much of what is allowed is used up; integers allow nothing."""
    return difference.rel / max(difference.tolerance, torch.finfo(torch.float64).tiny)


@lru_cache(maxsize=4)
def exported(case: Case, dynamic: bool) -> ExportedProgram:
    return case.export(dynamic)


@lru_cache(maxsize=8)
def measured(case: Case, dynamic: bool, world: int) -> Measured:
    """Convert and run: at the size of the example, the dynamic program at all others too."""
    began = time.perf_counter()
    program = tpcompiler.parallelize(exported(case, dynamic), world, case.plan)
    reports = [program.verify((), case.inputs(*size)) for size in (case.example, *(case.others if dynamic else ()))]
    return Measured(
        case=case,
        dynamic=dynamic,
        world=world,
        program=program,
        differences=tuple(d for report in reports for d in report.outputs),
        found=counts(case, program.collectives()),
        cut=cut_share(program),
        seconds=time.perf_counter() - began,
    )


def counts(case: Case, collectives: Iterable[Collective]) -> Counter[tuple[str, str]]:
    paths = [re.compile(re.escape(layers.path).replace(r"\*", r"\d+") + r"(?=\.|$)") for layers in case.layers]
    found: Counter[tuple[str, str]] = Counter()
    for c in collectives:
        inside = [m[0] for path in paths if (m := path.match(c.module))]
        kind = f"{c.kind} ({FALLBACK})" if c.why == FALLBACK else c.kind
        found[inside[0] if inside else OUTSIDE, kind] += 1
    return found


def cut_share(program: ParallelProgram) -> float:
    """The share of the bytes of all parameters, tied ones once, that lie in parameters cut over the ranks."""
    state = program.original.state_dict
    sizes = {True: 0, False: 0}
    for row in program.manifest().tensors:
        if row["kind"] == "parameter" and "tied_to" not in row:
            sizes[is_cut(row)] += torch.Size(row["shape"]).numel() * state[row["name"]].element_size()
    return sizes[True] / sum(sizes.values())


def is_cut(row: dict[str, object]) -> bool:
    return str(row["sharding"]).startswith("S")
