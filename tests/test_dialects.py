"""The three forms in which torch exports a program, fresh and from a file: equal numbers, equal collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.export import ExportedProgram

import tpcompiler
from tests.zoo.decoders import LLAMA

Dialect = Callable[[ExportedProgram], ExportedProgram]

DIALECTS: dict[str, Dialect] = {
    "training": lambda program: program,
    "canonical": lambda program: program.run_decompositions({}),
    "core": lambda program: program.run_decompositions(),
}


def wire_bytes(made: tpcompiler.ParallelProgram, why: str) -> list[int]:
    return [c.wire_bytes for c in made.collectives() if c.why == why]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_llama(dialect: str, dynamic: bool) -> None:
    """Core ATen costs no byte more than the training IR."""
    program = DIALECTS[dialect](LLAMA.export(dynamic))
    made = tpcompiler.parallelize(program, 2, LLAMA.plan)
    assert len(made.collectives()) == 6
    assert sum(c.wire_bytes for c in made.collectives()) == 36480
    assert wire_bytes(made, "fallback") == []
    assert made.verify((), LLAMA.inputs(2, 12)).ok
