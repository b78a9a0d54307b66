"""What the check says of a program that is not written to files."""

from __future__ import annotations

import tpcompiler
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import written
from tpcompiler.passes.canonicalize import canonicalize


def findings(program: tpcompiler.ParallelProgram) -> list[str]:
    ranks = [written(program.rank_program(rank)) for rank in range(program.world_size)]
    model = canonicalize(program.only.original())
    return check_programs(ranks, program.manifest(), program.only.original(), model=model).findings
