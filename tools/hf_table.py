"""Take Hugging Face architectures from a config to a verified artifact, as a user does, and print how each went.

    python tools/hf_table.py [MODEL_TYPE ...] [--tp 2]

Each is a small config with random weights, exported as it comes, and converted by the command line with nothing but its
own `config.json` as the plan; where transformers has no plan for it, with the one that `tpcompiler inspect` proposes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "olmo2", "starcoder2", "phi3", "bert", "t5")
MIXTURES = ("mixtral", "qwen3_moe")
SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "t5": {
        "vocab_size": 120,
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "bert": {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
    **{
        name: {**SIZES, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        for name in MIXTURES
    },
}
CLASSES = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}


def export(model_type: str, directory: Path) -> None:
    """Write the model's config and its program."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **OTHERWISE.get(model_type, SIZES))
    config.save_pretrained(directory)
    model = CLASSES.get(model_type, transformers.AutoModelForCausalLM).from_config(config).eval()
    if model_type in MIXTURES:
        model.set_experts_implementation("batched_mm")  # eager experts have sizes that no export takes
    ids = torch.arange(24).view(2, 12) % 100
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"decoder_input_ids": ids[:, :6]} if model_type == "t5" else {}
    inputs |= {"use_cache": False} if model_type != "bert" else {}
    torch.export.save(torch.export.export(model, (), inputs), directory / "model.pt2")


def tpcompiler(*words: object) -> subprocess.CompletedProcess[str]:
    """The command, in a process that has imported nothing of the model."""
    command = [sys.executable, "-m", "tpcompiler.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def convert(model_type: str, tp: int, directory: Path) -> tuple[str, str, str]:
    """(the plan, options beside it, what `verify` says or the error)."""
    export(model_type, directory)
    plan, model, options = directory / "config.json", directory / "model.pt2", ""
    made = tpcompiler("convert", model, "--tp", tp, "--plan", plan, "-o", directory / "out")
    if "brings no plan" in made.stderr:
        plan = directory / "plan.yaml"
        plan.write_text(json.loads(tpcompiler("inspect", model, "--json").stdout)["plan"])
        made = tpcompiler("convert", model, "--tp", tp, "--plan", plan, "-o", directory / "out")
    if "--skip-unsupported" in made.stderr:
        options = "--skip-unsupported"
        made = tpcompiler("convert", model, "--tp", tp, "--plan", plan, "-o", directory / "out", options)
    if made.returncode == 0:
        made = tpcompiler("verify", directory / "out", "--against", model)
    said = (made.stdout if made.returncode == 0 else made.stderr or made.stdout).splitlines() or ["nothing"]
    return plan.name, options, said[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", default=[*DENSE, *MIXTURES])
    parser.add_argument("--tp", type=int, default=2)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    table = Table("architecture", "plan", "options", "verified", title=f"config to artifact, {asked.tp} ranks")
    right = True
    for model_type in asked.model_types:
        with tempfile.TemporaryDirectory() as directory:
            plan, options, said = convert(model_type, asked.tp, Path(directory))
        right &= said.startswith("equal")
        table.add_row(model_type, plan, options, said)
        print(f"{model_type}: {said}", file=sys.stderr)
    Console(width=120).print(table)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
