"""A description of the present machine, measured, in the form that the search reads."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpcompiler.errors import MachineError, TpCompilerWarning
from tpcompiler.verify.processes import run_ranks
from tpcompiler.yaml_file import compose, plain

LONGEST = timedelta(minutes=5)


def measure_machine(ranks: int = 2, *, timeout: timedelta = LONGEST) -> str:
    """The text of a machine file (docs/auto.md) for the devices and links here.

    Starts `ranks` processes, with NCCL where each can have a GPU and with gloo and one thread each where not. All of

    them multiply and copy at the same time. Collectives are measured in groups of 2, 4, ... and all ranks. Of one that
    cannot be measured a warning and a comment in the file say why.

    Raises:
        LaunchError: a process fails, or they do not end in time.
        MachineError: an all_reduce cannot be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launch += ["-m", "tpcompiler.cost.measure", folder]
        run_ranks(launch, 1, timeout, help="use fewer ranks, or an idle machine")
        return machine_text(json.loads(Path(folder, "measured.json").read_text()), ranks)


def machine_data(text: str) -> dict[str, Any]:
    """Return a machine's description as plain data."""
    root = compose(text)
    data = None if root is None else plain(root, numbers=True)
    assert isinstance(data, dict)
    return data


def machine_text(measured: dict[str, Any], ranks: int) -> str:
    """The file; what no link says is as an all_reduce of all ranks."""
    links = measured["links"]
    missing = [
        f"{each['collective']} of {each['ranks']} ranks: not measured: {each['reason']}" for each in measured["missing"]
    ]
    plain = next((link for link in links if link["collective"] == "all_reduce" and link["ranks"] == ranks), None)
    if plain is None:
        raise MachineError(
            f"{measured['backend']} does not do what all others are reckoned by: {'; '.join(missing)}",
            help="measure where it does",
        )
    for text in missing:
        warnings.warn(text, TpCompilerWarning, stacklevel=2)
    notes = {"flops": "FLOP/s", "memory_bandwidth": "bytes/s", "memory": "bytes"}
    rates = [f"{name}: {measured['rates'][name]:.2e}  # {unit}\n" for name, unit in notes.items()]
    kinds = [f"collective: {link['collective']}, ranks: {link['ranks']}, {_speed(link)}" for link in links]
    lines = [*(f"  - {{{text}}}\n" for text in (_speed(plain), *kinds)), *(f"  # {text}\n" for text in missing)]
    head = f"# Measured by tpcompiler calibrate: {measured['backend']}, {ranks} ranks. Of each device, or process.\n"
    return "".join([head, *rates, "links:  # seconds, bytes/s that each rank sends\n", *lines])


def _speed(link: dict[str, Any]) -> str:
    return f"latency: {link['latency']:.2e}, bandwidth: {link['bandwidth']:.2e}"
