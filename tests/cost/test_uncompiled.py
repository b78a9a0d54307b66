"""Where no compiler fuses ops: each op, view and copy that a finished program runs has its price in the search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cost.test_machine import RATES, machine
from tests.zoo.index import CASES
from tpcompiler.api.request import Request
from tpcompiler.cost.fusion import Kernel
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective, Work, copied_bytes
from tpcompiler.cost.path import steps_between
from tpcompiler.errors import MachineError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import parse_placement
from tpcompiler.ir.sharding import Sharding
from tpcompiler.parallel.converted_program import convert_programs
from tpcompiler.solver.estimate import changes_of, measure_step_time

LINKS = "links:\n- {latency: 1.0e-6, bandwidth: 1.0e+10}\n"
FLOORS = "product: 3.0e-7\nother: 2.0e-7\nview: 1.0e-7\ncache_bandwidth: 2.0e+11\nfuses: false\n"
GATHERED = {"**.self_attn.*_proj": "colwise_gather_output", "**.mlp.*_proj": "colwise_gather_output"}
VALUE = torch.zeros(4, 8, 16)


def test_the_file(tmp_path: Path) -> None:
    found = machine(tmp_path, RATES + LINKS + FLOORS)
    assert (found.fuses, found.view, found.cache_bandwidth) == (False, 1e-7, 2e11)
    assert (found.bandwidth_of(stored=True), found.bandwidth_of(stored=False)) == (1e11, 2e11)
    old = machine(tmp_path, RATES + LINKS + "fuses: true\n")
    assert (old.fuses, old.view, old.bandwidth_of(stored=False)) == (True, 0.0, 1e11)
    with pytest.raises(MachineError, match=r"fuses: invalid enum value 'maybe'\n  help: use one of true, false"):
        machine(tmp_path, RATES + LINKS + "fuses: maybe\n")


@pytest.mark.parametrize(
    ("have", "want", "copied"),
    [
        ("S(0)", "R", 0),  # lies in order as it comes
        ("S(2)", "R", 2),
        ("R", "S(0)", 1),
        ("P(sum)", "R", 0),
        ("P(sum)", "S(0)", 0),
        ("P(sum)", "S(1)", 2),
        ("S(0)", "S(1)", 1),  # put in rows by the rank that they go to; those of all ranks lie in order
        ("S(1)", "S(0)", 1),
        ("S(1)", "S(2)", 2),
    ],
)
def test_copies(have: str, want: str, copied: int) -> None:
    """`copied`: times that the bytes of the whole value, of which two ranks hold a half each, are read or written."""
    mesh = Mesh.of(2)
    source, target = (Sharding.of(parse_placement(each), mesh, 3, each) for each in (have, want))
    (step,) = steps_between(source, target, VALUE.shape, 4, mesh, read_machine("ideal"))
    assert copied_bytes(step, VALUE, mesh) == copied * VALUE.nbytes


def test_what_is_predicted_is_what_runs(tmp_path: Path) -> None:
    """The seconds of the search are those of the ops in rank 0's finished program; without its copies they are not."""
    here = machine(tmp_path, RATES + LINKS + FLOORS)
    for plan in (CASES["llama"].asked(), GATHERED):
        found, made = convert_programs(Request(CASES["llama"].export(False), 2, plan, machine=here).conversions())
        seconds = made["model"].predict(here).total.total
        assert measure_step_time(found, here).total == pytest.approx(seconds, rel=0.05)
    objective = Objective.of(here)
    copies = sum(objective.copy_seconds(steps, value.meta["val"], found.mesh) for value, steps in changes_of(found))
    assert copies > 0.05 * seconds
    fused = Objective.of(replace(here, fuses=True))
    assert not any(fused.copy_seconds(steps, value.meta["val"], found.mesh) for value, steps in changes_of(found))


def test_state_is_read_from_memory_and_values_from_a_cache() -> None:
    """A kernel with a weight takes longer than one of two values."""
    here = Machine(1.0, 10.0, 1.0, cache_bandwidth=1000.0)
    values = [(VALUE, Sharding.replicated(3))] * 2
    seconds = [
        Objective.of(here).work_seconds(Kernel("other", (1.0, 0.0), (stored, False)), Work(), values, Mesh.of(1))
        for stored in (True, False)
    ]
    assert seconds == [VALUE.nbytes / 10, VALUE.nbytes / 1000]
