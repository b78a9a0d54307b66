"""The promises in real processes: equal ranks, `torch.compile`, `torch.export.unflatten`, and what a backward does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from tests.long import LONG
from tests.promises.models import CASES, converted, exported, functional, inputs_of
from tests.promises.worker import INDUCTOR, gradients
from tpcompiler.judge.compare.trial import run_single

NAMES = {2: ["odd", "conv"], **({2: ["odd", "conv", "llama"], 4: ["odd"]} if os.environ.get(LONG) else {})}


@pytest.fixture(scope="module", params=NAMES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of one launch of two ranks, and one of four in long runs: by model, what each rank found."""
    world, folder = request.param, tmp_path_factory.mktemp("processes")
    for name in NAMES[world]:
        converted(name, world).save(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # it compiles a program of its own to find out: twelve seconds
        how = "compile" if world == 2 else "run"
        run_ranks(world, Path(__file__).parent / "worker.py", folder, how, *NAMES[world], timeout=400)
    return {n: [torch.load(folder / f"{n}.{rank}.out") for rank in range(world)] for n in NAMES[world]}


def apart(ranks: list[Any], key: str) -> list[str]:
    first, *rest = (rank[key] for rank in ranks)
    assert all(other.keys() == first.keys() for other in rest)
    return [name for name in first if any(other[name] != first[name] for other in rest)]


@pytest.mark.slow
def test_replicas_are_the_same_bits(results: dict[str, list[Any]]) -> None:
    for name, ranks in results.items():
        assert len(ranks[0]["replicas"]) > len(ranks[0]["module"])
        assert apart(ranks, "replicas") == []
        assert apart(ranks, "module") == []
        assert bool(apart(ranks, "disturbed")) == (name != "conv")  # negative control; `conv` has no norm to disturb


@pytest.mark.slow
def test_outputs_have_the_strides_of_the_single_device(results: dict[str, list[Any]]) -> None:
    for name, ranks in results.items():
        want = run_single(functional(name), inputs_of(name, 1)[0]).outputs
        assert all(rank["strides"] == [value.stride() for value in want] for rank in ranks)


@pytest.mark.slow
def test_a_second_call_gives_the_same_bits(results: dict[str, list[Any]]) -> None:
    assert {rank["again"] for ranks in results.values() for rank in ranks} == {0.0}


@pytest.mark.slow
def test_unflatten_keeps_the_modules_and_the_numbers(results: dict[str, list[Any]]) -> None:
    for name, ranks in results.items():
        modules = [n for n, _ in torch.export.unflatten(functional(name)).named_modules() if n]
        for rank in ranks:
            assert rank["unflattened"] == 0.0
            assert rank["modules"] == modules


@pytest.mark.slow
def test_compiled_is_eager(results: dict[str, list[Any]]) -> None:
    """The whole graph, without a break: aot_eager runs the same kernels; inductor makes its own, which round otherwise,
    within what the judge allows between two orders of summation."""
    for name, ranks in results.items():
        limit = min(d.tolerance for d in converted(name, len(ranks)).verify((), CASES[name].inputs).outputs)
        for rank in ranks:
            if len(ranks) == 2:
                assert rank["aot_eager"] == 0.0
                assert ("inductor" in rank) == (name in INDUCTOR)
                assert rank.get("inductor", 0.0) <= limit


@pytest.mark.slow
def test_a_loaded_module_refuses_a_backward(results: dict[str, list[Any]]) -> None:
    for ranks in results.values():
        for rank in ranks:
            assert rank["backward"] == "element 0 of tensors does not require grad and does not have a grad_fn"


@pytest.mark.slow
def test_gradients_of_the_program_itself_are_wrong(results: dict[str, list[Any]]) -> None:
    """Not promised, and nothing is said: of a weight behind the last sum the gradient comes out once per rank, of one
    before it each rank has another part."""
    right, ranks = gradients(exported("odd"), CASES["odd"].inputs), results["odd"]
    for rank in ranks:
        torch.testing.assert_close(rank["gradients"]["down.bias"], len(ranks) * right["down.bias"])
    norms = [rank["gradients"]["norm.weight"] for rank in ranks]
    assert not any(torch.allclose(norms[0], other, rtol=0.1) for other in (*norms[1:], right["norm.weight"]))
