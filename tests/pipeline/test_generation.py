"""Stages in real processes: models of transformers from config to tokens, the command line, and every dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export
from torch.utils._pytree import tree_leaves

import tpcompiler
from tests.launch import fork_launched, fork_ranks, run_ranks
from tests.passes.stages import Call
from tests.runtime.commands import call
from tests.runtime.models import PLAN_TEXT, export_mlp, mlp_inputs
from tests.zoo.case import randomise
from tpcompiler.cli.commands import app
from tpcompiler.runtime.inputs import read_tensors, write_tensors

transformers = pytest.importorskip("transformers")
MACHINE = "h100"  # whose kernels take time, which stages share


T5_PLAN = dict.fromkeys(("q", "k", "v", "wi"), "colwise") | dict.fromkeys(("o", "wo"), "rowwise")
PLANS = {
    "gpt2": {"attn.c_attn": "colwise", "attn.c_proj": "rowwise", "c_fc": "colwise", "mlp.c_proj": "rowwise"},
    "mixtral": dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"},
}


def small(name: str) -> Any:
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def convert(model: Any, plan: dict[str, str], programs: tuple[str, ...], folder: Path) -> None:
    """Write `folder/out` from the model's checkpoint, as a user does."""
    model.save_pretrained(folder / "model")
    words = ("--prefill-decode", "--batch", 2, "--max-length", 16, "-o", folder / "models")
    assert call("export", folder / "model", *words).exit_code == 0
    (folder / "plan.yaml").write_text("".join(f'"**.{name}": {style}\n' for name, style in plan.items()))
    asked = ("--mesh", "pp=2,tp=2", "--plan", folder / "plan.yaml", "--checkpoint", folder / "model")
    files = [folder / "models" / f"{name}.pt2" for name in programs]
    made = call("convert", *files, *asked, "-o", folder / "out")
    assert made.exit_code == 0, made.stderr


def run(calls: list[Any], folder: Path) -> list[Any]:
    """What each of four processes got by the calls."""
    torch.save((calls, {}), folder / "out.calls")
    run_ranks(4, Path(__file__).parent / "worker.py", folder, "out")
    return [torch.load(folder / f"out.{rank}.made") for rank in range(4)]


def step(tokens: torch.Tensor, at: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens[:, at : at + 1], "cache_position": torch.tensor([at])}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_decoder(name: str, tmp_path: Path) -> None:
    """The tokens of `generate`, by prefill and decode over the cache that each stage keeps."""
    model = randomise(small(name)).eval()
    convert(model, PLANS[name], ("prefill", "decode"), tmp_path)
    prompt = torch.arange(10).view(2, 5) + 1
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
    assert len({*tokens[0, 5:].tolist()}) > 2
    first = ("prefill", (), {"input_ids": prompt, "cache_position": torch.arange(5)})
    for made in run([first, *(("decode", (), step(tokens, at)) for at in range(5, 10))], tmp_path):
        assert torch.equal(torch.cat([logits[:, -1:].argmax(-1) for logits in made], 1), tokens[:, 5:])


