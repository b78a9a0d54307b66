"""Hugging Face models as they come: exported by torch, converted by the command line with their own config as the plan."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaForCausalLM,
    T5ForConditionalGeneration,
)

from tests.launch import fork_code, fork_ranks
from tests.runtime.commands import call, refused, right
from tests.zoo.case import randomise
from tools.hf_models import DECODER
from tpcompiler import cli

PAGE = Path(__file__).parents[1] / "docs" / "hugging-face.md"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config, and a program as torch exports it, output classes and all."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**DECODER)
    config.save_pretrained(directory)
    ids = torch.arange(24).view(2, 12) % 100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    torch.export.save(torch.export.export(LlamaForCausalLM(config).eval(), (), inputs), directory / "model.pt2")
    return directory


@pytest.mark.guide
@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder-decoder and a state-space model, by copy and paste, with transformers' tokens."""
    *_, code, pair, states, _ = PAGE.read_text(encoding="utf-8").split("```")[1::2]
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {}
    exec(compile(code.removeprefix("python\n"), "<the page>", "exec"), session)
    main = Path(cli.__file__).with_name("__main__.py")
    for commands, build, given in (
        (pair, T5ForConditionalGeneration, {"decoder_input_ids": session["start"]}),
        (states, MambaForCausalLM, {}),
    ):
        *lines, last = commands.strip().splitlines()
        for line in lines:
            right(*line.split()[1:])
        _, _, words = last.partition(" tpcompiler ")
        ended = fork_ranks(2, main, *words.split())
        assert ended.codes == (0, 0), ended.printed
        model: Any = build.from_pretrained(lines[0].split()[2])
        inputs = {"input_ids": session["ids"], "attention_mask": torch.ones_like(session["ids"]), **given}
        model.generation_config = GenerationConfig(
            pad_token_id=0, decoder_start_token_id=0, max_new_tokens=16, do_sample=False
        )
        wanted = model.generate(**inputs)[:, 1 if given else 9 :]
        assert [[int(each) for each in line.split()] for line in ended.printed[0].splitlines()] == wanted.tolist()


@pytest.mark.guide
@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By copy and paste; and what it says to do in Python."""
    _, code, commands, *_, decoder = PAGE.read_text(encoding="utf-8").split("```")[1::2]
    code, decoder = (text.removeprefix("python\n") for text in (code, decoder))
    monkeypatch.chdir(tmp_path)
    script = f"""
import tpcompiler
{code}
exported = torch.export.load("llama.pt2")
for plan in (model.config, model.config.base_model_tp_plan):
    print(sorted(tpcompiler.parallelize(exported, 2, plan).manifest().plan))
{decoder}
cut = {{row.name: row.sharding for row in program.manifest().tensors}}
print(cut["keys_0"], cut["cumulative_length_0"], [c.kind for c in program.collectives()])
"""
    done = fork_code(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for command in commands.strip().splitlines():
        program, *words = command.split()
        assert program == "tpcompiler"
        said = right(*words)
    assert said.startswith("equal")
    plan = sorted(json.loads((tmp_path / "llama_tp2" / "manifest.json").read_text())["plan"])
    assert done.stdout.splitlines()[-3:] == [str(plan), str(plan), f"S(1) R {['all_reduce'] * 4}"]


@pytest.mark.slow
def test_a_process_that_knows_nothing_of_transformers(llama: Path) -> None:
    """The file's own names say which modules define its classes; no other module is imported for it."""
    script = f"""
import sys
from tpcompiler.runtime.model_file import read_model
before = set(sys.modules)
read_model({str(llama / "model.pt2")!r})
print(sorted(name for name in sys.modules if name.startswith("transformers.mod")))
"""
    ran = fork_code(script)
    assert ran.returncode == 0, ran.stderr
    assert "transformers.modeling_outputs" in ran.stdout
    assert "modeling_llama" not in ran.stdout


