"""What the check says of a program that is not written to files."""

from __future__ import annotations

import tpcompiler
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.passes.canonicalize import canonicalize


def findings(program: tpcompiler.ParallelProgram) -> list[str]:
    ranks = read_ranks(program.only)
    model = canonicalize(program.only.original())
    return check_programs(ranks, program.manifest(), program.only.original(), model=model).findings
