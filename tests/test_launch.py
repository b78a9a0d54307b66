"""What the helpers that start processes promise to the tests."""

from __future__ import annotations

import pytest

from tests.launch import fork_code

NAME = "TPCOMPILER_MACHINE"  # every test has it, and so the server of forks


def test_a_fork_has_the_environment_of_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks come from one server, which keeps the environment of the test that started it."""
    printed = []
    for value in ("first", None, "third"):
        if value is None:
            monkeypatch.delenv(NAME)
        else:
            monkeypatch.setenv(NAME, value)
        printed.append(fork_code(f"import os\nprint(os.environ.get('{NAME}', '-'))").stdout.strip())
    assert printed == ["first", "-", "third"]
