"""One rank of `calibrate`: time kernels, copies and collectives, and let rank 0 write what a machine file says."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tpcompiler.cost.collective import KINDS, wire_bytes
from tpcompiler.runtime.target import reason

ROUNDS = 7  # of each measurement, of which the median counts
LONGEST = timedelta(minutes=1)  # of one collective
SIZES = tuple(1 << power for power in range(9, 27))  # bytes of a payload: 512 B to 64 MB
LAUNCHES = 200  # of a small kernel, which are timed together
FILLING = {"cpu": (1024, 1 << 26), "cuda": (8192, 1 << 30)}  # side of a square matrix, and bytes that no cache holds


def main(folder: str) -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=LONGEST)
    world, rates = dist.get_world_size(), measure_device(device)
    floors, host = measure_floors(device), measure_host(device)
    links, missing = list[dict[str, Any]](), list[dict[str, Any]]()
    for ranks in sorted({*(1 << power for power in range(1, world.bit_length())), world}):
        group = dist.new_group(list(range(ranks)), timeout=LONGEST)
        if dist.get_rank() < ranks:
            for each in measure_links(ranks, group, device):
                (missing if "reason" in each else links).append(each)
        dist.barrier()
    again = measure_device(device)
    if dist.get_rank() == 0:
        parts = {"rates": rates, "floors": floors, "host": host, "links": links, "missing": missing, "again": again}
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
    product = seconds_of(lambda: torch.mm(a, b), device, None)
    copy = seconds_of(lambda: target.copy_(source), device, None)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()
    return {"flops": 2 * side**3 / product, "memory_bandwidth": 2 * copied / copy, "memory": memory}


def measure_floors(device: torch.device) -> dict[str, float]:
    """Seconds of kernels that hardly move or multiply anything, on the slowest rank; in a CUDA graph on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    small = torch.zeros(64, 64, device=device, dtype=dtype)
    query = torch.zeros(1, 4, 1, 64, device=device, dtype=dtype)
    cache = torch.zeros(1, 4, 64, 64, device=device, dtype=dtype)
    kernels: dict[str, Callable[[], object]] = {
        "product": lambda: torch.mm(small, small),
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(query, cache, cache),
        "other": lambda: torch.add(small, small),
    }
    return {name: seconds_of(_repeated(kernel, device), device, None) / LAUNCHES for name, kernel in kernels.items()}


def _repeated(kernel: Callable[[], object], device: torch.device) -> Callable[[], object]:
    def run() -> None:
        for _ in range(LAUNCHES):
            kernel()

    if device.type != "cuda":
        return run
    run()  # before a capture, libraries make their workspaces
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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

    Raises:
        RuntimeError: the backend does not do it.
    """
    sent, seconds = list[float](), list[float]()
    for size in SIZES:
        count = size // 4 // ranks * ranks
        whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, group=group),
            "all_to_all": partial(dist.all_to_all_single, torch.zeros_like(whole), whole, group=group),
        }
        seconds.append(seconds_of(calls[kind], device, group))
        sent.append(wire_bytes(kind, count * 4, ranks))
    links, error = fit_links(sent, seconds)
    return {"collective": kind, "ranks": ranks, "links": links, "error": error}


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
    """
    found = [[fit_link(sent, seconds)]]
    for at in range(2, len(sent) - 1):
        found.append([fit_link(sent[:at], seconds[:at]), fit_link(sent[at:], seconds[at:])])

    def error(links: list[tuple[float, float]]) -> float:
        predicted = (min(latency + wire / bandwidth for latency, bandwidth in links) for wire in sent)
        return statistics.fmean(abs(math.log(p / took)) for p, took in zip(predicted, seconds, strict=True))

    best = min(found, key=error)
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