@pytest.mark.slow
def test_an_encoder_and_its_decoder(tmp_path: Path) -> None:
    """The tokens of `generate`: the encoder is cut where it is best, prefill and decode alike."""
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = randomise(transformers.T5ForConditionalGeneration(config)).eval()
    convert(model, T5_PLAN, ("encoder", "prefill", "decode"), tmp_path)
    source, mask = torch.arange(18).view(2, 9) + 1, torch.ones(2, 9, dtype=torch.int64)
    with torch.no_grad():
        tokens = model.generate(source, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        vectors = model.get_encoder()(source, attention_mask=mask).last_hidden_state
    assert len({*tokens[0].tolist()}) > 2
    prompt = {"input_ids": tokens[:, :2], "cache_position": torch.arange(2)}
    calls = [
        ("encoder", (), {"input_ids": source, "attention_mask": mask}),
        ("prefill", (), {**prompt, "encoder_hidden_states": vectors, "attention_mask": mask}),
        *(("decode", (), step(tokens, at)) for at in range(2, 5)),
    ]
    for made, *logits in run(calls, tmp_path):
        torch.testing.assert_close(made, vectors, rtol=0, atol=1e-5 * float(vectors.abs().max()))
        assert torch.equal(torch.cat([each.argmax(-1) for each in logits], 1), tokens[:, 1:])


@pytest.mark.slow
def test_stages_are_converted_compared_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = export_mlp()
    torch.export.save(program, "model.pt2")
    Path("plan.yaml").write_text(PLAN_TEXT)
    write_tensors("in.safetensors", mlp_inputs())
    convert = "convert model.pt2 --mesh pp=2,tp=2 --plan plan.yaml -o out"
    for words in (convert, "verify out --against model.pt2 --inputs in.safetensors", "check out"):
        app(words.split(), standalone_mode=False)
    run = "--nproc-per-node 4 -m tpcompiler.cli run out --inputs in.safetensors --outputs made.safetensors"
    ended = fork_launched(run.split())
    assert not any(ended.codes), ended.shown
    wanted = program.module()(*mlp_inputs().values())
    for name, value in read_tensors("made.safetensors").items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-5)


DTYPES = [
    *(torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.bfloat16, torch.complex64),
]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
SCRIPT = """
import json, sys, torch, tpcompiler, torch.distributed as dist
folder, x, texts = sys.argv[1], torch.load(sys.argv[1] + "/x"), []
for name in ("dtypes", "layers"):
    module = tpcompiler.load(f"{folder}/{name}", check_inputs=True)
    torch.save(module(x), f"{folder}/{name}.{dist.get_rank()}")
module = tpcompiler.load(f"{folder}/layers", check_inputs=True)
try:
    module(x + dist.get_rank())
except tpcompiler.LaunchError as error:
    print(json.dumps(str(error)))
dist.destroy_process_group()
"""


def in_all_dtypes(self: Any, x: torch.Tensor) -> Any:
    h = self.up(x).tanh()
    crosses = (h * 9).to(torch.int16)
    y = self.down(h + crosses)
    return y, [(y * 9).abs().to(each) for each in DTYPES], [(h * 9).abs().to(each) for each in DTYPES], crosses


@pytest.mark.slow
def test_every_dtype_and_inputs_that_differ(tmp_path: Path) -> None:
    """The second stage of the layers takes no input of the program, only what the first stage sends."""
    torch.save(X, tmp_path / "x")
    models = {}
    for name, function in {"dtypes": in_all_dtypes, "layers": lambda self, x: self.down(self.up(x).relu())}.items():
        models[name] = randomise(Call(function, up=nn.Linear(8, 12), down=nn.Linear(12, 8)))
        tpcompiler.parallelize(export(models[name], (X,)), {"pp": 2, "tp": 1}, {}).save(tmp_path / name)
    *_, last = tpcompiler.open(tmp_path / "layers").values()
    assert "x" not in [row.name for row in last.manifest().inputs]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ended = fork_ranks(2, script, tmp_path, timeout=90)
    assert ended.codes == (0, 0), ended.printed
    for rank, printed in enumerate(ended.printed):
        for name, model in models.items():
            results, wanted = tree_leaves(torch.load(tmp_path / f"{name}.{rank}")), tree_leaves(model(X))
            assert [each.dtype for each in results] == [each.dtype for each in wanted]
            for own, want in zip(results, wanted, strict=True):
                torch.testing.assert_close(own.to(torch.complex128), want.to(torch.complex128), rtol=1e-5, atol=1e-5)
        refusal = json.loads(printed.splitlines()[-1])
        assert "input 'x' is torch.float32 [4, 8] of content" in refusal
        assert "give all ranks the same" in refusal
