"""The command line on a small model: what each command prints, writes and answers; the judges, and drawings."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import graphviz
import pytest
import torch
from safetensors.torch import load_file, save_file

import tpcompiler.cli.printing
from tests.launch import fork_code, fork_ranks, torchrun
from tests.runtime.commands import call, refused, right
from tests.runtime.models import PLAN_TEXT, mlp_inputs
from tpcompiler.artifact.summary import ConvertedArtifact, summary_parts
from tpcompiler.cli import commands
from tpcompiler.runtime.artifact import read_manifest, sha256
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


@pytest.fixture
def tampered(out: Path, tmp_path: Path) -> Path:
    """An artifact in which two weights of rank 1 have changed places, with a hash that fits."""
    directory = shutil.copytree(out, tmp_path / "tampered")
    path, manifest = directory / "rank_1.pt2", directory / "manifest.json"
    program = torch.export.load(path)
    first, second = (program.state_dict[f"layers.{layer}.up.weight"] for layer in (0, 1))
    with torch.no_grad():
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    torch.export.save(program, path)
    data = json.loads(manifest.read_text())
    data["files"]["rank_1.pt2"] = sha256(path)
    manifest.write_text(json.dumps(data))
    return directory


def test_verify_finds_swapped_weights(model: Path, tampered: Path) -> None:
    result = call("verify", tampered, "--against", model)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("NOT EQUAL: ")
    assert [line.split(":")[0] for line in lines[1:4]] == ["  BAD hidden", "  ok  cache", "  BAD logits"]
    assert lines[4].startswith("  first diverging value: 'linear' (aten.linear.default, claimed S(1))")
    result = call("verify", tampered, "--against", model, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["ok"], [row["ok"] for row in data["outputs"]]) == (False, [False, True, False])


@pytest.mark.slow
def test_check(model: Path, out: Path, tampered: Path) -> None:
    """Without the model nobody can say which weights are right; with it they are compared bit for bit."""
    sound = "sound: 2 ranks, "
    unread = "weights were not compared with the model's: pass --against MODEL.pt2, or --checkpoint DIR"
    for directory in (out, tampered):
        said = right("check", directory).splitlines()
        assert (said[0].startswith(sound), said[-1]) == (True, unread)
    said = right("check", out, "--against", model).splitlines()
    assert (said[0].startswith(sound), len(said)) == (True, 1)
    data = json.loads(right("check", out, "--json"))
    assert (data["ok"], data["weights_compared"]) == (True, False)
    result = call("check", tampered, "--against", model)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "'layers.0.up.weight': the ranks' shares do not make the original's tensor" in result.stdout


def test_show_an_artifact(out: Path) -> None:
    assert "all_reduce" in right("inspect", out, "--rank", 0)
    dot = right("inspect", out, "--format", "dot", "--rank", 1)
    assert dot.startswith(("digraph", "//"))
    assert "all_reduce" in dot
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


def test_the_rows_of_a_program_as_json(out: Path) -> None:
    data = json.loads(right("inspect", out, "--rank", 1, "--json"))
    assert (data["rank"], data["mesh"]) == (1, {"tp": 2})
    sent = [item for item in data["items"] if item["collective"]]
    assert [item["sharding"] for item in sent] == ["P(sum) -> R"] * 2
    assert all(item["name"] == item["collective"]["node"] for item in sent)
    names = [item["name"] for item in data["items"]]
    assert all(source in names for item in data["items"] for source in item["sources"])
    assert "--json: leave --format, -o and --tensor out" in refused("inspect", out, "--json", "--format", "dot")


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views have tests of their own: here only what the command does with them."""
    import tpcompiler.api.parallel_program

    graph = graphviz.Digraph()
    graph.node("a")
    monkeypatch.setattr(tpcompiler.api.parallel_program, "artifact_dot", lambda program, rank: graph)
    monkeypatch.setattr(
        tpcompiler.api.parallel_program, "artifact_text", lambda program, rank: f"text of rank {rank}\n"
    )


DOT = "digraph {\n\ta\n}\n"


@pytest.mark.usefixtures("views")
@pytest.mark.parametrize("kind", ["svg", "png"])
def test_show_without_graphviz(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = call("inspect", out, "-o", tmp_path / f"a.{kind}")
    note = f"Graphviz's program dot is not installed, so this is its source text, not {kind.upper()}\n"
    note += "  help: install graphviz, then: "
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"{note}dot -T{kind} {tmp_path}/a.dot -o {tmp_path}/a.{kind}\nwrote {tmp_path}/a.dot\n"
    assert (tmp_path / "a.dot").read_text() == DOT
    assert not (tmp_path / f"a.{kind}").exists()
    if kind == "png":
        return
    result = call("inspect", out, "--format", "svg")
    assert (result.exit_code, result.stdout) == (0, DOT)
    assert result.stderr == f"{note}dot -Tsvg out.dot -o out.svg\n"


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
