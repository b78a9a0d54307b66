"""The README's Python example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tpcompiler
from tests.launch import fork_code, fork_ranks, torchrun

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

needs_readme = pytest.mark.skipif(not README.exists(), reason="an installed wheel has no README beside the tests")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@needs_readme
@pytest.mark.slow
@pytest.mark.guide
def test_the_example_and_its_serving_script_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, serve, alone, *_ = blocks("python")
    assert len([line for line in example.splitlines() if line]) <= 10
    monkeypatch.chdir(tmp_path)
    done = fork_code(example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "inherent collectives: 1" in done.stdout
    lines = [line for line in alone.splitlines() if "device" not in line or "print" in line]
    (tmp_path / "serve.py").write_text(serve.replace(', device="cuda"', ""))
    (tmp_path / "alone.py").write_text("\n".join(lines).replace('"nccl"', '"gloo"').replace(', device="cuda"', ""))
    ended = fork_ranks(2, tmp_path / "serve.py")
    done = torchrun(2, tmp_path / "alone.py")  # in interpreters that have nothing of this package
    for codes, printed in ((ended.codes, "".join(ended.printed)), ((done.returncode,), done.stdout)):
        assert not any(codes), printed
        assert len(re.findall(r"tensor\(-?\d", printed)) == 2, printed


@needs_readme
def test_the_named_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", README.read_text(), re.MULTILINE):
        assert f"\n{target}:" in makefile
    name = "register_process_group"
    assert f'{name}("{tpcompiler.Mesh.of(2).group_name(("tp",))}"' in README.read_text()
