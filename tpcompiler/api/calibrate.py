"""Measure this machine, and describe it in the form that the search reads."""

from __future__ import annotations

import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import msgspec

from tpcompiler.cost.measure import RESULT, Measurements
from tpcompiler.errors import MachineError, TpCompilerWarning
from tpcompiler.judge.compare.processes import run_ranks

LONGEST = timedelta(minutes=5)
NOISE = 1.2  # largest ratio of two measurements of one rate
UNITS = {"flops": "FLOP/s", "memory_bandwidth": "bytes/s", "memory": "bytes"}
FLOORS = {
    "product": "seconds of a matrix product on top of its bytes and FLOPs",
    "attention": "the same of an attention",
    "other": "the same of any other kernel",
    "view": "the same of a view",
}


def measure_machine(ranks: int = 2, *, timeout: timedelta = LONGEST) -> str:
    """Return the text of a machine file (docs/machines.md) for the devices and links here.

    Starts `ranks` processes, with NCCL if each can have a GPU, otherwise with gloo and one thread each. All of
    them multiply and copy at the same time. Collectives of 512 B to 64 MB are measured in groups of 2, 4, ... and all
    ranks, and two links are fitted to each kind. A warning and a comment in the file explain any that cannot be
    measured; another warning reports a busy machine.

    Raises:
        LaunchError: a process fails, or they do not end in time.
        MachineError: an all_reduce cannot be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launch += ["-m", "tpcompiler.cost.measure", folder]
        run_ranks(launch, 1, timeout, help="use fewer ranks, or an idle machine")
        return machine_text(msgspec.json.decode(Path(folder, RESULT).read_bytes(), type=Measurements), ranks)


def machine_text(measured: Measurements, ranks: int) -> str:
    """Return the text of the file; collectives without a link use that of an all_reduce over all ranks."""
    for name, first in measured.rates.items():
        if not 1 / NOISE < (again := measured.again[name]) / first < NOISE:
            warnings.warn(
                f"{name} was {first:.2e}, and {again:.2e} a minute later: measure again on an idle machine",
                TpCompilerWarning,
                stacklevel=2,
            )
    links = [each for each in measured.links if not each.reason]
    missing = [
        f"{each.collective} of {each.ranks} ranks: not measured: {each.reason}"
        for each in measured.links
        if each.reason
    ]
    default = next((each for each in links if (each.collective, each.ranks) == ("all_reduce", ranks)), None)
    if default is None:
        raise MachineError(
            f"{measured.backend} lacks the collective that is the default for all others: {'; '.join(missing)}",
            help="measure where it can be measured",
        )
    for text in missing:
        warnings.warn(text, TpCompilerWarning, stacklevel=2)
    lines = [f"# Measured by tpcompiler calibrate: {measured.backend}, {ranks} ranks. Of each device, or process.\n"]
    lines += [f"{name}: {measured.rates[name]:.2e}  # {unit}\n" for name, unit in UNITS.items()]
    lines += [f"{name}: {seconds:.2e}  # {FLOORS[name]}\n" for name, seconds in measured.floors.items()]
    if measured.cache_bandwidth is not None:
        lines.append(f"cache_bandwidth: {measured.cache_bandwidth:.2e}  # bytes/s of values that were just written\n")
        lines.append("fuses: false  # no compiler: each op is a kernel\n")
        lines.append("rows:  # the share of flops that products of so many rows reach\n")
        lines += [f"  - {{rows: {each.rows:g}, share: {each.share:.2g}}}\n" for each in measured.rows]
    if measured.host:
        host = ", ".join(f"{name}: {seconds:.2e}" for name, seconds in measured.host.items())
        lines.append(f"host: {{{host}}}  # seconds to launch each, outside of a CUDA graph\n")
    lines.append("links:  # seconds, bytes/s that each rank sends; of several the fastest counts\n")
    lines += [f"  - {{{_speed(link)}}}\n" for link in default.links]
    for each in links:
        lines.append(f"  # {each.collective} of {each.ranks} ranks: mean error {each.error:.0%}\n")
        of = f"collective: {each.collective}, ranks: {each.ranks}"
        lines += [f"  - {{{of}, {_speed(link)}}}\n" for link in each.links]
    return "".join([*lines, *(f"  # {text}\n" for text in missing)])


def _speed(link: tuple[float, float]) -> str:
    latency, bandwidth = link
    return f"latency: {latency:.2e}, bandwidth: {bandwidth:.2e}"
