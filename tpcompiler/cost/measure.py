"""One rank of `calibrate`: time kernels, copies and collectives; rank 0 writes the results for a machine file."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
import torch.distributed as dist

from tpcompiler._torch import aten, c10d_functional
from tpcompiler.cost.collective import KINDS, wire_bytes
from tpcompiler.cost.machine_file import ShareOfRows
from tpcompiler.errors import reason
from tpcompiler.runtime.records import CollectiveKind, Record

ROUNDS = 7  # per measurement; the median counts
LONGEST = timedelta(minutes=1)  # per collective
SIZES = tuple(1 << power for power in range(9, 27))  # bytes of a payload: 512 B to 64 MB
LAUNCHES = 200  # of a small kernel, timed together in a CUDA graph
TURN = 0.01  # seconds to repeat a kernel on a CPU: longer than one scheduler turn on a shared core
TOGETHER = 1 << 20  # bytes of collectives timed together if the host runs them itself
WIDTH, ROWS = 512, (1, 2, 4, 8, 16, 32, 64, 128, 512)  # of small products whose weights fit a cache
FILLING = {"cpu": (512, 1 << 26), "cuda": (8192, 1 << 30)}  # side of a square matrix, and bytes that fit no cache


RESULT = "measured.json"


class LinksOfKind(Record, frozen=True, kw_only=True):
    """The links that explain the times of a kind of collective, or the reason why it cannot be measured."""

    collective: CollectiveKind
    ranks: int
    links: list[tuple[float, float]] = []  # latency and bytes/s, of which the faster counts
    error: float = 0.0  # mean, relative
    reason: str = ""


class Measurements(Record, frozen=True):
    """The results of all ranks."""

    backend: str
    rates: dict[str, float]
    again: dict[str, float]  # the rates at the end
    floors: dict[str, float]
    host: dict[str, float]
    links: list[LinksOfKind]
    cache_bandwidth: float | None = None  # without a compiler of kernels
    rows: list[ShareOfRows] = []  # likewise


def main(folder: str) -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=LONGEST)
    world, rates = dist.get_world_size(), measure_device(device)
    floors, host, written, rows = measure_floors(device), measure_host(device), None, list[ShareOfRows]()
    if not cuda:  # no compiler is assumed for a CPU
        written, rows = measure_uncompiled(rates["flops"], floors)
    links: list[LinksOfKind] = []
    for ranks in sorted({*(1 << power for power in range(1, world.bit_length())), world}):
        group = dist.new_group(list(range(ranks)), timeout=LONGEST)
        if dist.get_rank() < ranks:
            links += measure_links(ranks, group, device)
        dist.barrier()
    again = measure_device(device)
    if dist.get_rank() == 0:
        measured = Measurements(dist.get_backend(), rates, again, floors, host, links, written, rows)
        Path(folder, RESULT).write_bytes(msgspec.json.encode(measured))
    dist.destroy_process_group()


def measure_device(device: torch.device) -> dict[str, float]:
    """Return FLOP/s and bytes/s of the slowest rank while all work, and bytes of memory per rank."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    side, count = FILLING[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(count, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    product = seconds_each(lambda: torch.mm(a, b), device, 1)
    copy = seconds_each(lambda: target.copy_(source), device, 1)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()
    return {"flops": 2 * side**3 / product, "memory_bandwidth": 2 * count / copy, "memory": memory}


def measure_floors(device: torch.device) -> dict[str, float]:
    """Return the slowest rank's seconds for kernels that hardly move or multiply anything; on a GPU in a CUDA graph."""
    dtype, side = (torch.bfloat16, 64) if device.type == "cuda" else (torch.float32, 8)
    small = torch.zeros(side, side, device=device, dtype=dtype)
    query = torch.zeros(1, 4, 1, 64, device=device, dtype=dtype)
    cache = torch.zeros(1, 4, 64, 64, device=device, dtype=dtype)
    kernels: dict[str, Callable[[], object]] = {
        "product": lambda: aten.linear.default(small, small),
        "attention": lambda: aten.scaled_dot_product_attention.default(query, cache, cache),
        "other": lambda: aten.add.Tensor(small, small),
    }
    return {name: seconds_each(kernel, device) for name, kernel in kernels.items()}


