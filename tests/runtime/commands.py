"""Calls of the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from tpcompiler import cli


def call(*words: object, **environment: str) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200", **environment})


def right(*words: object) -> str:
    """What a call prints that must succeed, and complain of nothing."""
    result = call(*words)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


def refused(*words: object) -> str:
    """What a call says that must be refused: all of standard error."""
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr
