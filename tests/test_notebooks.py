"""What a notebook shows of a result is well formed, and says what the terminal says."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

import tpcompiler
from tests.runtime.models import PLAN, export_mlp
from tpcompiler.cli.printing import print_parts
from tpcompiler.terminal.tables import Report, Shown, Table

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    out = tmp_path_factory.mktemp("notebooks") / "out"
    exported = export_mlp()
    made = tpcompiler.parallelize(exported, 2, PLAN)
    made.save(out)
    other = tpcompiler.parallelize(exported, 2, {**PLAN, "head": "colwise_gather_output"})
    other.save(out.with_name("other"))
    args, kwargs = exported.example_inputs
    return {
        "program": made,
        "programs": tpcompiler.parallelize({"a": exported, "b": exported}, 2, PLAN),
        "report": other.report(),
        "cost": tpcompiler.open(out).cost(),
        "explain": tpcompiler.open(out).explain("layers.0.down.weight"),
        "diff": tpcompiler.open(out).diff(tpcompiler.open(out.with_name("other"))),
        "doctor": tpcompiler.diagnose(exported),
        "check": tpcompiler.open(out).check(),
        "verify": made.verify(args, kwargs),
    }


def texts(html: str) -> Iterator[str]:
    """The lines, titles and cells of it, which must be well formed."""
    for element in ElementTree.fromstring(f"<div>{html}</div>").iter():
        yield from filter(None, [(element.text or "").strip()])
        assert not (element.tail or "").strip()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["program", "programs", "report", "cost", "explain", "diff", "doctor", "check", "verify"]
)
def test_a_notebook_shows_what_the_terminal_does(
    name: str, results: dict[str, Shown], capsys: pytest.CaptureFixture[str]
) -> None:
    result = results[name]
    print_parts(result.parts())
    printed = capsys.readouterr().out.split()
    assert " ".join(texts(result._repr_html_())).split() == printed
    assert sum(any(c.isdigit() for c in word) for word in printed) >= 3


def test_names_of_files_and_models_are_no_html() -> None:
    class Odd(Shown):
        def parts(self) -> list[str | Table]:
            return ["<b>\x1b[1m", Table("a & b", ("<", ""), [("<i>", "]]>\n")])]

    assert list(texts(Odd()._repr_html_())) == ["<b>\\x1b[1m", "a & b", "<", "<i>", "]]>\\n"]
    assert Report("<&>")._repr_html_() == '<pre style="margin: 0">&lt;&amp;&gt;</pre>'
