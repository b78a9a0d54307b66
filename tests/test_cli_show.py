"""`tpcompiler inspect` draws a rank's program: the file it writes, and its result without Graphviz."""

from __future__ import annotations

import json
import re
from pathlib import Path

import graphviz
import pytest

from tests.runtime.commands import call, refused, right
from tpcompiler.runtime.artifact import read_manifest

SLOW = """\
flops: 1.0e+9
memory_bandwidth: 1.0e+6
memory: 1.0e+9
links:
  - {latency: 0.5, bandwidth: 1.0e+5}
"""


def test_the_page_is_of_the_machine_that_is_asked_for(out: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text(SLOW, encoding="utf-8")
    assert call("inspect", out, "-o", tmp_path / "show.html", "--machine", slow).exit_code == 0
    assert call("diff", out, out, "--html", tmp_path / "diff.html", "--machine", slow).exit_code == 0
    sent = [0.5 + record.wire_bytes / 1e5 for record in read_manifest(out).collectives]
    for name in ("show.html", "diff.html"):
        (text,) = re.findall(r'id="data">(.*?)</script>', (tmp_path / name).read_text(encoding="utf-8"))
        data = json.loads(text)
        assert data["machine"]["name"] == str(slow)
        assert sum(row["layers"] * row["sent"] for row in data["timeline"]) == pytest.approx(sum(sent))
    assert "--machine: only the page predicts times: --format html" in refused("inspect", out, "--machine", slow)
    assert refused("inspect", out, "--format", "html", "--machine", "h99").startswith("machine 'h99' cannot be read: ")


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views have tests of their own: here only what the command does with them."""
    import tpcompiler.api.programs

    graph = graphviz.Digraph()
    graph.node("a")
    monkeypatch.setattr(tpcompiler.api.programs, "artifact_dot", lambda program, rank: graph)
    monkeypatch.setattr(tpcompiler.api.programs, "artifact_text", lambda program, rank: f"text of rank {rank}\n")


DOT = "digraph {\n\ta\n}\n"


@pytest.mark.usefixtures("views")
def test_show_draws_with_graphviz(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphviz.Source, "pipe", lambda self, format, quiet: f"<{format}>".encode())
    assert right("inspect", out, "--format", "svg") == "<svg>\n"
    assert call("inspect", out, "-o", tmp_path / "a.svg").exit_code == 0
    assert (tmp_path / "a.svg").read_text() == "<svg>"
    assert call("inspect", out, "-o", tmp_path / "a.png").exit_code == 0
    assert (tmp_path / "a.png").read_bytes() == b"<png>"
    result = call("inspect", out, "--format", "png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give one with -o" in result.stderr


def test_the_rows_of_a_program_as_json(out: Path) -> None:
    data = json.loads(right("inspect", out, "--rank", 1, "--json"))
    assert (data["rank"], data["mesh"]) == (1, {"tp": 2})
    sent = [item for item in data["items"] if item["collective"]]
    assert [item["sharding"] for item in sent] == ["P(sum) -> R"] * 2
    assert all(item["name"] == item["collective"]["node"] for item in sent)
    names = [item["name"] for item in data["items"]]
    assert all(source in names for item in data["items"] for source in item["sources"])
    assert "--json: leave --format, -o and --tensor out" in refused("inspect", out, "--json", "--format", "dot")
