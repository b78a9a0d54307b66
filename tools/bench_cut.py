"""`python -m tools.bench_cut [--gb 12 --hidden 4096 --tp 2 --other 3]`: the way of a checkpoint, and its memory.

Prints the seconds of each command next to those of `cp`, and two peaks of memory: all that is resident, mapped files
too, and RssAnon alone, which maps no file (sampled). The checkpoint is random numbers in bfloat16 of a Llama of as many
layers as make that size, in files of at most 2 GiB. All is read and written in one directory. `--write` puts the table
of the sizes that are used by default into docs/scale.md.
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
SMALL = {"gb": 0.6, "hidden": 1024, "tp": 4, "other": 3}
COLUMNS = ("", "seconds", "peak MiB", "of it RssAnon, MiB")


def write_checkpoint(directory: Path, size: float, hidden: int) -> None:
    """Write a Llama's config.json and weights of about `size` GiB."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import tpcompiler
    from tpcompiler.checkpoint.files import INDEX
    from tpcompiler.runtime.weights import TensorEntry, lay_out, write_weights

    inner = 43 * hidden // 16  # of Llama's 7B
    shape: Any = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 32000}
    shape["num_attention_heads"] = hidden // 128
    per_layer = 2 * (4 * hidden**2 + 3 * hidden * inner)
    layers = max(1, round((size * GIB - 4 * 32000 * hidden) / per_layer))
    config = LlamaConfig(**shape, num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    build: Any = AutoModelForCausalLM.from_config
    with tpcompiler.weightless():
        model = build(config, dtype=torch.bfloat16)
    config.save_pretrained(directory)
    files: list[list[TensorEntry]] = [[]]
    for name, value in model.named_parameters():
        entry = TensorEntry(name, value.dtype, tuple(value.shape))
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


LOAD = """
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
    parser.add_argument("--gb", type=float, help="GiB of the checkpoint")
    parser.add_argument("--hidden", type=int, help="features of the model")
    parser.add_argument("--tp", type=int, help="ranks")
    parser.add_argument("--other", type=int, help="ranks of the artifact that `reshard` writes")
    parser.add_argument("--write", action="store_true", help="write docs/scale.md")
    parser.set_defaults(**SMALL)
    parser.add_argument("--directory", help="where it is written; by default the system's for temporary files")
    asked = parser.parse_args()
    if asked.write and any(getattr(asked, name) != value for name, value in SMALL.items()):
        parser.error("the page has the sizes that are used by default")
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        home = Path(name)
        given = home / "checkpoint"
        given.mkdir()
        # In a process of its own: what this one holds would be counted as its children's.
        writing = multiprocessing.get_context("spawn").Process(
            target=write_checkpoint, args=(given, asked.gb, asked.hidden)
        )
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
        torch_alone = timed(sys.executable, "-c", "import torch")
        rows = {"`import torch` alone": torch_alone, "export": exporting, "convert": converting, "cut": cutting}
        rows["convert --checkpoint"] = timed(
            *call, "convert", home / "model.pt2", *plan, "--checkpoint", given, "-o", home / "again"
        )
        shutil.rmtree(home / "again")
        rows["load rank 0"] = timed(sys.executable, "-c", LOAD, home / "out")
        for word in ("check", "verify"):
            rows[word] = timed(*call, word, home / "out", "--checkpoint", given)
        rows["reshard"] = timed(*call, "reshard", home / "out", "--tp", str(asked.other), "-o", home / "other")
        shutil.rmtree(home / "other")
        rows["merge"] = timed(*call, "reshard", "--single-device", home / "out", "-o", home / "merged.pt2")
    rows["largest tensor"] = Took(0, 0, largest / 2**20)
    cells = [
        [name, *(f"{value:,.{digits}f}" if value else "" for value, digits in zip(row, (1, 0, 0), strict=True))]
        for name, row in rows.items()
    ]
    table = Table(*COLUMNS, title=f"{size / GIB:.1f} GiB for {asked.tp} ranks")
    for row in cells:
        table.add_row(*row)
    Console().print(table)
    print(
        f"cp before and after the cut took {first:.1f} and {second:.1f} s: {cutting.seconds / max(first, second):.2f}"
    )
    if asked.write:
        from tools.scale import write_memory

        write_memory(COLUMNS, cells)


if __name__ == "__main__":
    main()
