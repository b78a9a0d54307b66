"""`python -m tools.bench_cut [--gb 12] [--tp 2] [--judge]`: cutting a checkpoint of several files, beside `cp`.

Prints the time of each and their ratio, and the peaks of memory next to the largest tensor: all that is resident,
mapped files too, and what is not mapped (RssAnon, sampled), of `export`, `convert`, `cut`, `reshard` and `merge`. The
checkpoint is random numbers in bfloat16 of a Llama of as many layers as make that size. All is read and written in one
directory. With `--judge` also `check` and `verify` of what was cut.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

GIB = 2**30
FILE = 2 * GIB  # of the checkpoint


def write_checkpoint(directory: Path, size: float) -> None:
    """A Llama's config.json and weights of about `size` GiB."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import tpcompiler
    from tpcompiler.checkpoint.files import INDEX
    from tpcompiler.runtime.weights import Entry, lay_out, write_weights

    shape: Any = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
    per_layer = 2 * (4 * 4096**2 + 3 * 4096 * 11008)
    layers = max(1, round((size * GIB - 4 * 32000 * 4096) / per_layer))
    config = LlamaConfig(**shape, num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    build: Any = AutoModelForCausalLM.from_config
    with tpcompiler.weightless():
        model = build(config, dtype=torch.bfloat16)
    config.save_pretrained(directory)
    files: list[list[Entry]] = [[]]
    for name, value in model.named_parameters():
        entry = Entry(name, value.dtype, tuple(value.shape))
        if sum(each.nbytes for each in files[-1]) + entry.nbytes > FILE:
            files.append([])
        files[-1].append(entry)
    where = {}
    for at, entries in enumerate(files):
        name = f"model-{at + 1:05}-of-{len(files):05}.safetensors"
        ordered = lay_out(entries)
        write_weights(directory / name, ordered, (torch.randn(e.shape, dtype=torch.bfloat16) for e in ordered))
        where.update({entry.name: name for entry in entries})
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))
    largest = max(entry.nbytes for entries in files for entry in entries)
    (directory / "largest").write_text(str(largest))


READ = """
import sys
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.rank_file import read_rank
read_rank(sys.argv[1], read_manifest(sys.argv[1]), 0).module()
"""


class Took(NamedTuple):
    seconds: float  # until all is on the disk
    peak: float  # MiB
    own: float  # of memory that maps no file, MiB


def timed(*command: str | Path) -> Took:
    """Run a command, and measure it."""
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    own, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal own
        while not ended.wait(0.01):  # what is held for a moment counts, too
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                own = max(own, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

    watching = threading.Thread(target=watch)
    watching.start()
    _, status, used = os.wait4(process.pid, 0)
    ended.set()
    watching.join()
    os.sync()
    if status:
        raise SystemExit(f"{command[0]} ended with {status}")
    return Took(time.perf_counter() - start, used.ru_maxrss / 1024, own / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=12, help="GiB of the checkpoint")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--judge", action="store_true", help="check and verify what was cut, too")
    parser.add_argument("--directory", help="where it is written; by default the system's for temporary files")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        home = Path(name)
        given = home / "checkpoint"
        given.mkdir()
        # In a process of its own: what this one holds would be counted as its children's.
        writing = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=(given, asked.gb))
        writing.start()
        writing.join()
        largest = int((given / "largest").read_text())
        size = sum(path.stat().st_size for path in given.glob("*.safetensors"))
        call = [sys.executable, "-m", "tpcompiler.cli"]
        exporting = timed(*call, "export", given, "-o", home / "model.pt2")
        plan = ["--tp", str(asked.tp), "--plan", str(given / "config.json")]
        converting = timed(*call, "convert", home / "model.pt2", *plan, "-o", home / "out")
        first = timed("cp", "-r", given, home / "copy").seconds
        shutil.rmtree(home / "copy")
        cutting = timed(*call, "cut", home / "out", "--checkpoint", given)
        second = timed("cp", "-r", given, home / "copy").seconds
        shutil.rmtree(home / "copy")
        rows = {"export": exporting, "convert": converting, "cut": cutting}
        rows["convert --checkpoint"] = timed(
            *call, "convert", home / "model.pt2", *plan, "--checkpoint", given, "-o", home / "again"
        )
        shutil.rmtree(home / "again")
        if asked.judge:
            rows["read rank 0, and its hash"] = timed(sys.executable, "-c", READ, home / "out")
            for word in ("check", "verify"):
                rows[word] = timed(*call, word, home / "out", "--checkpoint", given)
        other = str(asked.tp + 1)  # which divides little
        rows[f"reshard to {other}"] = timed(*call, "reshard", home / "out", "--tp", other, "-o", home / "other")
        shutil.rmtree(home / "other")
        rows["merge"] = timed(*call, "merge", home / "out", "-o", home / "merged.pt2")
    table = Table(title=f"{size / GIB:.1f} GiB in files of {FILE / GIB:.0f} GiB, for {asked.tp} ranks")
    for column in ("", "s", "peak MiB", "not mapped"):
        table.add_column(column, justify="right" if column else "left")
    for name, (seconds, peak, own) in rows.items():
        table.add_row(name, f"{seconds:.1f}", f"{peak:,.0f}", f"{own:,.0f}")
    table.add_row("cp, before and after", f"{first:.1f}, {second:.1f}")
    table.add_row("cut / cp", f"{cutting.seconds / first:.2f}, {cutting.seconds / second:.2f}")
    table.add_row("the largest tensor", "", f"{largest / 2**20:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
