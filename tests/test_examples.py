"""The examples run, and prove what they say."""

from __future__ import annotations

import pytest

from examples import custom_op, decode, generate
from tests.long import in_long_runs
from tpcompiler.rules.registry import _RULES


@pytest.mark.slow
def test_decode(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 < decode.main() < 1e-5  # float32 noise; a lost head or a stale cache gives about 1
    assert "11 calls, equal" in capsys.readouterr().out


def test_custom_op(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(_RULES)
    try:
        assert custom_op.main() == ["all_reduce"]
    finally:
        _RULES.clear()
        _RULES.update(before)
    said = capsys.readouterr().out
    assert "placements hold\nmesh tp=2" in said, "nothing sound is left out"


@pytest.mark.slow
@in_long_runs  # tests/test_deploy.py runs its ranks
def test_generate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["generate.py", "--tokens", "6"])
    assert generate.main() == 0
    assert "and those of transformers' generate" in capfd.readouterr().out
