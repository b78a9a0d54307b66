"""The Python API on small models: what is kept, what is reported, what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import tpcompiler
from tests.launch import fork_code
from tests.zoo.case import randomise
from tpcompiler._torch import sym_hint
from tpcompiler.passes import _collectives


class Mlp(torch.nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, hidden)
        self.down = torch.nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


PLAN = {"up": "colwise", "down": "rowwise"}


def exported(model: torch.nn.Module, *inputs: object, **kwargs: object) -> torch.export.ExportedProgram:
    return torch.export.export(randomise(model), inputs, **kwargs)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["colwise", "colwise_gather_output"])
@pytest.mark.parametrize(("hidden", "world"), [(8, 2), (18, 4), (3, 4)])
def test_an_mlp_with_a_dynamic_batch(hidden: int, world: int, style: str) -> None:
    """Sizes other than the example's, one included, through sums and gathers of even, uneven and empty shards."""
    model = torch.export.export(
        randomise(Mlp(hidden)), (torch.randn(5, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    plan = PLAN if style == "colwise" else {"up": style}
    program = tpcompiler.parallelize(model, world, plan)
    sent = ("all_reduce", "inherent") if style == "colwise" else ("all_gather", "plan-demanded")
    assert [(c.kind, c.why) for c in program.collectives()] == [sent]
    for batch in (1, 2, 7):
        assert program.verify((torch.randn(batch, 4),)).ok
    before, after = model.range_constraints, program.rank_program(0).range_constraints
    assert {str(k): str(v) for k, v in after.items()} == {str(k): str(v) for k, v in before.items()}


def test_a_size_that_is_fixed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: padding is trimmed in a way that fixes the batch to the example's."""
    monkeypatch.setattr(_collectives, "_trim", lambda x, shape: x[tuple(slice(sym_hint(size)) for size in shape)])
    model = exported(Mlp(18), torch.randn(5, 4), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with pytest.raises(tpcompiler.InternalError, match=r"is \[5, 18\], but its sharding R of"):
        tpcompiler.parallelize(model, 4, {"up": "colwise_gather_output"})


def test_the_report() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()
            self.head = torch.nn.Linear(4, 6)
            self.extra = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.extra(torch.softmax(self.head(self.mlp(x)), -1))

    plan = {"mlp.up": "colwise", "mlp.down": "rowwise", "head": "colwise"}
    program = tpcompiler.parallelize(exported(Model(), torch.randn(2, 4)), 2, plan)
    where = program.collectives()[1].source
    assert program.report() == (
        "mesh tp=2, 2 ranks, cpu\n"
        "parameters, buffers and constants\n"
        "on          bytes   share\n"
        "one device  592 B  100.0%\n"
        "rank 0      388 B   65.5%\n"
        "rank 1      388 B   65.5%\n"
        "\n"
        "collectives of one call\n"
        "why       kind        count  payload bytes  wire bytes per rank\n"
        "inherent  all_reduce      1           32 B                 32 B\n"
        "fallback  all_gather      1           48 B                 24 B\n"
        "\n"
        f"fallback: all_gather of 48 B at {where}: softmax: it needs the dim of 6 whole\n"
        "  help: change 'head' from colwise to replicate (each rank sends 24 B less per call; each rank holds 60 B more)\n"
        "layers that no plan entry touches:\n"
        "  extra\n"
        "\n"
        "a rank holds 65.5% of all bytes: 28.4% are whole, and no plan entry names them; "
        'with plan="auto", optimize="memory" it would hold 51.4%'
    )


def test_what_is_kept_of_the_program() -> None:
    """Tied weights, a non-persistent buffer, a constant, non-tensor inputs, dict outputs, names and source lines."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 4)
            self.mlp = Mlp()
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0, 5.0]), persistent=False)
            self.shift = torch.tensor([1.0, 0.5, 0.25, 0.125])

        def forward(self, ids: torch.Tensor, flag: bool, extra: torch.Tensor | None) -> dict[str, object]:
            hidden = self.mlp(self.embed(ids) * self.scale + self.shift)
            return {"logits": self.head(hidden), "hidden": (hidden, 7), "none": extra}

    ids = torch.randint(0, 10, (2, 3))
    before = exported(Model(), ids, True, None)
    plan = {"embed": "embedding_rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}
    program = tpcompiler.parallelize(before, 2, plan)
    assert program.verify((ids, True, None)).ok
    after = program.rank_program(1)
    assert after.state_dict["embed.weight"] is after.state_dict["head.weight"]
    assert after.state_dict["embed.weight"].shape == (5, 4)
    assert set(after.state_dict) == set(before.state_dict)
    assert set(after.constants) == {*before.constants, "rank_numbers"}, "where the rank's part of the vocabulary begins"
    torch.testing.assert_close(after.constants["scale"], torch.tensor([2.0, 3.0, 4.0, 5.0]))
    assert after.call_spec == before.call_spec
    rows = {row.name: row for row in program.manifest().tensors}
    assert rows["head.weight"].tied_to == "embed.weight"
    for node in after.graph.nodes:
        if "c10d" in str(node.target):
            assert node.meta["nn_module_stack"]
            assert "test_api.py" in node.meta["stack_trace"]


@pytest.mark.slow
def test_verify_leaves_mutable_state_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    program = torch.export.export(randomise(model).train(), (torch.randn(5, 4),))
    made = tpcompiler.parallelize(program, 2, {"0": "colwise"})
    before = {name: value.clone() for name, value in program.state_dict.items()}
    x = torch.randn(5, 4)
    first, second = made.verify((x,)), made.verify((x,))
    assert first.ok
    assert first == second
    assert {d.name for d in first.outputs} >= {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name, value in program.state_dict.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_dump_writes_a_numbered_text_after_every_pass(tmp_path: Path) -> None:
    tpcompiler.parallelize(exported(Mlp(), torch.randn(2, 4)), 2, PLAN, dump=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "00_canonicalize.txt",
        "01_apply_plan.txt",
        "02_join_branches.txt",
        "03_spread_experts.txt",
        "04_divide_sizes.txt",
        "05_dispatch_experts.txt",
        "06_attend_in_turns.txt",
        "07_group_queries.txt",
        "08_place.txt",
        "09_fold_reshards.txt",
        "10_choose_paths.txt",
        "11_lowered_rank_0.txt",
    ]
    assert (tmp_path / "11_lowered_rank_0.txt").read_text().endswith("return wait_tensor\n")


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: torch.Tensor


def test_an_output_class_is_saved_as_a_dict(tmp_path: Path) -> None:
    """The files load where the class is unknown; `keep_output_types` keeps it."""
    pytree.register_dataclass(Result, serialized_type_name="tests.Result")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: torch.Tensor) -> Result:
            return Result(self.mlp(x), x + 1)

    program = tpcompiler.parallelize(exported(Model(), torch.randn(2, 4)), 2, {f"mlp.{k}": v for k, v in PLAN.items()})
    program.save(tmp_path / "plain")
    code = (
        "import torch, sys; p = torch.export.load(sys.argv[1]); s = p.call_spec.out_spec;"
        "print(s.type.__name__, list(s.context))"
    )
    done = fork_code(code, tmp_path / "plain" / "rank_0.pt2")  # which has not the class
    assert done.stdout == "dict ['logits', 'extra']\n", done.stderr
    program.save(tmp_path / "kept", keep_output_types=True)
    assert torch.export.load(tmp_path / "kept" / "rank_0.pt2").call_spec.out_spec.type is Result


def test_a_program_prints_what_it_is() -> None:
    made = tpcompiler.parallelize(exported(Mlp(), torch.randn(2, 4)), 2, {"up": "colwise", "down": "rowwise"})
    whole, per_rank = made.parameter_bytes()
    assert str(made) == (
        f"ParallelProgram(mesh tp=2 on cpu: {per_rank[0]} B of {whole} B of weights on a rank; 1 all_reduce, 32 B sent per "
        "rank and call)"
    )
    both = {"a": exported(Mlp(), torch.randn(2, 4)), "b": exported(Mlp(), torch.randn(2, 4))}
    assert re.fullmatch(
        r"ParallelProgram\(a: mesh .* call, b: mesh .* call\)",
        repr(tpcompiler.parallelize(both, 2, {})),
    )


def test_a_goal_that_does_not_exist() -> None:
    for convert in (tpcompiler.parallelize, tpcompiler.find_plan):
        with pytest.raises(tpcompiler.InputsError, match="optimize is 'speed'\n  help: name one of latency, memory"):
            convert(exported(Mlp(), torch.randn(2, 4)), 2, "auto", optimize="speed")


def test_one_tensor_is_no_sequence_of_inputs() -> None:
    program = tpcompiler.parallelize(exported(Mlp(), torch.randn(2, 4)), 2, PLAN)
    with pytest.raises(tpcompiler.InputsError, match=r"one tensor of shape \[2, 4\], .*\n  help: .*verify\(\(x,\)\)"):
        program.verify(torch.randn(2, 4))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_first_line_says_that_no_layer_is_cut() -> None:
    model = exported(Mlp(), torch.randn(2, 4))
    first = str(tpcompiler.parallelize(model, 2, {"**": "replicate"}).report()).splitlines()[0]
    assert first.startswith("every rank holds the whole model: no layer is cut")
    assert str(tpcompiler.parallelize(model, 2, PLAN).report()).startswith("mesh tp=2")


def test_a_defect_is_no_bad_input() -> None:
    """Whatever handles bad input must not hide a defect of the compiler."""
    assert not issubclass(tpcompiler.InternalError, tpcompiler.TpCompilerError)


def test_a_defect_in_the_price_of_an_alternative_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        raise tpcompiler.InternalError("a broken promise")

    program = tpcompiler.parallelize(exported(Mlp(), torch.randn(2, 4)), 2, PLAN)
    monkeypatch.setattr("tpcompiler.report.again.refuse_misfits", fail)
    with pytest.raises(tpcompiler.InternalError, match="a broken promise"):
        program.explain("up.weight")
