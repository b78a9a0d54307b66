"""Taking a collective out keeps the shapes, so that only the numbers can tell."""

from __future__ import annotations

import pytest
import torch

import tpcompiler
from tests.compared import compare
from tests.zoo.case import randomise
from tests.zoo.faults import collectives_of, without_collective

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rows", [4, 5], ids=["even shards", "uneven shards"])
@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("all_reduce", "rowwise"),
        ("all_gather", "colwise"),
        ("all_to_all", {"style": "colwise", "outputs": ["S(0)"]}),
        ("reduce_scatter", {"style": "rowwise", "outputs": ["S(0)"]}),
    ],
)
def test_a_missing_collective_is_noticed(kind: str, style: object, rows: int) -> None:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(randomise(torch.nn.Sequential(torch.nn.Linear(6, 8))), (x,))
    placement = "S(0)" if isinstance(style, dict) else "R"
    program = tpcompiler.parallelize(exported, 2, {"0": style}, outputs=[placement])
    programs = [program.rank_program(rank) for rank in range(2)]
    assert [c.kind for c in program.collectives()] == [kind]
    (name,) = collectives_of(programs[0])
    for damaged in (programs, [without_collective(p, name) for p in programs]):
        report = compare(exported, damaged, (x,), {}, program.layout(), ["input"], program.resharded.output_names())
        assert report.ok == (damaged is programs)