SIZES = {**DECODER, "num_hidden_layers": 2}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
NO_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}
EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
# model type -> its config, the plan where transformers has none (of gpt-oss, what it had), how some weights are cut
WITH_PLANS: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "gpt_oss": (
        {
            **DECODER,
            "layer_types": ["sliding_attention"],
            "sliding_window": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {
            **ATTENTION,
            "layers.*.self_attn.sinks": "local_rowwise",
            "layers.*.mlp.experts": "gather",
            "layers.*.mlp.router": "ep_router",
            **{f"layers.*.mlp.experts.{name}": "grouped_gemm" for name in EXPERTS},
        },
        {"model.layers.0.self_attn.sinks": "S(0)", "model.layers.0.mlp.experts.down_proj_bias": "S(0)"},
    ),
    "mimo_v2_flash": (
        {
            **{**SIZES, **WINDOWED, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 4},
            **{"v_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
        },
        {},
        {"model.layers.0.self_attn.sinks": "S(0)", "model.layers.1.mlp.experts.gate_up_proj": "S(1, block 24)"},
    ),
    "granite_swa": ({**NO_HEAD_DIM, **WINDOWED}, {}, {"model.layers.1.self_attn.sinks": "S(0)"}),
    "jetmoe": (
        {
            **{name: size for name, size in NO_HEAD_DIM.items() if name != "num_attention_heads"},
            **{"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        },
        {
            "layers.*.self_attention.kv_proj": "colwise",
            "layers.*.self_attention.experts.input_linear": "colwise",
            "layers.*.self_attention.experts.output_linear": "rowwise",
            "layers.*.mlp.input_linear": "packed_colwise",
            "layers.*.mlp.output_linear": "rowwise",
        },
        {"model.layers.0.mlp.input_linear.weight": "S(1, block 48)", "model.layers.0.mlp.output_linear.weight": "S(2)"},
    ),
}


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("model_type", WITH_PLANS)
def test_from_a_checkpoint_to_a_verified_artifact(model_type: str, tmp_path: Path) -> None:
    """By the command line, with the plan in the checkpoint's own config: sinks, routers with a bias, uneven windows."""
    sizes, plan, cut = WITH_PLANS[model_type]
    config, checkpoint = AutoConfig.for_model(model_type, **sizes), tmp_path / "checkpoint"
    model = randomise(AutoModelForCausalLM.from_config(config))
    model.save_pretrained(checkpoint)
    if plan:
        data = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps({**data, "base_model_tp_plan": plan}))
    right("export", checkpoint, "--static", "-o", tmp_path / "model.pt2")
    words = "--tp", "2", "--plan", checkpoint / "config.json", "--checkpoint", checkpoint
    right("convert", tmp_path / "model.pt2", *words, "-o", tmp_path / "out", "--budget", "0 fallbacks")
    assert right("verify", tmp_path / "out", "--checkpoint", checkpoint).startswith("equal")
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text())["tensors"]
    placed = {row["name"]: row["sharding"] for row in rows}
    assert {name: placed[name] for name in cut} == cut


def test_a_directory_of_hugging_face_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    converting = "convert", tmp_path, "--tp", "2", "--plan", tmp_path, "-o", tmp_path / "out"
    for words in (converting, ("inspect", tmp_path), ("verify", tmp_path)):
        said = re.sub(r"\s+", " ", refused(*words))
        assert "is a Hugging Face directory: a config, and maybe weights, and no program" in said
        assert (
            f"help: tpcompiler export {tmp_path} -o model.pt2 makes one; {tmp_path}/config.json is a plan for --plan"
            in said
        )


def test_other_classes_are_imported_for_nobody(tmp_path: Path) -> None:
    """A name of transformers that is none of its modules of outputs, caches or models."""
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "model.pt2")
    content = (tmp_path / "model.pt2").read_bytes()
    assert b"transformers" not in content
    assert call("inspect", tmp_path / "model.pt2").exit_code == 0
    assert "transformers.commands" not in sys.modules
