"""Ranks that share heads: their axis runs as two, and people see the one axis that they asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.export import export

import tpcompiler
from tests.launch import called
from tests.runtime.commands import right
from tpcompiler.errors import ArtifactError

MACHINE = "h100"
HEADS, KV_HEADS, HEAD, WIDTH, VOCABULARY, RANKS = 6, 2, 8, 48, 97, 4
TOKENS = torch.arange(16).view(1, 16) * 6
LAYERS = {
    "**.embed_tokens": "embedding_rowwise",
    **dict.fromkeys(("**.q_proj", "**.k_proj", "**.v_proj", "**.gate_proj", "**.up_proj"), "colwise"),
    **dict.fromkeys(("**.o_proj", "**.down_proj"), "rowwise"),
    "**.lm_head": "colwise_gather_output",
}


MATRIX = "model.model.layers.0.self_attn.{}_proj.weight"


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            vocab_size=VOCABULARY,
            num_hidden_layers=1,
            intermediate_size=96,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).eval()

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, use_cache=False).logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("shared") / "llama.pt2"
    torch.export.save(export(Logits(), (TOKENS,), strict=False), path)
    path.with_name("plan.yaml").write_text(yaml.safe_dump(LAYERS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def planned(model: Path) -> Path:
    """By the plan: all but the heads of keys and values lie over all ranks."""
    out = model.parent / "planned" / "out"
    right("convert", model, "--tp", RANKS, "--plan", model.with_name("plan.yaml"), "-o", out)
    return out


@pytest.fixture(scope="module")
def apart(model: Path) -> Path:
    """As the search has it where latencies do not count: also values that half of the ranks share, and their groups."""
    out = model.parent / "apart" / "out"
    right("convert", model, "--tp", RANKS, "--plan", "auto", "--machine", "ideal", "-o", out)
    return out


@pytest.mark.slow
def test_one_gather(planned: Path) -> None:
    """Of 97 columns the largest share has 25: the ranks gather 4 x 25 of 16 tokens in float32, and send 3/4 of that."""
    program = tpcompiler.open(planned)
    sent = [(each.kind, each.axis, each.payload_bytes, each.wire_bytes) for each in program.collectives()]
    summed, gathered = 16 * WIDTH * 4, 16 * 4 * 25 * 4
    assert sent == [
        *[("all_reduce", "tp", summed, summed * 2 * 3 // 4)] * 3,  # the rows, attention, the network
        ("all_gather", "tp", gathered, gathered * 3 // 4),
    ]
    manifest = program.manifest()
    assert (manifest.mesh, [*manifest.groups], manifest.factors) == ({"tp": 4}, ["tp=4:tp"], {"tp": [2, 2]})
    assert str(program.only.mesh) == "tp=4"
    texts = {row.name: row.sharding for row in manifest.tensors}
    assert texts[MATRIX.format("q")] == "2xS(0) 2xS(0, unit 8)"
    assert texts[MATRIX.format("k")] == "2xS(0) 2xR"
    assert texts["model.lm_head.weight"] == "S(0)"
    assert program.check().ok


@pytest.mark.slow
@pytest.mark.parametrize("which", ["planned", "apart"])
def test_processes(which: str, model: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which).parent
    expected = torch.export.load(model).module()(TOKENS).detach()
    for (got,) in called([[(TOKENS,)]] * RANKS, folder):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def damaged(out: Path, folder: Path, **changes: Any) -> Path:
    """A copy whose manifest has these fields."""
    shutil.copytree(out, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(manifest | changes), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_false_claims_are_refused(apart: Path, tmp_path: Path) -> None:
    """Negative controls: the other half of the axis, a group of other ranks, factors of another axis or product."""
    manifest = json.loads((apart / "manifest.json").read_text(encoding="utf-8"))
    rows = [row | {"sharding": row["sharding"].replace("2xS(0) 2xR", "2xR 2xS(0)")} for row in manifest["tensors"]]
    assert is_sound(apart)
    assert rows != manifest["tensors"]
    groups = manifest["groups"] | {"tp=4:tp[:2]": [[0, 2], [1, 3]]}
    changes: list[dict[str, Any]] = [{"tensors": rows}, {"groups": groups}, {"factors": {}}]
    assert not any(is_sound(damaged(apart, tmp_path / str(at), **each)) for at, each in enumerate(changes))
    for at, factors in enumerate([{"tp": [4, 2]}, {"dp": [2, 2]}]):
        with pytest.raises(ArtifactError, match=r"the axis '[td]p' has the factors \[[42], 2\], and the mesh is"):
            tpcompiler.open(damaged(apart, tmp_path / f"factors {at}", factors=factors))


def is_sound(folder: Path) -> bool:
    try:
        return tpcompiler.open(folder).check().ok
    except ArtifactError:
        return False
