"""A few models of the zoo in training form; `python -m tests.zoo.training` has all."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.machines import WIRE
from tests.zoo.index import CASES
from tests.zoo.training import BY_HAND, FURTHER, WITH_FALLBACKS, by_hand, converted, counted, further_fallbacks


@pytest.mark.slow
def test_counts_follow_from_those_of_the_forward() -> None:
    """Of a parallel block, of one whose heads have norms, and of an encoder and a decoder; `python -m tests.zoo.training` has all."""
    for name, sums in {
        "gptj": 2 * (1 + 1) + 1 + 1,
        "qwen3": 2 * (2 + 2) + 1 + 1 + 1,
        "t5": 2 * (2 + 2 + 3 + 3) + 2 + 1 + 1,
    }.items():
        assert name in (*BY_HAND, *FURTHER)
        assert by_hand(CASES[name]) == Counter({("all_reduce", "tp"): sums, ("all_gather", "tp"): 1})
        assert counted(converted(CASES[name], {"tp": 2}, trains=False)) == by_hand(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama", {"tp": 4}), ("gpt2", {"tp": 4}), ("mixtral", {"tp": 4}), ("llama", {"dp": 2, "tp": 2})],
)
def test_gradients_of_any_number_of_processes_have_the_same_bits(name: str, mesh: dict[str, int]) -> None:
    report = converted(CASES[name], mesh).verify(same_bits=True)
    assert report.ok, report


@pytest.mark.slow
def test_a_norm_in_simpler_ops_whose_backward_has_the_same_values() -> None:
    """The forward's `x - mean` is written for a norm, and the backward's is the model's own."""
    made = converted(CASES["vit"], {"tp": 2})
    assert made.verify().ok
    assert made.check().ok, made.check().findings


@pytest.mark.slow
def test_a_convolution_whose_gradients_sum_over_other_dims() -> None:
    """That of the input adds up over output channels, which a rank has a share of; that of the weight does not."""
    made = converted(CASES["resnet"], {"tp": 2})
    assert made.verify().ok
    assert made.check().ok, made.check().findings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine", "gathered"),
    [("vit", "h100", set()), ("vit", WIRE, {"model.vit.embeddings"}), ("resnet", "h100", set())],
)
def test_a_sum_in_two_changes_is_no_fallback(
    name: str, machine: str, gathered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that is scattered, for a norm or an activation, and gathered after it moves the bytes of an all_reduce.

    Where only bytes count, vit's position embeddings rest in shards, because their gradients are larger than they.
    """
    monkeypatch.setenv("TPCOMPILER_MACHINE", machine)
    made = converted(CASES[name], {"tp": 2})
    changes = made.collectives()
    assert {each.module for each in changes if each.why == "fallback"} == gathered
    completed = [each for each in changes if "the rest of the sum of" in each.reason]
    scattered = [each for each in changes if each.kind == "reduce_scatter"]
    assert bool(completed) == (machine == WIRE or name == "resnet")
    assert len(completed) <= len(scattered)
    for each in completed:
        assert each.payload_bytes in {own.payload_bytes for own in scattered}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "falcon_7b", "fnet"])
def test_samples_are_never_gathered(name: str) -> None:
    """With two samples, layers over tp must leave their dim to dp; a mask is read for each sample, by positions."""
    made = converted(CASES[name], {"dp": 2, "tp": 2})
    assert {each.kind for each in made.collectives() if "dp" in each.axis} == {"all_reduce"}
    assert made.verify().ok
    assert made.check().ok, made.check().findings


@pytest.mark.slow
def test_gradients_gather_no_more_than_the_forward() -> None:
    """What BERT gathers for its gradients where only bytes count is a tie, keys of one head are half of a sum."""
    assert not further_fallbacks(CASES["bert"], {"tp": 2})
    assert not further_fallbacks(CASES["gpt_bigcode"], {"tp": 2})
    assert set(further_fallbacks(CASES["falcon_7b"], {"tp": 2})) == {
        "model.transformer.h.0.self_attention",
        "model.transformer.h.1.self_attention",
    }
    assert WITH_FALLBACKS.keys().isdisjoint({"bert", "gpt_bigcode"})
    assert "falcon_7b" in WITH_FALLBACKS
