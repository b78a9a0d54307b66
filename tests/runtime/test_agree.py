"""What ranks say of their inputs; `test_faults.py` has them say it to one another."""

from __future__ import annotations

import torch

from tests.runtime.test_artifact import manifest
from tpcompiler.runtime.agree import artifact_facts, input_facts
from tpcompiler.runtime.records import BoundaryRecord


def facts(value: torch.Tensor, sharding: str, shape: list[int | str]) -> str:
    row = BoundaryRecord(name="x", shape=shape, dtype="f32", sharding=sharding)
    (said,) = input_facts({"x": value}, manifest(inputs=[row])).values()
    return str(said)


def test_content_of_what_every_rank_is_given_whole() -> None:
    x = torch.arange(6.0).view(2, 3)
    for sharding in ("R", "[R, R]"):
        said = facts(x, sharding, [2, 3])
        assert said.startswith("torch.float32 [2, 3] of content ")
        assert facts(x.clone(), sharding, [2, 3]) == said
        assert facts(x + 1, sharding, [2, 3]) != said
    assert facts(x[:0], "R", ["s0", 3]).startswith("torch.float32 [0, 3] of content ")


def test_sizes_of_what_each_rank_is_given_a_part_of() -> None:
    """Of a dim that is cut unevenly ranks have different numbers of rows; of a dynamic one they must not."""
    first, second = torch.zeros(3, 2), torch.ones(2, 2)
    assert facts(first, "S(0)", [5, 2]) == facts(second, "S(0)", [5, 2]) == "torch.float32 [5, 2]"
    assert facts(first, "S(0)", ["s0", 2]) != facts(second, "S(0)", ["s0", 2])


def test_facts_of_an_artifact() -> None:
    one, other = manifest(files={"rank_0.pt2": "a"}), manifest(files={"rank_0.pt2": "b"})
    assert artifact_facts(one) == artifact_facts(one)
    assert {what for what, said in artifact_facts(one).items() if artifact_facts(other)[what] != said} == {
        "the artifact"
    }