def measure_uncompiled(flops: float, floors: dict[str, float]) -> tuple[float, list[ShareOfRows]]:
    """Return the bytes/s of just written values on a processor that runs op by op, and the shares of small products.

    Floors are those of common ops in turn, as in a graph: repeated calls of one op take half as long.
    """
    device, little, much = torch.device("cpu"), _common_kernels(1), _common_kernels(256)
    ops, views = seconds_each(partial(_in_turn, little), device), _common_views()
    floors["other"] = ops / len(little)
    floors["view"] = seconds_each(partial(_in_turn, views), device) / len(views)
    count, took = 2 * 256 * WIDTH * 4 * len(much), work_seconds(seconds_each(partial(_in_turn, much), device), ops)
    weight, shares = torch.randn(WIDTH, WIDTH), list[ShareOfRows]()
    for rows in ROWS:
        seconds = seconds_each(partial(aten.linear.default, torch.randn(rows, WIDTH), weight), device)
        share = 2 * rows * WIDTH**2 / work_seconds(seconds, floors["product"]) / flops
        shares.append(ShareOfRows(rows=rows, share=share))
    return count / took, shares


def work_seconds(seconds: float, floor: float) -> float:
    """Return the part of a kernel's seconds that is not its floor: a tenth at least, since both are measured alone.

    On a busy machine the floor can come out longer than what contains it.
    """
    return max(seconds - floor, seconds / 10)


def _in_turn(kernels: Sequence[Callable[[], object]]) -> None:
    for kernel in kernels:
        kernel()


def _common_kernels(rows: int) -> list[Callable[[], object]]:
    """Return a transformer's most common kernels except products; each reads about as much as it writes."""
    x, row = torch.randn(rows, WIDTH), torch.randn(WIDTH)
    heads = x.view(rows, -1, 64).transpose(0, 1)
    return [
        partial(aten.add.Tensor, x, x),
        partial(aten.mul.Tensor, x, row),
        partial(aten.sigmoid.default, x),
        partial(aten.gelu.default, x),
        partial(aten.relu.default, x),
        partial(aten.pow.Tensor_Scalar, x, 2),
        partial(aten.mean.dim, x, [-1], True),
        partial(aten.softmax.int, x, -1),
        partial(aten.layer_norm.default, x, [WIDTH], row, row),
        partial(aten.clone.default, heads, memory_format=torch.contiguous_format),
    ]


def _common_views() -> list[Callable[[], object]]:
    x = torch.zeros(4, 8, 16)
    return [
        partial(aten.view.default, x, [4, 8, 4, 4]),
        partial(aten.transpose.int, x, 1, 2),
        partial(aten.unsqueeze.default, x, 1),
        partial(aten.slice.Tensor, x, 1, 0, 4),
        partial(aten.expand.default, x, [4, 8, 16]),
        partial(aten.select.int, x, 0, 0),
    ]


def seconds_each(kernel: Callable[[], object], device: torch.device, launches: int = LAUNCHES) -> float:
    """Return the slowest rank's seconds per kernel while all run it: `launches` in a CUDA graph, or TURN on a CPU."""
    if device.type == "cuda":
        return seconds_of(_capture(kernel, launches) if launches > 1 else kernel, device, None) / launches
    kernel()
    began = time.perf_counter()
    kernel()
    fastest = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    times = max(1, math.ceil(TURN / fastest.item()))

    def run() -> None:  # until all are done: if ranks share a core, one starts when another ends
        _call(kernel, times)
        dist.barrier()

    return seconds_of(run, device, None) / times


def _capture(kernel: Callable[[], object], times: int) -> Callable[[], object]:
    _call(kernel, times)  # libraries create their workspaces before a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _call(kernel, times)
    return graph.replay


def _call(kernel: Callable[[], object], times: int) -> None:
    for _ in range(times):
        kernel()


def measure_host(device: torch.device) -> dict[str, float]:
    """Return the host's seconds to launch an operation and a collective; {} if it runs them itself."""
    if device.type != "cuda":
        return {}
    small = torch.zeros(64, device=device)
    took = {}
    for name, call in (("operation", lambda: torch.add(small, small)), ("collective", lambda: dist.all_reduce(small))):
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        took[name] = (time.perf_counter() - began) / LAUNCHES
        torch.cuda.synchronize()
    return took


