"""Files that people and services look for, and that nothing else would notice to be wrong."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tpcompiler
from tools.docs_pages import GENERATED

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci").exists(), reason="an installed wheel has the tests without these files"
)


def test_the_hosted_ci_calls_the_projects_own() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_version_is_said_in_one_place() -> None:
    said = [
        path.name
        for part in ("tpcompiler", "passes")
        for path in (ROOT / part).rglob("*.py")
        if f'"{tpcompiler.__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert said == ["artifact.py"]
    assert tpcompiler.__version__ not in (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool")[0]
    assert f"## {tpcompiler.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_links_to_folders_are_left_out_of_what_is_built() -> None:
    """The build walks into links, and would add the files of `passes` twice. `make wheel-test` builds."""
    links = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tpcompiler").rglob("*") if path.is_symlink()]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert links == ["tpcompiler/passes"]
    assert project.count(f'exclude = ["/{links[0]}"]\n') == 2  # of the wheel, and of the sdist
    assert f'"passes" = "{links[0]}"\n' in project


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "passes").glob("*.md")]
    assert len(pages) > 10
    broken = [
        f"{page.name}: {link}"
        for page in pages
        for text in [re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)]
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
        if not (page.parent / link).exists() and Path(link).name not in GENERATED
    ]
    assert broken == []


def test_a_link_with_the_name_of_a_page_leads_to_it() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    names = {page.stem for page in pages}
    links = [
        (page.name, text, target)
        for page in pages
        for text, target in re.findall(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert [
        each for each in links if (name := each[1].removesuffix(".md")) in names and name != Path(each[2]).stem
    ] == []


def test_commands_in_prose_are_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    texts = [page.read_text(encoding="utf-8") for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
    named = {word for text in texts for word in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)}
    assert named
    assert named <= targets


@pytest.mark.slow
def test_every_public_name_is_in_the_reference() -> None:
    shown = set(
        re.findall(r"^::: tpcompiler\.(\w+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    errors = {name for name in tpcompiler.__all__ if getattr(tpcompiler, name).__class__ is type} - shown
    assert all(getattr(tpcompiler, name).__module__ == "tpcompiler.errors" for name in errors)
    assert "errors" in shown
    assert shown - {"errors"} == set(tpcompiler.__all__) - errors - {"__version__"}


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert all((ROOT / "docs" / page).exists() for page in GENERATED)
    reference = (tmp_path / "api/index.html").read_text(encoding="utf-8")
    assert 'id="tpcompiler.parallelize"' in reference
    assert "the degree of a single axis" in reference


def test_editors_know_every_public_name_and_no_other() -> None:
    """A `__getattr__` that a type checker saw would give any name the type Any."""
    tree = ast.parse((ROOT / "tpcompiler" / "__init__.py").read_text(encoding="utf-8"))
    plain = [node for node in tree.body if not (isinstance(node, ast.If) and isinstance(node.test, ast.UnaryOp))]
    nodes = [node for part in plain for node in ast.walk(part)]
    assert not [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    imported = {each.asname or each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names}
    assert imported.issuperset(tpcompiler.__all__)
