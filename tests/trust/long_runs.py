"""What takes long: faults of real processes, saves that are killed, the check of a large model."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tpcompiler
from tests.runtime.faults import FAULTS, run_fault, write_artifacts, wrong
from tests.runtime.interrupted import kill_saves
from tests.zoo.decoders import EVERYTHING, decoder


@dataclass(frozen=True)
class Figure:
    """One line of what was measured, and whether it is as it must be."""

    what: str
    figure: str
    ok: bool


def faults(times: int) -> Figure:
    """Worlds of two gloo processes of which one does something wrong, at least so many."""
    with tempfile.TemporaryDirectory() as directory:
        artifact = write_artifacts(Path(directory))
        rounds = math.ceil(times / len(FAULTS))
        said: Counter[str] = Counter()
        longest = 0.0
        for _ in range(rounds):
            for fault in FAULTS:
                try:
                    ended = run_fault(artifact, fault)
                except AssertionError as hung:
                    said[str(hung)] += 1
                    continue
                longest = max(longest, ended.seconds)
                if found := wrong(fault, ended):
                    said[found] += 1
    worlds = rounds * len(FAULTS)
    figure = (
        f"{worlds} worlds, {len(FAULTS)} kinds: {said.total()} hung or said something else; longest {longest:.0f} s"
    )
    return Figure("faults at run time", "\n".join([figure, *said]), not said)


def kills(times: int) -> Figure:
    """Saves over an older artifact, each killed at a random moment: what is there afterwards is read and hashed."""
    with tempfile.TemporaryDirectory() as directory:
        states = kill_saves(Path(directory), times, seed=1)
    return Figure("saves killed", f"{times}: " + ", ".join(f"{n} {state}" for state, n in states.items()), True)


def large(layers: int, world: int) -> Figure:
    """The check of a deep model beside its conversion."""
    # As many kv heads as ranks, and wide enough that every rank has a share.
    sizes = {"num_attention_heads": 2 * world, "num_key_value_heads": world, "hidden_size": 16 * world}
    case = decoder("deep", "Llama", EVERYTHING, num_hidden_layers=layers, **sizes)
    program, plan = case.export(False), case.asked()
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        made = tpcompiler.parallelize(program, world, plan)
        made.inspect = lambda directory: None  # type: ignore[method-assign]  # it is timed by itself
        made.save(Path(directory) / "out")
        converted = time.monotonic()
        report = tpcompiler.open(Path(directory) / "out").check(program)
        ended = time.monotonic()
    conversion, check = converted - began, ended - converted
    figure = (
        f"{layers} layers, {world} ranks: {check:.1f} s, its conversion {conversion:.1f} s ({check / conversion:.2f})"
    )
    return Figure("check of a deep model", figure, report.ok and check < conversion)
