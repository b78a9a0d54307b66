"""`tpcompiler.redistribute`: every change of placements and its gradient, in gloo processes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import fork_ranks, run_ranks

SHAPE = (5, 8)  # the rows divide over no number of ranks
PLACEMENTS = "R", "S(0)", "S(1)", "P(sum)"
Spec = Mapping[str, str]


def place(whole: torch.Tensor, spec: Spec, mesh: Mapping[str, int]) -> list[torch.Tensor]:
    """Return every rank's part, by torch's own chunks; the terms of a sum are random."""
    parts = [whole]
    for axis, degree in mesh.items():
        found = list[torch.Tensor]()
        for part in parts:
            if spec[axis] == "P(sum)":
                terms = [torch.randn_like(part) for _ in range(degree - 1)]
                found += [part - sum(terms), *terms]
            elif spec[axis] == "R":
                found += [part] * degree
            else:
                found += chunks(part, int(spec[axis][2]), degree)
        parts = found
    return [part.clone() for part in parts]


def chunks(part: torch.Tensor, dim: int, degree: int) -> list[torch.Tensor]:
    some = part.chunk(degree, dim)
    return [*some, *[part.narrow(dim, 0, 0)] * (degree - len(some))]


def added(parts: list[torch.Tensor], spec: Spec, mesh: Mapping[str, int]) -> list[torch.Tensor]:
    """Return what every rank would have without pending sums."""
    places = list(itertools.product(*map(range, mesh.values())))
    pending = [at for at, axis in enumerate(mesh) if spec[axis] == "P(sum)"]
    return [
        sum(  # type: ignore[misc]
            part
            for part, other in zip(parts, places, strict=True)
            if all(a == b for at, (a, b) in enumerate(zip(here, other, strict=True)) if at not in pending)
        )
        for here in places
    ]


def dual(spec: Spec) -> dict[str, str]:
    return {axis: "R" if placement == "P(sum)" else placement for axis, placement in spec.items()}


def run(changes: list[Any], mesh: Mapping[str, int], folder: Path) -> list[list[Any]]:
    """Return (result, gradient) of every change and rank."""
    torch.save((dict(mesh), SHAPE, changes), folder / "asked")
    world = len(changes[0][3])
    run_ranks(world, Path(__file__).parent / "redistribute_worker.py", folder)
    return list(zip(*(torch.load(folder / f"{rank}.results") for rank in range(world)), strict=True))  # type: ignore[arg-type]


def pairs(mesh: Mapping[str, int]) -> list[tuple[Spec, Spec]]:
    specs = [dict(zip(mesh, each, strict=True)) for each in itertools.product(PLACEMENTS, repeat=len(mesh))]
    return list(itertools.product(specs, repeat=2))[:: 1 if len(mesh) == 1 else 7]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_values_and_gradients(mesh: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, weights, asked = torch.randn(*SHAPE, dtype=torch.float64), torch.randn(*SHAPE, dtype=torch.float64), []
    for source, target in pairs(mesh):
        asked.append((source, target, None, place(whole, source, mesh), place(weights, dual(target), mesh)))
    assert len(asked) >= 16
    for (source, target, *_), ranks in zip(asked, run(asked, mesh, tmp_path), strict=True):
        made, gradients = ([rank[at] for rank in ranks] for at in range(2))
        for got, want in zip(added(made, target, mesh), place(whole, dual(target), mesh), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=f"{source} -> {target}")
        for got, want in zip(gradients, place(weights, dual(source), mesh), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=f"gradient of {source} -> {target}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "gradient"), [(("R", "R"), ("P(sum)", "R")), (("S(1)", "R"), ("P(sum)", "S(1)"))], ids=str
)
def test_a_gradient_of_terms(change: Any, gradient: Any, tmp_path: Path) -> None:
    """Megatron's entry of a block, and that of sequence parallelism; without saying so, each rank keeps its term."""
    torch.manual_seed(0)
    mesh, (source, target) = {"tp": 2}, change
    whole, weights = torch.randn(*SHAPE, dtype=torch.float64), torch.randn(*SHAPE, dtype=torch.float64)
    terms = place(weights, {"tp": "P(sum)"}, mesh)
    asked = [(source, target, each, place(whole, {"tp": source}, mesh), terms) for each in (gradient, None)]
    right, wrong = run(asked, mesh, tmp_path)
    for rank, want in enumerate(place(weights, {"tp": source}, mesh)):
        torch.testing.assert_close(right[rank][1], want, rtol=0, atol=1e-12)
        assert not torch.allclose(wrong[rank][1], want)


@pytest.mark.slow
def test_uneven_parts_need_the_whole_shape(tmp_path: Path) -> None:
    """Without it, ranks with 3 and 2 of 5 rows take the tensor for one of 6 and one of 4: none may wait for the other."""
    torch.save(({"tp": 2}, None, [("S(0)", "R", None, [torch.ones(3, 8), torch.ones(2, 8)], None)]), tmp_path / "asked")
    ended = fork_ranks(2, Path(__file__).parent / "redistribute_worker.py", tmp_path, timeout=60, together=False)
    assert all(ended.codes)
    assert any(
        "the tensor is torch.float32 [6, 8] on rank 0, and torch.float32 [4, 8] on rank 1" in text
        for text in ended.printed
    )
