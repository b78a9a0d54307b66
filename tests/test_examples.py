"""The examples run, and prove what they say."""

from __future__ import annotations

import pytest

from examples import decode


@pytest.mark.slow
def test_decode(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 < decode.main() < 1e-5  # float32 noise; a lost head or a stale cache gives about 1
    assert "11 calls, equal" in capsys.readouterr().out
