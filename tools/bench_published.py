"""Predicted against published steps: `python -m tools.bench_published [--write]`.

Every row of tools/published/steps.csv is a measured step of a decoder under tensor parallelism. Its model is built from
its dimensions without weights, placed by Megatron's plan, and its step is predicted for the machine file of its GPU.
Layers alike are placed alike: two and three of them are converted, and each more adds what the third does. Nothing is
fitted to the rows. A speed-up is over the least ranks of one run.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec.structs import astuple
from scipy.stats import spearmanr
from torch.export import ExportedProgram

from tools.measured import measured_line
from tools.published.model import Dims, export_decoder, export_from_config, megatron_plan
from tpcompiler.api.request import Request
from tpcompiler.cost.fusion import PARTS
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.timeline import StepTime
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.plan.plan import Plan
from tpcompiler.solver.estimate import measure_step_time

ROWS = Path(__file__).parent / "published" / "steps.csv"
GPUS = {"A100-SXM-80GB": "a100", "A100-SXM-40GB": "a100", "H100-SXM-80GB": "h100", "H200-SXM-141GB": "h200"}
GPUS |= {"B200-SXM-180GB": "b200"}  # what the other rows ran on has no machine file
IN_GRAPHS = ("meta-pytorch/gpt-fast", "vLLM performance-benchmark", "NVIDIA NIM", "ai-dynamo/aiconfigurator")
HOST_BOUND = ("huggingface/text-generation-inference",)  # without graphs: the host takes 28 ms whatever the ranks
WHOLE_HEAD = ("meta-pytorch/gpt-fast",)


@dataclass(frozen=True)
class Row:
    """A published step."""

    source: str
    gpu: str
    model: str
    dims: Dims
    batch: int
    prompt: int
    is_decode: bool
    ranks: int
    measured: float  # seconds

    @property
    def machine(self) -> str:
        """The machine file of its GPU and of how its collectives ran."""
        if self.ranks > 8:
            return "a100-2x8"
        return GPUS[self.gpu] + ("-graph" if self.source.startswith(IN_GRAPHS) else "")

    @property
    def run(self) -> tuple[Any, ...]:
        """Equal for rows that differ in their ranks only."""
        return self.source, self.gpu, self.model, self.dims, self.batch, self.prompt, self.is_decode

    @property
    def is_in_transformers(self) -> bool:
        """True if transformers has the architecture, in these dtypes."""
        return self.dims.gated and self.dims.itemsize == 2

    def predict(self, plan: Mapping[str, object] | str | None) -> StepTime:
        """The step under a plan; without one, of the program that transformers' model exports, under its config's."""
        two, three = (astuple(self.predict_layers(layers, plan)) for layers in (2, 3))
        rest = self.dims.layers - 2
        each = [part + rest * (more - part) for part, more in zip(two[:-1], three[:-1], strict=True)]
        return StepTime.of(dict(zip(PARTS, each, strict=False)), *each[len(PARTS) :])

    def predict_layers(self, layers: int, plan: Mapping[str, object] | str | None) -> StepTime:
        """The step of a model that has so many layers."""
        given = replace(self.dims, layers=layers), self.batch, self.prompt, self.is_decode
        exported, read = _from_config(*given) if plan is None else (_built(*given), plan)
        machine = read_machine(self.machine)
        (conversion,) = Request(exported, self.ranks, read, machine=machine).conversions().values()
        found = find_placements([conversion.with_asked(memory=None)])  # they ran
        return measure_step_time(found, machine)

    def by_megatron(self) -> StepTime:
        return self.predict(megatron_plan(self.dims, whole_head=self.source.startswith(WHOLE_HEAD)))


@lru_cache(maxsize=2)
def _built(dims: Dims, batch: int, prompt: int, is_decode: bool) -> ExportedProgram:
    return export_decoder(dims, batch, prompt, is_decode=is_decode)


@lru_cache(maxsize=2)
def _from_config(dims: Dims, batch: int, prompt: int, is_decode: bool) -> tuple[ExportedProgram, Plan]:
    return export_from_config(dims, batch, prompt, is_decode=is_decode)


def read_rows() -> list[Row]:
    """The rows that a machine file describes."""
    with ROWS.open(encoding="utf-8") as file:
        rows = [_read_row(each) for each in csv.DictReader(file)]
    return [row for row in rows if row.gpu in GPUS and not row.source.startswith(HOST_BOUND)]


def _read_row(each: dict[str, str]) -> Row:
    name, number = each["model"], {key: int(each[key]) for key in ("layers", "hidden", "heads", "kv_heads", "vocab")}
    dims = Dims(
        **number,
        intermediate=int(each["intermediate"]),
        gated=not name.startswith(("GPT", "Falcon")),
        experts=8 if name.startswith("Mixtral") else 0,
        head_dim=128 if name.startswith("Qwen3") else 0,
        parallel=name.startswith("Falcon"),
        itemsize=math.ceil(float(each["dtype_bytes"])),
    )
    call = int(each["batch"]), int(each["prompt_len"]), each["phase"] == "decode", int(each["tp"])
    return Row(each["source"], each["gpu"], name, dims, *call, float(each["measured_ms_per_step"]) / 1e3)


def find_speedups(steps: Sequence[tuple[Row, float]]) -> Iterator[tuple[float, float]]:
    """Measured and predicted speed-up of each row over the row of the least ranks of its run."""
    runs: dict[tuple[Any, ...], list[tuple[Row, float]]] = {}
    for row, predicted in steps:
        runs.setdefault(row.run, []).append((row, predicted))
    for own in runs.values():
        (first, base), *rest = sorted(own, key=lambda pair: pair[0].ranks)
        for row, predicted in rest:
            yield first.measured / row.measured, base / predicted


def summarise(steps: Sequence[tuple[Row, float]]) -> tuple[str, ...]:
    """Rows, their median ratio, how many lie within 15 % and 25 %, the same of speed-ups, and the rank correlation."""
    ratios = [predicted / row.measured for row, predicted in steps]
    gains = [predicted / measured for measured, predicted in find_speedups(steps)]

    def within(share: float, values: Sequence[float]) -> str:
        return str(sum(abs(value - 1) <= share for value in values))

    said = [str(len(ratios)), f"{statistics.median(ratios):.2f}", within(0.15, ratios), within(0.25, ratios)]
    said += [str(len(gains)), f"{statistics.median(gains):.2f}" if gains else "-", within(0.15, gains)]
    said += [within(0.25, gains)]
    return *said, f"{spearmanr(*zip(*((row.measured, p) for row, p in steps), strict=True)).statistic:.2f}"


def groups(steps: Sequence[tuple[Row, float]]) -> Iterator[tuple[str, Sequence[tuple[Row, float]]]]:
    """All rows, and those by which a part of the prediction is seen."""
    fast = [each for each in steps if each[0].source.startswith("meta-pytorch/gpt-fast")]
    yield "all", steps
    yield "gpt-fast, bfloat16", [each for each in fast if each[0].dims.itemsize == 2]
    yield "serving engines of 2026", [each for each in steps if each[0].source.startswith("ai-dynamo")]
    long = [each for each in steps if not each[0].is_decode and each[0].prompt == 2048]
    yield "prefill of 2,048, A100", [each for each in long if each[0].gpu.startswith("A100")]


PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
HEAD = """# How good the predicted seconds are

