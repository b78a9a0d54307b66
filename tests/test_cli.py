"""The command line on a small model: what each command prints, writes and answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tpcompiler.cli.printing
from tests.launch import fork_code, fork_ranks, torchrun
from tests.runtime.commands import call, right
from tests.runtime.models import PLAN_TEXT, mlp_inputs
from tpcompiler.artifact.summary import ConvertedArtifact, summary_parts
from tpcompiler.cli import commands
from tpcompiler.runtime.records import read_record

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


@pytest.fixture(scope="session")
def plan(model: Path) -> Path:
    path = model.with_name("plan.yaml")
    path.write_text(PLAN_TEXT)
    return path


@pytest.fixture(scope="session")
def out(model: Path, plan: Path) -> Path:
    path = model.with_name("out")
    right("convert", model, "--tp", 2, "--plan", plan, "-o", path)
    return path


@pytest.fixture(scope="session")
def inputs(model: Path) -> Path:
    path = model.with_name("inputs.safetensors")
    save_file(mlp_inputs(seed=7), path)
    return path


def test_version() -> None:
    assert right("--version") == "0.1.0\n"


MODEL_TEXT = """\
model.pt2: 10 parameters, buffers and constants, 2.38 kB
modules
name           class
layers.*       Block   x 2
layers.*.up    Linear  x 2
layers.*.down  Linear  x 2
head           Linear

parameters
name                  kind       type        bytes
layers.*.up.weight    parameter  f32[16, 8]  512 B  x 2
layers.*.up.bias      parameter  f32[16]      64 B  x 2
layers.*.down.weight  parameter  f32[8, 16]  512 B  x 2
layers.*.down.bias    parameter  f32[8]       32 B  x 2
head.weight           parameter  f32[4, 8]   128 B
head.bias             parameter  f32[4]       16 B

inputs
name   type
x      f32[3, 8]
shift  f32[4]

outputs
name    type
hidden  f32[3, 8]
cache   None (a constant)
logits  f32[3, 4]

a starter plan (save it as plan.yaml):

# A plan: what is cut, and how. Change the styles; "replicate" leaves a layer whole on every rank.
#   colwise                cut output features: the next layer takes them cut (rowwise) or they are gathered
#   rowwise                cut input features: the results are summed over the ranks
#   colwise_gather_output  cut output features, and gather them right away
#   embedding_rowwise      cut the vocabulary of an embedding
#   auto                   of "**": the search decides what no other line names; without it that follows from the rest
# Also: rowwise_split_input, packed_colwise, packed_rowwise, sequence_parallel, gather, moe_tp_experts, grouped_gemm, dispatch_experts, attend_in_turns, shard_at_rest; for one parameter a placement, such as S(0).
"layers.*.up": colwise    # Linear: weight [16, 8], 2 times
"layers.*.down": rowwise  # Linear: weight [8, 16], 2 times
"head": replicate         # Linear: weight [4, 8]
"**": auto
"""


def test_inspect_a_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert right("inspect", "model.pt2") == MODEL_TEXT


@pytest.mark.slow
def test_the_plan_to_begin_with_is_a_plan(tmp_path: Path) -> None:
    model, skeleton = tmp_path / "model.pt2", tmp_path / "plan.yaml"
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    torch.export.save(torch.export.export(layers, (torch.randn(2, 8, 64),)), model)
    skeleton.write_text(json.loads(right("inspect", model, "--json"))["plan"])
    data = json.loads(right("convert", model, "--tp", 2, "--plan", skeleton, "--dry-run", "--json"))
    assert data["plan"] == {"0": "colwise", "2": "rowwise", "**": "auto"}
    assert max(data["bytes_per_rank"]) < 0.7 * data["bytes"]
    assert [(each["kind"], each["count"]) for each in data["collectives"]] == [("all_reduce", 1)]


def test_thousands_of_ranks(model: Path, plan: Path) -> None:
    """What hangs on their number is linear in it, and those that hold equally much are one line."""
    lines = right("convert", model, "--tp", 3000, "--plan", plan, "--dry-run").splitlines()
    assert [line.split()[:4] for line in lines if line.startswith("rank")] == [
        ["ranks", "0", "to", "15"],
        ["ranks", "16", "to", "2999"],
    ]


SUMMARY = """\
mesh tp=2, 2 ranks, cpu
parameters, buffers and constants
on            bytes   share
one device  2.38 kB  100.0%
rank 0       1.3 kB   54.4%
rank 1       1.3 kB   54.4%

