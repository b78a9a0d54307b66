"""The table of `make zoo` shows the measurements, and fails when a statement does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.long import in_long_runs
from tests.zoo import measure
from tests.zoo.index import CASES
from tests.zoo.table import main
from tpcompiler.judge.sound.check import CheckReport

pytestmark = [pytest.mark.slow, in_long_runs]


def test_a_row_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resnet"], 1) == 0
    (static, dynamic) = [line for line in capsys.readouterr().out.splitlines() if "resnet" in line]
    assert "static" in static
    assert "dynamic" in dynamic
    for line in (static, dynamic):
        assert "1R 2R = 1R 2R" in line
        assert "2G = 2G" in line


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"outside": {"all_reduce": 4}}, "3R+2S = 4R"),
        ({"cut": 1.0}, "/ 1.0"),
        ({"flops": 1.1}, "1.000 / 1.1"),
        ({"plan": {}, "outside": {}, "cut": 0.0, "flops": 0.1}, "0.000 / 0.1"),
        ({"inert": {"top.0.bias": "it is not"}}, "not as stated: top.0.bias"),
        ({"plan": {"top.0": "colwise", "top.2": "rowwise"}}, "1R = 3R+2S"),
        ({"plan": {"no.such": "colwise"}}, "matches nothing"),
    ],
    ids=[
        "a miscount",
        "a share",
        "FLOPs",
        "FLOPs without a plan",
        "an inert one",
        "a plan that cuts little",
        "a plan that is refused",
    ],
)
def test_the_table_fails(
    wrong: dict[str, object], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        CASES, "dlrm", replace(CASES["dlrm"], dims=None, static_because="one export is enough", **wrong)
    )  # type: ignore[arg-type]
    assert main(["dlrm"], 0) == 1
    written = capsys.readouterr().out
    assert shown in " ".join(written.split())
    assert "static: one export is enough" in " ".join(written.split())


def test_a_shortfall_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(CASES, "dlrm", replace(CASES["dlrm"], dims=None, pending="four sums, but so and so"))
    assert main(["dlrm"], 0) == 0
    written = capsys.readouterr().out
    assert "pending" in next(line for line in written.splitlines() if "static" in line)
    assert "dlrm is pending: four sums, but so and so" in written


def test_the_table_fails_above_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "dlrm", replace(CASES["dlrm"], dims=None))
    monkeypatch.setattr(measure, "LOOSEST", 0.0)
    assert main(["dlrm"], 0) == 1


def test_the_table_fails_where_check_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CASES, "dlrm", replace(CASES["dlrm"], dims=None))
    monkeypatch.setattr(measure, "check_programs", lambda *_, **__: CheckReport(False, {}, ["a false alarm"]))
    assert main(["dlrm"], 0) == 1
    written = capsys.readouterr().out
    assert "check: 2 conversions, 2 of them refused" in written
    assert "dlrm, static, 4 ranks: a false alarm" in written


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lama"]) == 2
    assert "no case 'lama'; there are llama" in capsys.readouterr().out
