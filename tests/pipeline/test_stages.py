"""Stages times tensor ranks: from files in real processes, compared with the single device."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.compared import single_device
from tests.launch import fork_ranks, run_ranks
from tests.passes.stages import Call
from tests.state.models import PLAN, Llama, call
from tests.zoo.case import randomise
from tests.zoo.index import CASES
from tests.zoo.measure import exported
from tpcompiler import InputsError, MeshError, ParallelProgram, UnsupportedError
from tpcompiler._torch import tree_flatten
from tpcompiler.frontend.stages import Prices, cut_stages
from tpcompiler.judge.sound.stages import check_stages
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.records import StageRecord

MACHINE = "h100"  # whose kernels take time, which stages share
MESH = {"pp": 2, "tp": 2}
RUNS = [("llama", False), ("llama", True), ("gpt2", True), ("t5", True), ("mixtral", True)]


@pytest.mark.slow
def test_models_from_files_on_gloo(tmp_path: Path) -> None:
    """The model's answer on all ranks, also those of the first stage."""
    calls = {}
    for name, dynamic in RUNS:
        case = CASES[name]
        program = tpcompiler.parallelize(exported(case, dynamic), MESH, case.asked())
        assert [each.manifest().stage.index for each in program.values()] == [0, 1]  # type: ignore[union-attr]
        folder = f"{name}_{dynamic}"
        program.save(tmp_path / folder)
        calls[folder] = case.inputs(*(case.others[0] if dynamic else case.example))
        torch.save(([("", (), calls[folder])], {}), tmp_path / f"{folder}.calls")
    run_ranks(4, Path(__file__).parent / "worker.py", tmp_path, *calls)
    for (name, dynamic), folder in zip(RUNS, calls, strict=True):
        expected, allowed = single_device(exported(CASES[name], dynamic), calls[folder])
        for rank in range(4):
            (made,) = torch.load(tmp_path / f"{folder}.{rank}.made")
            got = [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]
            for own, want, limit in zip(got, expected, allowed, strict=True):
                assert (own - want).abs().max() / want.abs().max() <= limit, (folder, rank)


PROMPT, *STEPS = call(2, 0, 4), call(2, 4, 1), call(2, 5, 1)


@cache
def generating() -> dict[str, Any]:
    model = randomise(Llama(2, "index_copy", 2))
    return {"prefill": export(model, PROMPT[0]), "decode": export(model, STEPS[0][0])}


@cache
def converted() -> ParallelProgram:
    return tpcompiler.parallelize(generating(), MESH, PLAN)


@pytest.mark.slow
def test_prefill_and_decode_have_each_leaf_in_one_stage() -> None:
    program = converted()
    assert [*program] == ["prefill_0", "prefill_1", "decode_0", "decode_1"]
    names = {name: {row.name for row in each.manifest().tensors} for name, each in program.items()}
    assert names["prefill_0"] == names["decode_0"]
    assert names["prefill_1"] == names["decode_1"]
    caches = {name: {leaf for leaf in own if leaf.endswith("keys")} for name, own in names.items()}
    assert caches["prefill_0"]
    assert caches["prefill_1"]
    assert not caches["prefill_0"] & caches["prefill_1"]
    assert [each.manifest().family for each in program.values()] == ["prefill_0", "prefill_1"] * 2
    report = program.verify([("prefill", *PROMPT), *(("decode", *step) for step in STEPS)])
    assert report.ok, str(report)
    assert any("keys" in each.name for each in report.outputs)
    assert program.world_size == 4


@pytest.mark.slow
def test_microbatches_have_buffers_each(tmp_path: Path) -> None:
    """Two sequences of a batch each: a prompt and two steps; the second sequence is another."""
    converted().save(tmp_path / "out")
    first = [args for args, *_ in (PROMPT, *STEPS)]
    second = [(tokens.flip(0), position) for tokens, position in first]
    calls = [
        (program, (torch.cat([one, other]), position), {})
        for program, (one, position), (other, _) in zip(("prefill", "decode", "decode"), first, second, strict=True)
    ]
    torch.save((calls, {"microbatches": 2}), tmp_path / "out.calls")
    run_ranks(4, Path(__file__).parent / "worker.py", tmp_path, "out")
    made = torch.load(tmp_path / "out.3.made")
    with torch.no_grad():
        for at, sequence in enumerate((first, second)):
            model = randomise(Llama(2, "index_copy", 2))
            for got, args in zip(made, sequence, strict=True):
                want = model(*args)
                torch.testing.assert_close(got.chunk(2)[at], want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda stage: stage["receives"].clear(), "reads '"),
        (lambda stage: stage["receives"].update(dict.fromkeys(stage["receives"], 1)), "does not return it"),
        (lambda stage: stage["outputs"].clear(), "0 stages return the output"),
        (lambda stage: stage.update(index=0), "are not all of 2, in order"),
    ],
)
def test_exchanges_that_are_not_the_programs_are_not_sound(change: Any, finding: str, tmp_path: Path) -> None:
    converted().save(tmp_path / "out")
    path = tmp_path / "out" / "decode_1" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["stage"])
    path.write_text(json.dumps(manifest))
    report = tpcompiler.open(tmp_path / "out").check()
    assert not report.ok
    assert finding in str(report)


