"""What is measured of the machine is a machine file, and says what was measured."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.launch import run_ranks
from tests.runtime.commands import call
from tpcompiler.api.calibrate import machine_text, measure_machine
from tpcompiler.cost import measure
from tpcompiler.cost.collective import KINDS
from tpcompiler.cost.machine import Host, Link
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.measure import LinksOfKind, Measurements, fit_link, fit_links, work_seconds
from tpcompiler.errors import LaunchError, MachineError, TpCompilerWarning
from tpcompiler.ir.mesh import Mesh
from tpcompiler.runtime.records import CollectiveKind


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


def test_two_links_are_found_again() -> None:
    """Small messages by the link that begins soon, large ones by the fast one; one link alone where there is one."""
    sent = [float(1 << power) for power in range(9, 27)]
    both = [(1e-5, 1e9), (1e-4, 1e10)]
    links, error = fit_links(sent, [min(latency + wire / rate for latency, rate in both) for wire in sent])
    assert [link == pytest.approx(own, rel=0.1) for link, own in zip(links, both, strict=True)] == [True, True]
    assert error < 0.01
    links, error = fit_links(sent, [1e-5 + wire / 1e9 for wire in sent])
    assert links[0] == pytest.approx(both[0])
    assert error < 1e-6
    noisy = [1e-4 * (1 + at % 3) + wire / 1e9 for at, wire in enumerate(sent)]
    assert min(latency for latency, _ in fit_links(sent, noisy)[0]) >= 5e-5  # smaller messages take as long
    assert fit_links(sent, [1e-5 * (2 if at % 2 else 1) for at in range(18)])[1] > 0.2  # no line at all


RATES_HERE = {"flops": 5.78e10, "memory_bandwidth": 5e9, "memory": 6.3e9}


def measured_as(links: Any, **other: Any) -> Measurements:
    """What the ranks of `calibrate` found."""
    floors = {"product": 2e-6, "attention": 5e-6, "other": 1e-6}
    parts = {"rates": RATES_HERE, "again": RATES_HERE, "floors": floors, "host": {}, "links": links}
    return msgspec.convert({"backend": "gloo", **parts, **other}, Measurements)


def link_of(kind: str, ranks: int) -> dict[str, Any]:
    links = [(1e-4 * ranks, 1e9 / ranks), (1e-3 * ranks, 1e10 / ranks)]
    return {"collective": kind, "ranks": ranks, "links": links, "error": 0.05}


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    host = {"operation": 5e-6, "collective": 2e-5}
    measured = measured_as([link_of(kind, ranks) for ranks in (2, 4) for kind in KINDS], host=host)
    (tmp_path / "here.yaml").write_text(machine_text(measured, 4))
    read = read_machine(tmp_path / "here.yaml")
    assert (read.flops, read.memory_bandwidth, read.memory) == (5.78e10, 5e9, 6.3e9)
    assert read.links_of("all_gather", ("tp",), Mesh.of(2)) == [Link(2e-4, 5e8), Link(2e-3, 5e9)]
    assert read.links_of("all_gather", ("tp",), Mesh.of(3)) == [Link(4e-4, 2.5e8), Link(4e-3, 2.5e9)]

    assert (read.product, read.attention, read.other, read.host) == (2e-6, 5e-6, 1e-6, Host(5e-6, 2e-5))
    # The second link begins later, and sends ten times as fast.
    assert read.collective_seconds("all_reduce", ("tp",), 1e6, Mesh.of(4)) == pytest.approx(4e-4 + 1e6 / 2.5e8)
    assert read.collective_seconds("all_reduce", ("tp",), 1e7, Mesh.of(4)) == pytest.approx(4e-3 + 1e7 / 2.5e9)


def test_a_floor_that_took_longer_than_the_kernel() -> None:
    """Another process ran while the floor was measured: no negative rate, which no machine file may have."""
    assert work_seconds(3e-5, 1e-5) == pytest.approx(2e-5)
    assert work_seconds(3e-5, 4e-5) == pytest.approx(3e-6)


def test_a_busy_machine_is_a_warning() -> None:
    busy = {**RATES_HERE, "flops": 3e10}
    with pytest.warns(TpCompilerWarning, match=r"flops was 5\.78e\+10, and 3\.00e\+10 a minute later: measure again"):
        machine_text(measured_as([link_of("all_reduce", 2)], again=busy), 2)


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    missing = {"collective": "all_to_all", "ranks": 2, "reason": "Backend mpi does not support alltoall"}
    measured = measured_as([link_of("all_reduce", 2), missing], backend="mpi")
    said = "all_to_all of 2 ranks: not measured: Backend mpi does not support alltoall"
    with pytest.warns(TpCompilerWarning, match=said):
        text = machine_text(measured, 2)
    assert text.endswith(f"  # {said}\n")
    (tmp_path / "here.yaml").write_text(text)
    assert read_machine(tmp_path / "here.yaml").links["", 0] == [Link(2e-4, 5e8), Link(2e-3, 5e9)]
    with pytest.raises(MachineError, match="all_reduce of 2 ranks: not measured: Backend mpi does not support"):
        machine_text(measured_as([{**missing, "collective": "all_reduce"}], backend="mpi"), 2)


def test_a_collective_that_the_backend_lacks_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_link(kind: CollectiveKind, ranks: int, *_: object) -> LinksOfKind:
        if kind == "all_gather":
            raise RuntimeError("not here\nframe #0: more")
        return LinksOfKind(collective=kind, ranks=ranks, links=[(0.0, 1e9)])

    monkeypatch.setattr(measure, "measure_link", measure_link)
    found = list(measure.measure_links(2, None, torch.device("cpu")))
    assert [each.collective for each in found] == list(KINDS)
    assert [(each.collective, each.reason) for each in found if each.reason] == [("all_gather", "not here")]


QUICK = """
import sys
from tpcompiler.cost import measure
measure.ROUNDS, measure.SIZES, measure.FILLING = 1, measure.SIZES[:10], {"cpu": (128, 1 << 20)}
measure.main(sys.argv[1])
"""


@pytest.mark.filterwarnings("ignore:.*measure again on an idle machine")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_quickly(command: list[str], *_: object, **__: object) -> None:
        """A machine file is made of few and small sizes as of many."""
        assert command[-3:-1] == ["-m", "tpcompiler.cost.measure"]
        run_ranks(2, tmp_path / "quick.py", command[-1])

    (tmp_path / "quick.py").write_text(QUICK)
    monkeypatch.setattr("tpcompiler.api.calibrate.run_ranks", measure_quickly)
    assert call("calibrate", "--processes", 2, "-o", tmp_path / "here.yaml").exit_code == 0
    read, text = read_machine(tmp_path / "here.yaml"), (tmp_path / "here.yaml").read_text()
    assert read.flops > 1e8
    measured = {kind: links for (kind, ranks), links in read.links.items() if ranks == 2}
    assert measured.keys() >= {"all_reduce", "all_gather"}
    for kind, links in measured.items():  # each with how far it misses, and read as it was written
        assert re.search(rf"\n  # {kind} of 2 ranks: mean error \d+%\n  - ", text)
        for link in links:
            said = f"latency: {link.latency:.2e}, bandwidth: {link.bandwidth:.2e}"
            assert f"  - {{collective: {kind}, ranks: 2, {said}}}\n" in text
    took = read.collective_seconds("all_reduce", ("tp",), 1 << 20, Mesh.of(2))
    assert took == min(link.latency + (1 << 20) / link.bandwidth for link in measured["all_reduce"])
    assert read.symm_mem == {}
    assert (read.fuses, read.rows.keys()) == (False, {*measure.ROWS})
    assert min(read.view, read.other, read.product, read.attention, read.cache_bandwidth) > 0


def test_it_ends_in_time() -> None:
    with pytest.raises(LaunchError, match=r"the ranks did not end within 0\.5 s"):
        measure_machine(2, timeout=timedelta(seconds=0.5))
