"""A product behind an all_reduce, on two gloo processes of one thread: `python -m tools.bench_overlap [--rounds 41]`.

gloo on one machine has no link: it sums with the processor that computes the product. So every all_reduce also arrives
no sooner than `--latency` milliseconds after its start, as over a link of that latency; 0 leaves gloo as it is.

Each of two models is saved twice: with its collective scheduled (the wait moved to the first use of its result), and
with the wait right after the start. `apart` has a product that does not need the reduced sum; `chained`, the control,
has one that does, and its two files are equal. The processes load all four from their files and run them in turn, round
after round, in either order. What is printed is the time of the slower rank in the fastest tenth of the rounds, because
other processes disturb the rest, and scheduled over not scheduled; next to it the ratio that a perfect overlap would
give, from the times of the all_reduce alone and of the product alone.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import tpcompiler
from tests.launch import fork_ranks
from tpcompiler._torch import replace_group, resolve_group

ROWS, WIDTH, OUT = 2048, 128, 2048
MODELS, WAYS = ("apart", "chained"), ("scheduled", "at once")
PLAN = {"up": "colwise", "down": "rowwise", "side": "replicate"}
WARM = 3  # rounds that do not count


class Arriving(dist.Work):
    """The work of a collective whose result is there from a moment on."""

    def __init__(self, work: Any, moment: float) -> None:
        super().__init__()
        self.work, self.moment = work, moment

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        time.sleep(max(0.0, self.moment - time.perf_counter()))
        return True


class Link(dist.ProcessGroup):
    """A group whose sums arrive no sooner than the latency of a link after their start."""

    def __init__(self, group: dist.ProcessGroup, latency: float) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # its stubs omit this form
        self.group, self.latency = group, latency

    def allreduce(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        moment = time.perf_counter() + self.latency
        return Arriving(self.group.allreduce(tensors, opts), moment)


class Beside(nn.Module):
    """Two layers, whose sum the ranks reduce, and a product as large as it that needs it or does not."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, OUT, bias=False)
        self.side = nn.Linear(WIDTH, OUT, bias=False)
        self.apart = apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y + self.side(x if self.apart else y[:, :WIDTH])


def save(folder: Path) -> None:
    """Save every model in both ways."""
    for model in MODELS:
        torch.manual_seed(0)
        program = torch.export.export(Beside(model == "apart").eval(), (torch.zeros(ROWS, WIDTH),))
        tpcompiler.parallelize(program, 2, PLAN).save(folder / model / WAYS[0])
        with mock.patch("tpcompiler.parallel.partition.schedule_collectives", lambda program, *_: program):
            tpcompiler.parallelize(program, 2, PLAN).save(folder / model / WAYS[1])


def work(folder: Path, rounds: int, latency: float) -> None:
    """Time every file, and its parts, as one of the processes; rank 0 prints."""
    torch.set_num_threads(1)
    modules = {(model, way): tpcompiler.load(folder / model / way) for model in MODELS for way in WAYS}
    (name,) = tpcompiler.open(folder / MODELS[0] / WAYS[0]).manifest().groups
    link = Link(resolve_group(name), latency)
    replace_group(name, link)
    x, y, side = torch.randn(ROWS, WIDTH), torch.randn(ROWS, OUT), torch.randn(OUT, WIDTH)
    arms: dict[Any, Callable[[], object]] = {key: partial(module, x) for key, module in modules.items()}
    arms |= {
        "all_reduce": lambda: link.allreduce([y.fill_(1.0)], dist.AllreduceOptions()).wait(),
        "product": lambda: nn.functional.linear(x, side),
    }
    seconds: dict[Any, list[float]] = {key: [] for key in arms}
    with torch.no_grad():
        for each in MODELS:
            results = [modules[each, way](x) for way in WAYS]
            assert torch.equal(*results), f"{each}: the schedules differ"
        for turn in range(WARM + rounds):
            for key in list(arms) if turn % 2 else reversed(list(arms)):
                dist.barrier()
                began = time.perf_counter()
                arms[key]()
                took = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if turn >= WARM:
                    seconds[key].append(took.item())
    if dist.get_rank() == 0:
        quick = {key: statistics.quantiles(each, n=10)[0] * 1e3 for key, each in seconds.items()}
        sent, product = quick["all_reduce"], quick["product"]
        print(f"all_reduce {sent:.1f} ms (latency {latency * 1e3:.0f} ms), product {product:.1f} ms")
        for model in MODELS:
            late, once = (quick[model, way] for way in WAYS)
            middle = statistics.median(map(operator.truediv, *(seconds[model, way] for way in WAYS)))
            hidden = min(sent, product) if model == "apart" else 0.0
            print(
                f"{model}: scheduled {late:.1f} ms, at once {once:.1f} ms, ratio {late / once:.3f} "
                f"(median over the rounds {middle:.3f}); with perfect overlap {1 - hidden / once:.3f}"
            )
    dist.destroy_process_group()


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=41)
    options.add_argument("--latency", type=float, default=30, help="milliseconds")
    options.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args(words)
    warnings.simplefilter("ignore")
    if asked.work:
        work(asked.work, asked.rounds, asked.latency / 1e3)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        ended = fork_ranks(
            2,
            Path(__file__),
            *("--work", folder, "--rounds", str(asked.rounds), "--latency", str(asked.latency)),
            timeout=60 + 6 * asked.rounds,
        )
    print(
        "".join(line for line in ended.printed[0].splitlines(keepends=True) if " ms" in line) or ended.printed[0],
        end="",
    )
    return max(ended.codes)


if __name__ == "__main__":
    raise SystemExit(main())