collectives of one call
why       kind        count  payload bytes  wire bytes per rank
inherent  all_reduce      2          192 B                192 B
"""

UNTOUCHED = """
layers that no plan entry touches:
  head

"""


@pytest.mark.slow
def test_convert_reports_what_it_made(model: Path, plan: Path, tmp_path: Path) -> None:
    text = right("convert", model, "--mesh", "tp=2", "--plan", plan, "-o", tmp_path / "out")
    assert text == f"{tmp_path}/out: {SUMMARY}{UNTOUCHED}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "model.pt2",
        "program.pt2",
        "rank_0.pt2",
        "rank_1.pt2",
    ]


def test_a_dry_run_writes_nothing(model: Path, plan: Path, tmp_path: Path) -> None:
    text = right("convert", model, "--tp", 2, "--plan", plan, "-o", tmp_path / "out", "--dry-run")
    assert text == f"nothing written (--dry-run): {SUMMARY}{UNTOUCHED}"
    assert list(tmp_path.iterdir()) == []


def test_the_summary_names_every_fallback(model: Path, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(right("convert", model, "--tp", 2, "--plan", plan, "--dry-run", "--json"))
    row = {"kind": "all_gather", "axis": "tp", "payload_bytes": 4096, "group_size": 2, "wire_bytes": 2048, "node": "a"}
    row |= {"module": "", "source": "model.py:3, in forward", "why": "fallback", "reason": "no rule cuts it"}
    data["fallbacks"] = [{**row, "reshard": "reshard"}]
    data["notes"] = [{"kind": "no rule", "text": "aten.sort at 'sort' has no rule"}]
    tpcompiler.cli.printing.print_answer(False, None, summary_parts(read_record(ConvertedArtifact, data)), "out")
    assert (
        capsys.readouterr().out
        == f"""\
out: {SUMMARY}
fallback: all_gather of 4.1 kB at model.py:3, in forward: no rule cuts it
ops without a rule:
  aten.sort at 'sort' has no rule

"""
    )


@pytest.mark.slow
def test_force_replaces_an_artifact(model: Path, plan: Path, tmp_path: Path) -> None:
    words = ["convert", model, "--plan", plan, "-o", tmp_path / "out"]
    right(*words, "--tp", 2)
    right(*words, "--tp", 4, "--force")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["mesh"] == {"tp": 4}
    assert len(list((tmp_path / "out").iterdir())) == 7
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


ARTIFACT_TEXT = """\
parameters
name                  kind       type        sharding  bytes  bytes on rank 0
layers.*.up.weight    parameter  f32[16, 8]  S(0)      512 B            256 B  x 2
layers.*.up.bias      parameter  f32[16]     S(0)       64 B             32 B  x 2
layers.*.down.weight  parameter  f32[8, 16]  S(1)      512 B            256 B  x 2
layers.*.down.bias    parameter  f32[8]      P(sum)     32 B             32 B  x 2
head.weight           parameter  f32[4, 8]   R         128 B            128 B
head.bias             parameter  f32[4]      R          16 B             16 B

inputs
name   type       sharding
x      f32[3, 8]  R
shift  f32[4]     R

outputs
name    type       sharding
hidden  f32[3, 8]  R
logits  f32[3, 4]  R

written by """


def test_inspect_an_artifact(out: Path) -> None:
    text = right("inspect", out)
    assert text.startswith(f"{out}: {SUMMARY}{UNTOUCHED}{ARTIFACT_TEXT}")
    assert f"torch {torch.__version__}" in text.splitlines()[-1]


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    tpcompiler.cli.printing.print_json({"a": [float("inf"), {"b": float("nan")}], "c": 1.5})
    assert json.loads(capsys.readouterr().out) == {"a": ["inf", {"b": "nan"}], "c": 1.5}


@pytest.mark.timeout(300)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("entry", [["-m", "tpcompiler.cli"], ["--no-python", "tpcompiler"]])
def test_run_in_two_processes(model: Path, out: Path, inputs: Path, tmp_path: Path, entry: list[str]) -> None:
    if entry[0] == "--no-python":
        script = tmp_path / "tpcompiler"  # what an installer makes of [project.scripts]
        script.write_text(f"#!{sys.executable}\nfrom tpcompiler.cli import main\nmain()\n")
        script.chmod(0o755)
        entry = ["--no-python", str(script)]
    written = tmp_path / "outputs.safetensors"
    done = torchrun(2, *entry, "run", out, "--inputs", inputs, "-o", written)
    assert done.returncode == 0, done.stdout
    expected = torch.export.load(model).module()(*mlp_inputs(seed=7).values())
    found = load_file(written)
    assert sorted(found) == ["hidden", "logits"]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
    assert done.stdout.count("outputs\n") == 1  # rank 0 alone prints
    header, *rows = done.stdout.partition("outputs\n")[2].strip().splitlines()
    assert header.split() == ["name", "shape", "dtype", "mean", "largest", "magnitude"]
    assert [row.split()[0] for row in rows] == ["hidden", "logits"]
    assert rows[1].split()[1:4] == ["[3,", "4]", "float32"]
    assert float(rows[1].split()[-1]) == pytest.approx(expected["logits"].abs().amax().item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_takes_and_gives_whole_tensors_where_ranks_have_shares(tmp_path: Path) -> None:
    """Four rows over two ranks, and back; every rank answers for its own half."""
    linear, x = torch.nn.Linear(3, 5), torch.randn(4, 3)
    made = tpcompiler.parallelize(
        torch.export.export(linear, (x,)), {"dp": 2, "tp": 1}, {}, inputs=[{"dp": "S(0)"}], outputs=[{"dp": "S(0)"}]
    )
    made.save(tmp_path / "out")
    save_file({"input": x}, tmp_path / "in.safetensors")
    written = tmp_path / "written.safetensors"
    words = ["run", tmp_path / "out", "--inputs", tmp_path / "in.safetensors", "--outputs", written]
    ended = fork_ranks(2, Path(tpcompiler.cli.__file__).with_name("__main__.py"), *words)
    assert ended.codes == (0, 0), ended.printed
    (found,) = load_file(written).values()
    torch.testing.assert_close(found, linear(x).detach(), rtol=1e-5, atol=1e-5)


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in call("inspect", tmp_path / "a.pt2").stderr
    for result in (
        call("--debug", "inspect", tmp_path / "a.pt2"),
        call("inspect", tmp_path / "a.pt2", TPCOMPILER_DEBUG="1"),
    ):
        assert result.exit_code == 2
        assert result.stderr.startswith("Traceback (most recent call last):\n")
        assert f"tpcompiler.errors.ArtifactError: {tmp_path}/a.pt2 does not exist" in result.stderr


PRESS = """
import os, signal, time
import torch
from tpcompiler.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background, where it is ignored

def press(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def press_half(*_, **__):  # as torch does where numpy is half imported
    try:
        press()
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once per process") from None

def press_later(*given, save=torch.export.save, done=[], **more):
    save(*given, **more)
    done.append(0)
    if len(done) == 2:
        press()
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "where",
    ["tpcompiler.runtime.model_file.read_model = press", "tpcompiler.runtime.model_file.read_model = press_half",
     "torch.export.save = press_later"],
)  # fmt: skip
def test_interrupted_is_one_word_and_leaves_nothing(where: str, model: Path, plan: Path, tmp_path: Path) -> None:
    words = ["convert", str(model), "--tp", "2", "--plan", str(plan), "-o", str(tmp_path / "folder" / "out")]
    done = fork_code(f"{PRESS}\nimport tpcompiler.runtime.model_file\n{where}\nmain()", *words)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (130, "", "interrupted")
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_defect_is_not_the_answer_not_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(commands, "app", fail)
    with pytest.raises(SystemExit) as stop:
        commands.main()
    assert stop.value.code == 3
    assert capsys.readouterr().err.endswith(
        "KeyError: 'x'\nthis is a defect of tpcompiler: please report it with the traceback above\n"
    )