def measure_links(ranks: int, group: Any, device: torch.device) -> Iterator[LinksOfKind]:
    """Yield `measure_link` for each kind of collective."""
    for kind in KINDS:
        try:
            yield measure_link(kind, ranks, group, device)
        except RuntimeError as error:  # such as a missing collective
            yield LinksOfKind(collective=kind, ranks=ranks, reason=reason(error))


def measure_link(kind: CollectiveKind, ranks: int, group: Any, device: torch.device) -> LinksOfKind:
    """Measure the links of a kind of collective in a group of so many ranks, and the error of the fit.

    Calls it as programs do: with a separate result, and a wait for it. The fastest link counts.

    Raises:
        RuntimeError: the backend lacks the collective.
    """
    sent, seconds = list[float](), list[float]()
    for size in SIZES:
        count, name = size // 4 // ranks * ranks, group.group_name
        whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
        parts = [count // ranks] * ranks
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "all_reduce": partial(c10d_functional.all_reduce, whole, "sum", name),
            "all_gather": partial(c10d_functional.all_gather_into_tensor, part, ranks, name),
            "reduce_scatter": partial(c10d_functional.reduce_scatter_tensor, whole, "sum", ranks, name),
            "all_to_all": partial(c10d_functional.all_to_all_single, whole, parts, parts, name),
        }
        times = 1 if device.type == "cuda" else max(1, min(LAUNCHES // 10, TOGETHER // size))
        waited = partial(_wait, calls[kind])
        seconds.append(seconds_of(partial(_call, waited, times), device, group) / times)
        sent.append(wire_bytes(kind, count * 4, ranks))
    links, error = fit_links(sent, seconds)
    return LinksOfKind(collective=kind, ranks=ranks, links=links, error=error)


def _wait(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    waited: torch.Tensor = c10d_functional.wait_tensor(call())
    return waited


def seconds_of(call: Callable[[], object], device: torch.device, group: Any) -> float:
    """Return the median over rounds, on the slowest rank."""
    samples = []
    for _ in range(ROUNDS + 1):
        dist.barrier(group=group)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    longest = torch.tensor(statistics.median(samples[1:]), dtype=torch.float64, device=device)  # the first one warms up
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return longest.item()


def fit_links(sent: list[float], seconds: list[float]) -> tuple[list[tuple[float, float]], float]:
    """Fit one or two links (latency, bytes/s), of which the faster counts; return them and their mean relative error.

    Small and large messages use different protocols: each split of the sizes is tried, with a line fitted to either
    part. No message may be faster than half of the fastest observed one, because smaller messages have a latency too.
    """
    candidates = [[fit_link(sent, seconds)]]
    for at in range(2, len(sent) - 1):
        candidates.append([fit_link(sent[:at], seconds[:at]), fit_link(sent[at:], seconds[at:])])

    def error(links: list[tuple[float, float]]) -> float:
        predicted = (min(latency + wire / bandwidth for latency, bandwidth in links) for wire in sent)
        return statistics.fmean(abs(math.log(p / took)) for p, took in zip(predicted, seconds, strict=True))

    least = min(seconds) / 2
    best = min(
        [links for links in candidates if all(latency >= least for latency, _ in links)] or candidates, key=error
    )
    return best, error(best)


def fit_link(sent: list[float], seconds: list[float]) -> tuple[float, float]:
    """Return the latency and bytes/s that explain these times with the least relative errors."""
    wire, took = numpy.array(sent), numpy.array(seconds)
    (latency, per_byte), *_ = numpy.linalg.lstsq(numpy.stack([1 / took, wire / took], 1), numpy.ones_like(took))
    if per_byte <= 0:  # too noisy to measure
        latency, per_byte = 0.0, (took / wire).min()
    elif latency < 0:
        latency, per_byte = 0.0, 1 / (wire / took).mean()
    return float(latency), float(1 / per_byte)


if __name__ == "__main__":
    main(*sys.argv[1:])
