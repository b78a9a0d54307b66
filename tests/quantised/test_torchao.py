"""Models that torchao has quantised, exported as they are: their weights are tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.machines import WIRE
from tests.quantised.layers import Mlp
from tests.zoo.case import hugging_face, randomise
from tpcompiler.errors import ShardingError
from tpcompiler.frontend.plain_weights import unwrap_subclasses

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

quantization: Any = pytest.importorskip("torchao.quantization", reason="torchao is not there")
utils: Any = pytest.importorskip("torchao.utils")

GROUP = quantization.PerGroup(32)
CONFIGS: dict[str, tuple[Callable[[], Any], list[int]]] = {  # and the bytes of the collectives of a pair, 4 rows of 128
    "int8 weights": (quantization.Int8WeightOnlyConfig, [2048]),
    "float8 weights": (quantization.Float8WeightOnlyConfig, [2048]),
    "int4 weights": (lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=GROUP), [2048]),
    # The least and the greatest number of each row are those of all ranks, in one collective.
    "int8 activations": (quantization.Int8DynamicActivationInt8WeightConfig, [32, 2048]),
    "int8 activations, int4 weights": (
        lambda: quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=GROUP),
        [32, 2048],
    ),
}
X = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
PLAN = {"up": "colwise", "down": "rowwise"}


def quantised(name: str, model: nn.Module | None = None) -> nn.Module:
    model = model or randomise(Mlp())
    quantization.quantize_(model, CONFIGS[name][0]())
    return model


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [2, 4, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pair_is_cut(name: str, mesh: Any, tmp_path: Path) -> None:
    model = quantised(name)
    exported = export(model, (X,))
    program = tpcompiler.parallelize(exported, mesh, PLAN)
    assert [c.payload_bytes for c in program.collectives()] == CONFIGS[name][1]
    assert {c.kind for c in program.collectives()} == {"all_reduce"}
    assert torch.equal(program.only.original().module()(X), model(X))  # what it is compared with is the model
    program.save(tmp_path / "out")  # and read back without a pickle: no `trust`
    assert tpcompiler.open(tmp_path / "out").verify((X,), original=exported).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_names_are_those_of_torchao(name: str) -> None:
    model = quantised(name)
    plain = unwrap_subclasses(export(model, (X,)))
    by_torchao = export(utils.unwrap_tensor_subclass(model), (X,))
    assert plain.state_dict.keys() == by_torchao.state_dict.keys()
    assert unwrap_subclasses(by_torchao) is by_torchao
    program = tpcompiler.parallelize(by_torchao, 2, PLAN)
    assert program.verify((X,)).ok


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize(
    "plan",
    [{"up.weight": "S(0)", "down.weight": "S(1)"}, {"up.weight": "colwise", "down.weight": "rowwise"}],
    ids=["placements", "styles"],
)
@pytest.mark.parametrize("name", ["int8 weights", "int4 weights"])
def test_a_plan_names_the_weight(name: str, plan: dict[str, str]) -> None:
    """And means the scales too; those of int8, of which one serves a whole row, are not cut along the rows."""
    program = tpcompiler.parallelize(export(quantised(name), (X,)), 2, plan)
    assert [c.kind for c in program.collectives()] == ["all_reduce"]
    placed = {row.name: row.sharding for row in program.manifest().tensors}
    scales = "R" if name == "int8 weights" else "S(1)"
    assert placed["up.parametrizations.weight.original1"] == "S(0)"
    assert placed["down.parametrizations.weight.original0"] == "S(1)"
    assert placed["down.parametrizations.weight.original1"] == scales


def test_a_dim_that_the_weight_has_not() -> None:
    with pytest.raises(ShardingError, match="on dim 7: it has 2 dims"):
        tpcompiler.parallelize(export(quantised("int8 weights"), (X,)), 2, {"up.weight": "S(7)"})


@pytest.mark.parametrize("name", ["int8 weights", "float8 weights", "int4 weights"])
def test_the_search_finds_the_pair(name: str) -> None:
    program = tpcompiler.parallelize(export(quantised(name), (X,)), 2, "auto")
    assert {entry.pattern: entry.style.name for entry in program.converted.plan.entries} == {
        "up": "colwise",
        "down": "rowwise",
        "**": "auto",
    }


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_hugging_face(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = randomise(transformers.LlamaForCausalLM(config))
    plan = hugging_face(model)
    quantised(name, model.model.layers)
    ids = {"input_ids": torch.arange(24).reshape(2, 12) % 96}
    exported = export(model, (), ids, strict=False)
    for mesh in (2, {"dp": 2, "tp": 2}):
        program = tpcompiler.parallelize(exported, mesh, plan, machine=WIRE)
        assert program.verify((), ids).ok
        whole, (rank, *_) = program.parameter_bytes()
        assert rank < 0.62 * whole  # all but the embeddings and the norms is cut
        large = [c for c in program.collectives() if c.payload_bytes >= 2 * 12 * 64 * 4]
        # the embedding, two in each layer, the logits
        assert [c.kind for c in large] == ["all_reduce"] * 5 + ["all_gather"]


def test_a_subclass_that_an_op_takes_as_a_whole_is_left_to_torch() -> None:
    exported = export(quantised("int8 weights"), (X,))
    reads = [node for node in exported.graph.nodes if "access_subclass" in str(node.target)]
    for node in reads:
        node.replace_all_uses_with(node.args[0])
    assert unwrap_subclasses(exported) is exported
