"""`python -m tools.scale [NAME ...]`: large models' shapes exported, converted and checked, without weights.

Prints seconds and peak of memory of each command, and writes the rows of these models into docs/scale.md. No checkpoint
is read: the shapes are those of the published configs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import tpcompiler
from tools.measured import measured_line

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 128256},
    **{"num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0},
}
QWEN: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "vocab_size": 151936},
    **{"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94},
    **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    **{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    **{"max_position_embeddings": 40960, "rope_theta": 1000000.0},
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# As published: https://huggingface.co/meta-llama and https://huggingface.co/Qwen/Qwen3-235B-A22B
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-70B": {**LLAMA, **dict(zip(SIZES, (8192, 28672, 80, 64), strict=True))},
    "Llama-3.1-405B": {**LLAMA, **dict(zip(SIZES, (16384, 53248, 126, 128), strict=True))},
    "Qwen3-235B-A22B": QWEN,
}
DEGREES = (8, 16)
HEAD = """\
# Large models

{line}

Each model is exported without weights, converted by the config's own plan, and checked; no checkpoint is read. Seconds
are wall-clock time on two cores that had other work too; memory is everything resident. The last column has the
parameters of one rank in bfloat16.

| model | parameters | ranks | export | convert | check | peak memory | artifact | on a rank |
|---|---|---|---|---|---|---|---|---|
"""


class Took(NamedTuple):
    seconds: float
    peak: float  # MiB


def timed(*command: str | Path) -> Took:
    """Run a command, and measure it."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} ended with {status}")
    return Took(time.perf_counter() - start, used.ru_maxrss / 1024)


def run(name: str) -> list[str]:
    """Measure a model, and return a line of the table for each degree."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "hf").mkdir()
        (home / "hf" / "config.json").write_text(json.dumps(MODELS[name]))
        call = [sys.executable, "-W", "ignore", "-m", "tpcompiler.cli"]
        exporting = timed(*call, "export", home / "hf", "-o", home / "model.pt2")
        for degree in DEGREES:
            out = home / f"out{degree}"
            plan = "--tp", str(degree), "--plan", home / "hf" / "config.json"
            converting = timed(*call, "convert", home / "model.pt2", *plan, "-o", out)
            checking = timed(*call, "check", out)
            whole, shares = tpcompiler.open(out).parameter_bytes()
            size = sum(file.stat().st_size for file in out.iterdir())
            peak = max(each.peak for each in (exporting, converting, checking)) / 1024
            times = (f"{each.seconds:.0f} s" for each in (exporting, converting, checking))
            sizes = f"{peak:.1f} GiB", f"{size / 1e6:.1f} MB", f"{shares[0] / 1e9:.1f} GB"
            cells = name, f"{whole / 2e9:.0f}B", str(degree), *times, *sizes
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def write(lines: list[str]) -> None:
    """Put lines into the page, in the place of those of the same model and degree."""
    text = PAGE.read_text(encoding="utf-8")
    known = {_row(line): line for line in [*text.splitlines(), *lines]}
    rows = [known[name, str(degree)] for name in MODELS for degree in DEGREES if (name, str(degree)) in known]
    head = HEAD.format(line=measured_line("python -m tools.scale"))
    PAGE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


def _row(line: str) -> tuple[str, str]:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return cells[0], cells[2] if len(cells) > 2 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    for name in parser.parse_args().names or MODELS:
        write(run(name))


if __name__ == "__main__":
    main()