def test_a_swapped_value_is_not_sound() -> None:
    """Two values of one shape cross; the second stage takes one for the other."""

    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up, down = self.layers[0](x), self.layers[1](x)
            return self.layers[2](up) - self.layers[3](down)

    program = canonicalize(export(randomise(Crossing()), (torch.randn(3, 8),)))
    prices = Prices(
        lambda graph: dict.fromkeys((node.name for node in graph.nodes), 1.0), lambda sent: sent / 1000, float("inf")
    )
    stages = cut_stages({"model": program}, 2, prices, {})["model"]
    assert len(stages[1].receives) == 2
    parts = [(record(stage, at), canonicalize(stage.program)) for at, stage in enumerate(stages)]
    assert check_stages(parts, program) == 2
    first, second = (next(n for n in parts[1][1].graph.nodes if n.name == name) for name in stages[1].receives)
    users = [*first.users], [*second.users]
    crossed = [(first, second, users[0]), (second, first, users[1])]
    for own, other, using in crossed:
        for user in using:
            user.replace_input_with(own, other)
    with pytest.raises(Unsound, match=r"stage 1 computes .*, which the whole does not"):
        check_stages(parts, program)
    for own, other, using in crossed:
        for user in using:
            user.replace_input_with(other, own)
    assert check_stages(parts, program) == 2
    sub = next(node for node in parts[1][1].graph.nodes if node.target is torch.ops.aten.sub.Tensor)
    sub.args = sub.args[::-1]
    with pytest.raises(Unsound, match="stage 1 computes 'sub', which the whole does not"):
        check_stages(parts, program)


def record(stage: Any, index: int) -> StageRecord:
    said: dict[str, Any] = {"of": "model", "count": 2, "returns": ["output"], "takes": "", "makes": "", "fixed": {}}
    said |= {"inputs": ["x"], "arguments": ["x"]}
    return StageRecord(index=index, receives=dict(stage.receives), outputs=list(stage.outputs), **said)


def test_stages_are_balanced_where_least_crosses() -> None:
    """Four equal layers; between two of them one value crosses, inside of one two."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    program = canonicalize(export(randomise(nn.Sequential(*(Layer() for _ in range(4)))), (torch.randn(3, 8),)))
    prices = Prices(
        lambda graph: dict.fromkeys((node.name for node in graph.nodes), 1.0), lambda sent: sent / 1000, float("inf")
    )
    for count in (2, 4):
        stages = cut_stages({"model": program}, count, prices, {})["model"]
        layers = [{name.partition(".")[0] for name in stage.program.state_dict} for stage in stages]
        assert [len(own) for own in layers] == [4 // count] * count
        assert [len(stage.receives) for stage in stages] == [0] + [1] * (count - 1)
    with pytest.raises(MeshError, match="there are 5 places for a cut\n  help: write pp=6"):
        cut_stages({"model": program}, 9, prices, {})
    whole = sum(value.nbytes for value in program.source.state_dict.values())
    with pytest.raises(MeshError, match="cannot be cut into 2 stages"):
        cut_stages({"model": program}, 2, replace(prices, limit=whole / 2 - 1), {})


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    """Rank 3, of the last stage, ends before its call; the first stage waits for its outputs."""
    converted().save(tmp_path / "out")
    script = tmp_path / "dies.py"
    script.write_text(
        "import datetime, os, sys, torch, tpcompiler\n"
        "module = tpcompiler.load(sys.argv[1], timeout=datetime.timedelta(seconds=20))\n"
        "if torch.distributed.get_rank() == 3:\n"
        "    os._exit(7)\n"
        "module['decode'](torch.zeros(2, 1, dtype=torch.int64), torch.tensor([4]))\n"
    )
    ended = fork_ranks(4, script, tmp_path / "out", timeout=120)
    assert ended.codes[3] == 7
    assert all(ended.codes)
    assert any("another rank has ended, or did not reach it" in printed for printed in ended.printed)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: torch.nn.functional.dropout(self.up(x)), "draws random numbers"),
        (lambda self, x: self.up(x.add_(1)), "writes to its input 'x'"),
        (lambda self, x: (self.up(x), x.shape[0]), "returns the size '1'"),
    ],
)
def test_programs_that_are_not_cut(forward: Any, message: str) -> None:
    dynamic = {"x": {0: torch.export.Dim("batch", min=2, max=8)}}
    program = export(Call(forward, up=nn.Linear(8, 8)), (torch.randn(3, 8),), dynamic_shapes=dynamic)
    with pytest.raises(UnsupportedError, match=message):
        tpcompiler.parallelize(program, {"pp": 2, "tp": 1}, {})


@pytest.mark.slow
def test_a_tied_weight_is_in_the_stages_that_use_it(tmp_path: Path) -> None:
    """The first stage has the embedding alone, and its weight the head's name."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.embed = nn.Linear(8, 16, bias=False), nn.Embedding(16, 8)
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.down(self.up(self.embed(x)).relu()))

    plan = {"head": "colwise_gather_output", "embed": "embedding_rowwise", "up": "colwise", "down": "rowwise"}
    program = tpcompiler.parallelize(export(randomise(Tied()), (torch.arange(4),)), MESH, plan)
    held = [{row.name for row in each.manifest().tensors} for each in program.values()]
    assert held[0] & held[1] == {"head.weight", "embed.weight"}  # one tensor, under both names
    assert program["stage_0"].collectives()[0].kind == "all_reduce"
    assert program["stage_1"].collectives()[-1].kind == "all_gather"
    assert program.verify().ok
    program.save(tmp_path / "out")  # and checks the files