Predicted steps of decoders under tensor parallelism next to published ones. The first table has the median of predicted
over published time, and the number of rows within 15 % and 25 %; then the same for speed-ups over the fewest ranks of a
run.

{line}

Every model is built from its dimensions without weights, placed by Megatron's plan, and priced with the machine file
of its GPU ([machines.md](machines.md)). Nothing is fitted to these rows, and no rows were held out. `exported` is what
users get: the program of `tpcompiler export --prefill-decode` under the plan of its config.json, for models that
transformers has, in bfloat16. An exported mixture copies the matrices of the chosen experts
([decoding.md](decoding.md)). `tools/published/steps.csv` has the full sources.

Known causes of errors:

- A serving engine adds 0.5 to 2 ms a step for scheduling and sampling.
- FasterTransformer has no CUDA graphs, and its collectives wait for the slowest rank: they take about 2.5 times as long
  as in a loop.
- Rows with one byte a weight are int8 on A100 and fp8 elsewhere. The prediction reads fp8 weights as bytes, but
  multiplies at bfloat16's FLOP/s; the measurement multiplies at fp8's.

Left out are rows of GPUs without a machine file (MI300X, RTX 4090), and those of text-generation-inference, whose host
takes 28 ms a step for any number of ranks.

"""


def render(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the page."""
    head, *lines = (f"| {' | '.join(cells)} |\n" for cells in (titles, *rows))
    return "".join((head, "|---" * len(titles), "|\n", *lines))


ROW = (
    *("source", "GPU", "model", "bytes", "batch", "call", "tp", "measured ms", "predicted ms", "ratio"),
    "exported ms",
)
FOUND_IN = re.compile(r" README$| docs/[\w/.]+$| silicon_sample\.csv")  # the file, inside of a source
SUMMARY = ("rows", "", "median", "15 %", "25 %", "speed-ups", "median", "15 %", "25 %", "rank correlation")


def name_row(row: Row) -> tuple[str, ...]:
    """GPU, model, bytes of a weight, batch, call and ranks."""
    call = f"{'decode after' if row.is_decode else 'prefill of'} {row.prompt}"
    return row.gpu, row.model, str(row.dims.itemsize), str(row.batch), call, str(row.ranks)


def cells_of(row: Row, step: StepTime, exported: StepTime | None) -> tuple[str, ...]:
    """A line of the table: of the built model, and of the exported model."""
    times = f"{row.measured * 1e3:.2f}", f"{step.total * 1e3:.2f}", f"{step.total / row.measured:.2f}"
    own = "" if exported is None else f"{exported.total * 1e3:.2f}"
    return FOUND_IN.sub("", row.source), *name_row(row), *times, own


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="rows whose source or model begins so")
    options.add_argument("--write", action="store_true", help="write docs/accuracy.md")
    asked = options.parse_args(words)
    warnings.simplefilter("ignore")
    steps, rows = list[tuple[Row, float]](), list[tuple[str, ...]]()
    for row in read_rows():
        if row.source.startswith(asked.only) or row.model.startswith(asked.only):
            step = row.by_megatron()
            steps.append((row, step.total))
            exported = row.predict(None) if row.is_in_transformers else None
            rows.append(cells_of(row, step, exported))
            print(*rows[-1], step.text, flush=True)
    summary = [(name, *summarise(own)) for name, own in groups(steps) if own]
    print(render(ROW, rows), render(SUMMARY, summary), sep="\n")
    if asked.write:
        head = HEAD.format(line=measured_line("python -m tools.bench_published --write"))
        PAGE.write_text(f"{head}{render(SUMMARY, summary)}\n{render(ROW, rows)}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
