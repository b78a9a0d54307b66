"""Real models on ranks with unequal shares: in lock step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.export import export

import tpcompiler
from tests.runtime.commands import call, right
from tests.zoo.case import hugging_face, randomise
from tests.zoo.index import CASES
from tests.zoo.measure import exported
from tpcompiler.errors import PlanError
from tpcompiler.ir.shares import cut
from tpcompiler.passes import shard_state


@pytest.mark.slow
def test_quantised_weights() -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = randomise(transformers.LlamaForCausalLM(config))
    plan = hugging_face(model)
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    ids = {"input_ids": torch.arange(24).reshape(2, 12) % 96}
    assert tpcompiler.parallelize(export(model, (), ids, strict=False), {"tp": [2, 1, 1]}, plan).verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": [3, 2, 1]}, {"dp": 2, "tp": [2, 1]}], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "layoutlm", "diffllama"])  # sums that pass on, and a rank without heads
def test_all_ranks_in_lock_step(name: str, mesh: dict[str, Any]) -> None:
    case = CASES[name]
    program = tpcompiler.parallelize(exported(case, False), mesh, case.asked())
    assert program.verify().ok
    assert program.check().ok
    _, held = program.parameter_bytes()
    of_tp = held if "dp" not in mesh else held[:2]
    assert of_tp == sorted(of_tp, reverse=True)
    assert of_tp[0] > of_tp[1]
    assert held == of_tp * (len(held) // len(of_tp))


@pytest.mark.slow
def test_meshes_follow_one_another(tmp_path: Path) -> None:
    """From shares to other shares, to equal ones and to one device, on the command line; nothing is lost on the way."""
    model = randomise(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    made = tpcompiler.parallelize(
        export(model, (torch.randn(2, 8),)), {"tp": [2, 1, 1]}, {"0": "colwise", "2": "rowwise"}
    )
    made.save(tmp_path / "2:1:1")
    for source, mesh in (("2:1:1", "3:1"), ("3:1", "2"), ("2", "5:2:1")):
        right("reshard", tmp_path / source, "--tp", mesh, "-o", tmp_path / mesh)
    right("reshard", tmp_path / "5:2:1", "--safetensors", "-o", tmp_path / "whole.safetensors")
    whole = load_file(tmp_path / "whole.safetensors")
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    differences = call("diff", tmp_path / "2:1:1", tmp_path / "5:2:1").stdout
    assert re.search(r"^mesh +tp=2:1:1 +tp=5:2:1$", differences, re.MULTILINE)


def test_samples_in_unequal_shares() -> None:
    """A loss is the mean over all samples, of which the first ranks have two thirds."""
    ids = torch.arange(36).view(6, 6) % 16
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
    loss = lambda made, wanted: nn.functional.cross_entropy(made.flatten(0, 1), wanted.flatten())  # noqa: E731
    program = tpcompiler.export_training(randomise(model), (ids,), loss=loss, targets={"wanted": ids})
    plan = {"**.1": "colwise", "**.3": "rowwise"}
    given = {"input": {"dp": "S(0)"}, "wanted": {"dp": "S(0)"}}
    made = tpcompiler.parallelize(program, {"dp": [2, 1], "tp": 2}, plan, inputs=given)
    assert made.verify().ok
    assert made.check().ok
    inside = [each.kind for each in made.collectives() if each.axis == "dp" and each.why != "plan-demanded"]
    assert inside == ["all_reduce"] * len(inside)
    with pytest.raises(
        PlanError, match=r"'shard_at_rest\(dp\)' holds equal shards, and dp=2:1,tp=2 has unequal shares"
    ):
        tpcompiler.parallelize(program, {"dp": [2, 1], "tp": 2}, {"**": "shard_at_rest(dp)"}, inputs=given)


@pytest.mark.slow
def test_a_share_of_another_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: weights cut as if ranks 1 and 2, who hold as much, had changed places."""
    case = CASES["llama"]
    made = tpcompiler.parallelize(exported(case, False), {"tp": [2, 1, 1]}, case.asked())
    assert made.verify().ok
    monkeypatch.setattr(shard_state, "cut", lambda *given: cut(*given[:3], (0, 2, 1)[given[3]]))
    assert not tpcompiler.parallelize(exported(case, False), {"tp": [2, 1, 1]}, case.asked()).verify().ok
