"""What is measured of the machine is a machine file, and says what was measured."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.launch import fork_judged
from tests.runtime.commands import call
from tpcompiler.calibrate import machine_text, measure_machine
from tpcompiler.cost import measure
from tpcompiler.cost.collective import KINDS
from tpcompiler.cost.machine import RATES, Link, Machine
from tpcompiler.cost.measure import fit_link
from tpcompiler.errors import LaunchError, MachineError, TpCompilerWarning


@pytest.mark.parametrize(
    ("latency", "bandwidth", "found"), [(1e-4, 2e9, (1e-4, 2e9)), (0.0, 5e8, (0.0, 5e8)), (-1e-7, 1e9, (0.0, 1e9))]
)
def test_a_line_is_found_again(latency: float, bandwidth: float, found: tuple[float, float]) -> None:
    sent = [float(1 << power) for power in range(10, 24, 2)]
    fitted = fit_link(sent, [latency + size / bandwidth for size in sent])
    assert fitted == pytest.approx(found, rel=0.05, abs=1e-9)


def test_times_that_say_nothing_of_a_bandwidth() -> None:
    """The larger message took less: the largest bandwidth that was seen, and no negative one."""
    assert fit_link([1e3, 1e6], [2e-3, 1e-3]) == (0.0, pytest.approx(1e9))


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    rates = {"flops": 5.78e10, "memory_bandwidth": 5e9, "memory": 6.3e9}
    links = [
        {"collective": kind, "ranks": ranks, "latency": 1e-4 * ranks, "bandwidth": 1e9 / ranks}
        for ranks in (2, 4)
        for kind in KINDS
    ]
    measured = {"backend": "gloo", "rates": rates, "links": links, "missing": []}
    (tmp_path / "here.yaml").write_text(machine_text(measured, 4))
    read = Machine.read(tmp_path / "here.yaml")
    assert (read.flops, read.memory_bandwidth, read.memory) == (5.78e10, 5e9, 6.3e9)
    assert read.link("all_gather", 2) == Link(2e-4, 5e8)
    assert read.link("all_gather", 3) == read.plain_link == Link(4e-4, 2.5e8)


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    links = [{"collective": "all_reduce", "ranks": 2, "latency": 1e-4, "bandwidth": 1e9}]
    missing = [{"collective": "all_to_all", "ranks": 2, "reason": "Backend mpi does not support alltoall"}]
    measured = {"backend": "mpi", "rates": dict.fromkeys(RATES, 1e9), "links": links, "missing": missing}
    said = "all_to_all of 2 ranks: not measured: Backend mpi does not support alltoall"
    with pytest.warns(TpCompilerWarning, match=said):
        text = machine_text(measured, 2)
    assert text.endswith(f"  # {said}\n")
    (tmp_path / "here.yaml").write_text(text)
    assert Machine.read(tmp_path / "here.yaml").link("all_to_all", 2) == Link(1e-4, 1e9)
    missing = [{**each, "collective": "all_reduce"} for each in missing]
    with pytest.raises(MachineError, match="all_reduce of 2 ranks: not measured: Backend mpi does not support"):
        machine_text({**measured, "links": [], "missing": missing}, 2)


def test_a_collective_that_the_backend_lacks_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_link(kind: str, ranks: int, *_: object) -> dict[str, object]:
        if kind == "all_gather":
            raise RuntimeError("not here\nframe #0: more")
        return {"collective": kind, "ranks": ranks, "latency": 0.0, "bandwidth": 1e9}

    monkeypatch.setattr(measure, "measure_link", measure_link)
    found = list(measure.measure_links(2, None, torch.device("cpu")))
    assert [each["collective"] for each in found] == list(KINDS)
    assert [each for each in found if "reason" in each] == [
        {"collective": "all_gather", "ranks": 2, "reason": "not here"}
    ]


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpcompiler.calibrate.run_ranks", fork_judged)
    assert call("calibrate", "--ranks", 2, "-o", tmp_path / "here.yaml").exit_code == 0
    read = Machine.read(tmp_path / "here.yaml")
    assert read.flops > 1e8
    assert {kind for kind, ranks in read.links if ranks == 2} >= {"all_reduce", "all_gather"}


@pytest.mark.slow
def test_it_ends_in_time() -> None:
    with pytest.raises(LaunchError, match=r"the ranks did not end within 0\.5 s"):
        measure_machine(2, timeout=timedelta(seconds=0.5))
