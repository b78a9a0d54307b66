"""A decoder from Hugging Face on several ranks: prompt and steps over one static cache, as programs and compiled.

python examples/generate.py [DIRECTORY] [--tp 2] [--sample] [--stop ID ...]
torchrun --nproc-per-node 2 examples/generate.py --artifact OUT [--compiled] ...

DIRECTORY has a config.json and safetensors; without one a small Llama with random weights is written first. The tokens
are compared with those of transformers' own `generate` on one device, and the speeds are printed side by side.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tpcompiler

Pick = Callable[[torch.Tensor], torch.Tensor]  # from (batch, vocabulary) to (batch,)
PAD = 0


def generate(
    programs: Mapping[str, Any], ids: torch.Tensor, count: int, pick: Pick, stop: Sequence[int] = ()
) -> Iterator[torch.Tensor]:
    """The next token of every row, one step at a time; of a row that has stopped, padding.

    Args:
        programs: `prefill` and `decode`, as `tpcompiler.load` gives them.
        ids: (batch, length) prompts of one length; with `count` the cache must have room for them.
    """
    run, new, position = programs["prefill"], ids, 0
    stopped = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(count):
        logits = run(input_ids=new, cache_position=torch.arange(position, position + new.shape[1]))
        token = torch.where(stopped, PAD, pick(logits[:, -1]))
        yield token
        stopped |= torch.isin(token, torch.tensor(stop, dtype=torch.int64))
        if stopped.all():
            return
        run, new, position = programs["decode"], token[:, None], position + new.shape[1]


def sample(temperature: float, top_k: int, seed: int) -> Pick:
    """Draw from the `top_k` most likely. Logits are the same bits on all ranks, so with one seed all draw alike."""
    generator = torch.Generator().manual_seed(seed)

    def pick(logits: torch.Tensor) -> torch.Tensor:
        scaled = logits.float() / temperature
        least = scaled.topk(top_k).values[:, -1:]
        likely = scaled.masked_fill(scaled < least, -torch.inf).softmax(-1)
        return torch.multinomial(likely, 1, generator=generator)[:, 0]

    return pick


def prompts(asked: argparse.Namespace) -> torch.Tensor:
    return torch.arange(asked.batch * asked.length).reshape(asked.batch, -1) % 97 + 2


def serve(asked: argparse.Namespace) -> None:
    """One rank: generate once to warm up, and once more, printing tokens as they come."""
    programs = tpcompiler.load(asked.artifact, compiled=asked.compiled)
    first = torch.distributed.get_rank() == 0
    for again in (False, True):
        pick = sample(0.8, 20, seed=0) if asked.sample else lambda logits: logits.argmax(-1)
        began, steps = time.perf_counter(), []
        for token in generate(programs, prompts(asked), asked.tokens, pick, asked.stop):
            steps.append(token)
            if first and again:
                print(*token.tolist(), flush=True)
        spent = time.perf_counter() - began
    if first:
        torch.save(torch.stack(steps, 1), asked.artifact.with_suffix(".tokens"))
        print(f"{len(steps) * asked.batch / spent:.0f} tokens/s")


def launch(asked: argparse.Namespace, artifact: Path, *words: str) -> tuple[torch.Tensor, str]:
    """All ranks, each a process of this script; the tokens, and the last line that rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.tp}"]
    own = ["--artifact", str(artifact), *words, *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [*command, __file__, *own], env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    return torch.load(artifact.with_suffix(".tokens")), done.stdout.splitlines()[-1]


def write_checkpoint(directory: Path) -> Path:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def on_one_device(asked: argparse.Namespace, source: Path) -> tuple[torch.Tensor, str]:
    """The tokens of transformers' own `generate`, greedy, and its speed after a first run."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source)
    ids = prompts(asked)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": asked.tokens, "do_sample": False}
    given |= {"pad_token_id": PAD, "eos_token_id": asked.stop or None}
    for _ in range(2):
        began = time.perf_counter()
        made = model.generate(ids, **given)[:, asked.length :]
        spent = time.perf_counter() - began
    return made, f"{made.numel() / spent:.0f} tokens/s"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("source", type=Path, nargs="?", metavar="DIRECTORY")
    options.add_argument("--tp", type=int, default=2, help="ranks")
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--length", type=int, default=8, help="tokens of a prompt")
    options.add_argument("--tokens", type=int, default=24, help="how many to generate")
    options.add_argument("--stop", type=int, nargs="*", default=[], metavar="ID", help="tokens that end a row")
    options.add_argument("--sample", action="store_true", help="draw them, in place of the most likely")
    options.add_argument("--artifact", type=Path, metavar="OUT", help="be a rank of this one, with prefill and decode")
    options.add_argument("--compiled", action="store_true", help="run its package")
    asked = options.parse_args()
    if asked.artifact:
        serve(asked)
        return 0
    torch.set_num_threads(1)  # as each rank has
    with tempfile.TemporaryDirectory() as folder:
        source = asked.source or write_checkpoint(Path(folder) / "checkpoint")
        models, artifact = Path(folder) / "models", Path(folder) / "out"
        room = ["--batch", str(asked.batch), "--max-length", str(asked.length + asked.tokens)]
        paths = [str(models / f"{name}.pt2") for name in ("prefill", "decode")]
        plan = ["--plan", str(source / "config.json"), "--checkpoint", str(source)]
        for words in (
            ["export", str(source), "--prefill-decode", *room, "-o", str(models)],
            ["convert", *paths, "--tp", str(asked.tp), *plan, "-o", str(artifact)],
            ["package", str(artifact)],
        ):
            subprocess.run([sys.executable, "-m", "tpcompiler.cli", *words], stdout=subprocess.DEVNULL, check=True)
        plain, plain_speed = launch(asked, artifact)
        compiled, compiled_speed = launch(asked, artifact, "--compiled")
        wanted, speed = on_one_device(asked, source)
    print(f"{asked.tp} ranks: {plain_speed}; compiled: {compiled_speed}; transformers on one device: {speed}")
    same = torch.equal(plain, compiled)
    print("compiled or not, the tokens are", "the same" if same else "NOT THE SAME")
    if not asked.sample:
        same = same and torch.equal(plain, wanted)
        print("and those of transformers' generate" if same else "NOT those of transformers' generate")
    print("first row:", *plain[0].tolist())
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