def test_gradients_are_not_cut() -> None:
    program = tpcompiler.export_training(
        Call(lambda self, x: self.up(x).mean(), up=nn.Linear(8, 8)), (torch.randn(3, 8),)
    )
    with pytest.raises(UnsupportedError, match="has gradients"):
        tpcompiler.parallelize(program, {"pp": 2, "tp": 1}, {})


def test_a_text_is_not_returned() -> None:
    module = Call(lambda self, x: {"y": self.down(self.up(x)), "t": "text"}, up=nn.Linear(8, 12), down=nn.Linear(12, 8))
    with pytest.raises(UnsupportedError, match="output 't' is the text 'text'"):
        tpcompiler.parallelize(export(module, (torch.randn(4, 8),)), {"pp": 2, "tp": 1}, {})


def with_arguments() -> Any:
    """A model that takes constants, a dynamic number and what no op uses, and returns a conjugated value."""

    def forward(self: Any, x: torch.Tensor, k: int, y: torch.Tensor, n: int, mask: Any = None) -> Any:
        return {"y": (torch.complex(self.down(torch.relu(self.up(x))), x * n) * k).conj()}

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    args = x, 2, x + 1, 3, None
    module = Call(forward, up=nn.Linear(8, 12), down=nn.Linear(12, 8))
    dynamic = None, None, None, torch.export.Dim.DYNAMIC, None
    return module, args, export(module, args, dynamic_shapes=dynamic)


def test_arguments_that_are_no_tensors() -> None:
    """An input may have the name of an output that an earlier stage returns."""
    module, (x, *rest), program = with_arguments()
    staged = tpcompiler.parallelize(program, MESH, {"up": "colwise", "down": "rowwise"})
    assert staged.verify((x, *rest)).ok
    assert staged.verify((x, 2, x, 5, None)).ok
    assert not staged.verify((x, *rest), original=export(_scaled(module), (x, *rest))).ok
    with pytest.raises(InputsError, match="input 'k' is 3, the program was exported with 2"):
        staged.verify((x, 3, x, 5, None))


def test_a_weight_that_is_returned_is_in_the_stage_of_its_layer() -> None:
    layers = {name: nn.Linear(*sizes) for name, sizes in zip("abcd", [(8, 12), (12, 8)] * 2, strict=True)}
    forward = lambda self, x: (self.d(torch.relu(self.c(self.b(torch.relu(self.a(x)))))), self.a.weight)  # noqa: E731
    program = export(Call(forward, **layers), (torch.randn(4, 8),))
    staged = tpcompiler.parallelize(program, MESH, {"a": "colwise", "b": "rowwise"})
    assert [each.manifest().stage.outputs for each in staged.values()] == [["1"], ["0"]]  # type: ignore[union-attr]
    assert staged.verify().ok
    assert staged.check().ok


def test_weights_of_stages_are_compared_with_the_model(tmp_path: Path) -> None:
    """Not with one that has another weight, or one more tensor."""
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    models = (model, copy.deepcopy(model), nn.Sequential(*model, nn.LayerNorm(8)))
    program, other, more = (export(each, (torch.randn(4, 8),)) for each in models)
    other.state_dict["2.bias"].data.add_(1)
    staged = tpcompiler.parallelize(program, MESH, {"0": "colwise", "2": "rowwise"})
    staged.save(tmp_path / "out")
    for made in (staged, tpcompiler.open(tmp_path / "out")):
        report = made.check(program)
        assert report.ok
        assert report.weights_compared
        assert made["stage_1"].check(program).ok
        (found,) = made.check(other).findings
        assert found == "stage_1: '2.bias': the ranks' shares do not make the original's tensor"
        assert not made.check(more).ok


def _scaled(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    other.forward = MethodType(module.forward.__func__, other)  # type: ignore[operator]
    with torch.no_grad():
        other.down.weight.mul_(1.01)  # type: ignore[union-attr, operator]
    return other
