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
        ({"inert": {"top.0.bias": "it is not"}}, "not as stated: top.0.bias"),
        ({"plan": {"no.such": "colwise"}}, "matches nothing"),
    ],
    ids=["a miscount", "a share", "FLOPs", "an inert one", "a plan that is refused"],
)
def test_the_table_fails(
    wrong: dict[str, object], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CASES, "dlrm", replace(CASES["dlrm"], dims=None, static_because="once", **wrong))  # type: ignore[arg-type]
    assert main(["dlrm"], 0) == 1
    assert shown in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("judge", ["verify", "check"])
def test_the_table_fails_where_a_judge_does(
    judge: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CASES, "dlrm", replace(CASES["dlrm"], dims=None))
    if judge == "verify":
        monkeypatch.setattr(measure, "LOOSEST", 0.0)
    else:
        monkeypatch.setattr(measure, "check_programs", lambda *_, **__: CheckReport(False, {}, ["a false alarm"]))
    assert main(["dlrm"], 0) == 1
    if judge == "check":
        assert "check: 2 conversions, 2 of them refused" in capsys.readouterr().out
