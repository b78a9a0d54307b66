"""`tpcompiler inspect` draws a rank's program."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.runtime.commands import call, refused, right
from tpcompiler.runtime.artifact import read_manifest


def test_show_an_artifact(out: Path) -> None:
    assert "all_reduce" in right("inspect", out, "--rank", 0)
    assert right("inspect", out, "--format", "html").startswith("<!doctype html>\n")
    assert refused("inspect", out, "--rank", 2).startswith("rank 2 is outside the artifact's world of 2\n")


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


def test_show_writes_a_file(out: Path, tmp_path: Path) -> None:
    text = right("inspect", out, "--rank", 1, "--format", "text")
    result = call("inspect", out, "--rank", 1, "-o", tmp_path / "graph.txt")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {tmp_path}/graph.txt\n")
    assert (tmp_path / "graph.txt").read_text() == text
    result = call("inspect", out, "-o", tmp_path / "no" / "a.html")
    assert (result.exit_code, result.stderr) == (
        2,
        f"cannot write {tmp_path}/no/a.html: No such file or directory\n  help: choose another file\n",
    )


def test_the_rows_of_a_program_as_json(out: Path) -> None:
    data = json.loads(right("inspect", out, "--rank", 1, "--json"))
    assert (data["rank"], data["mesh"]) == (1, {"tp": 2})
    sent = [item for item in data["items"] if item["collective"]]
    assert [item["sharding"] for item in sent] == ["P(sum) -> R"] * 2
    assert all(item["name"] == item["collective"]["node"] for item in sent)
    names = [item["name"] for item in data["items"]]
    assert all(source in names for item in data["items"] for source in item["sources"])
    assert "--json: leave --format, -o and --tensor out" in refused("inspect", out, "--json", "--format", "html")
