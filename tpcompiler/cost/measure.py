"""One rank of `calibrate`: time kernels, copies and collectives, and let rank 0 write what a machine file says."""

from __future__ import annotations

import json
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

import numpy
import torch
import torch.distributed as dist

from tpcompiler._torch import aten, c10d_functional
from tpcompiler.cost.collective import KINDS, wire_bytes
from tpcompiler.errors import reason

ROUNDS = 7  # of each measurement, of which the median counts
LONGEST = timedelta(minutes=1)  # of one collective
SIZES = tuple(1 << power for power in range(9, 27))  # bytes of a payload: 512 B to 64 MB
LAUNCHES = 200  # of a small kernel, which are timed together in a CUDA graph
TURN = 0.01  # seconds that a kernel is repeated on a CPU: longer than a turn of a core that processes share
TOGETHER = 1 << 20  # bytes of collectives that are timed together where the host runs them itself
WIDTH, ROWS = 512, (1, 2, 4, 8, 16, 32, 64, 128, 512)  # of small products; their weights fit a cache
FILLING = {"cpu": (512, 1 << 26), "cuda": (8192, 1 << 30)}  # side of a square matrix, and bytes that no cache holds


def main(folder: str) -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=LONGEST)
    world, rates = dist.get_world_size(), measure_device(device)
    floors, host, more = measure_floors(device), measure_host(device), dict[str, Any]()
    if not cuda:  # nobody compiles for it
        more = measure_uncompiled(rates["flops"], floors)
    links, missing = list[dict[str, Any]](), list[dict[str, Any]]()
    for ranks in sorted({*(1 << power for power in range(1, world.bit_length())), world}):
        group = dist.new_group(list(range(ranks)), timeout=LONGEST)
        if dist.get_rank() < ranks:
            for each in measure_links(ranks, group, device):
                (missing if "reason" in each else links).append(each)
        dist.barrier()
    again = measure_device(device)
    if dist.get_rank() == 0:
        parts = {
            "rates": rates,
            "floors": floors,
            "host": host,
            "links": links,
            "missing": missing,
            "again": again,
            **more,
        }
        found = {"backend": dist.get_backend(), **parts}
        Path(folder, "measured.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_device(device: torch.device) -> dict[str, float]:
    """FLOP/s and bytes/s of the slowest rank while all of them work, and bytes of memory for each."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    side, copied = FILLING[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(copied, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    product = seconds_each(lambda: torch.mm(a, b), device, 1)
    copy = seconds_each(lambda: target.copy_(source), device, 1)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()
    return {"flops": 2 * side**3 / product, "memory_bandwidth": 2 * copied / copy, "memory": memory}


def measure_floors(device: torch.device) -> dict[str, float]:
    """Seconds of kernels that hardly move or multiply anything, on the slowest rank; in a CUDA graph on a GPU."""
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


def measure_uncompiled(flops: float, floors: dict[str, float]) -> dict[str, Any]:
    """What a processor takes that runs a graph op by op, and the share of its FLOP/s that products of few rows reach.

    Floors are those of common ops in turn, as in a graph: one that is called again and again takes half as long.
    """
    device, little, much = torch.device("cpu"), _common_kernels(1), _common_kernels(256)
    ops, views = seconds_each(partial(_in_turn, little), device), _common_views()
    floors["other"] = ops / len(little)
    floors["view"] = seconds_each(partial(_in_turn, views), device) / len(views)
    moved, took = 2 * 256 * WIDTH * 4 * len(much), seconds_each(partial(_in_turn, much), device) - ops
    weight, shares = torch.randn(WIDTH, WIDTH), list[dict[str, float]]()
    for rows in ROWS:
        seconds = seconds_each(partial(aten.linear.default, torch.randn(rows, WIDTH), weight), device)
        shares.append({"rows": rows, "share": 2 * rows * WIDTH**2 / (seconds - floors["product"]) / flops})
    return {"cache_bandwidth": moved / took, "fuses": False, "rows": shares}


def _in_turn(kernels: Sequence[Callable[[], object]]) -> None:
    for kernel in kernels:
        kernel()


def _common_kernels(rows: int) -> list[Callable[[], object]]:
    """The ops that are most of a transformer's kernels besides products; each reads about as much as it writes."""
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
    """Seconds of a kernel on the slowest rank while all run it: `launches` of it in a CUDA graph, or TURN on a CPU."""
    if device.type == "cuda":
        return seconds_of(_captured(kernel, launches) if launches > 1 else kernel, device, None) / launches
    kernel()
    began = time.perf_counter()
    kernel()
    fastest = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    times = max(1, math.ceil(TURN / fastest.item()))

    def run() -> None:  # until all are done: of ranks that share a core, one begins when another ends
        _call(kernel, times)
        dist.barrier()

    return seconds_of(run, device, None) / times


def _captured(kernel: Callable[[], object], times: int) -> Callable[[], object]:
    _call(kernel, times)  # before a capture, libraries make their workspaces
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _call(kernel, times)
    return graph.replay


def _call(kernel: Callable[[], object], times: int) -> None:
    for _ in range(times):
        kernel()


def measure_host(device: torch.device) -> dict[str, float]:
    """Seconds that the host takes to launch an operation and a collective; nothing where it runs them itself."""
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


def measure_links(ranks: int, group: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """What `measure_link` finds of each kind of collective, or the `reason` why it cannot be measured."""
    for kind in KINDS:
        try:
            yield measure_link(kind, ranks, group, device)
        except RuntimeError as error:  # such as one that the backend lacks
            yield {"collective": kind, "ranks": ranks, "reason": reason(error)}


def measure_link(kind: str, ranks: int, group: Any, device: torch.device) -> dict[str, Any]:
    """The links of a kind of collective in a group of so many ranks, of which the fastest counts, and their error.

    As programs call it: with a result of its own, for which they wait.

    Raises:
        RuntimeError: the backend does not do it.
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
    return {"collective": kind, "ranks": ranks, "links": links, "error": error}


def _wait(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    waited: torch.Tensor = c10d_functional.wait_tensor(call())
    return waited


def seconds_of(call: Callable[[], object], device: torch.device, group: Any) -> float:
    """The median over rounds, of the rank that takes longest."""
    found = []
    for _ in range(ROUNDS + 1):
        dist.barrier(group=group)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    longest = torch.tensor(statistics.median(found[1:]), dtype=torch.float64, device=device)  # the first one warms up
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return longest.item()


def fit_links(sent: list[float], seconds: list[float]) -> tuple[list[tuple[float, float]], float]:
    """One or two links (latency, bytes/s), of which the faster counts, and their mean relative error.

    Small messages and large ones take other protocols: each split of the sizes is tried, a line fitted to either part.
    No message is faster than half of the fastest that was seen: smaller ones have a latency too.
    """
    found = [[fit_link(sent, seconds)]]
    for at in range(2, len(sent) - 1):
        found.append([fit_link(sent[:at], seconds[:at]), fit_link(sent[at:], seconds[at:])])

    def error(links: list[tuple[float, float]]) -> float:
        predicted = (min(latency + wire / bandwidth for latency, bandwidth in links) for wire in sent)
        return statistics.fmean(abs(math.log(p / took)) for p, took in zip(predicted, seconds, strict=True))

    least = min(seconds) / 2
    best = min([links for links in found if all(latency >= least for latency, _ in links)] or found, key=error)
    return best, error(best)


def fit_link(sent: list[float], seconds: list[float]) -> tuple[float, float]:
    """The latency and bytes/s by which each of these takes as long, with the least relative errors."""
    wire, took = numpy.array(sent), numpy.array(seconds)
    (latency, per_byte), *_ = numpy.linalg.lstsq(numpy.stack([1 / took, wire / took], 1), numpy.ones_like(took))
    if per_byte <= 0:  # too noisy to tell
        latency, per_byte = 0.0, (took / wire).min()
    elif latency < 0:
        latency, per_byte = 0.0, 1 / (wire / took).mean()
    return float(latency), float(1 / per_byte)


if __name__ == "__main__":
    main(*sys.argv[1:])
