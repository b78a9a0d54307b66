"""Parameters held in shards between their uses: gathered twice, their gradients scattered; bytes by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import ExportedProgram

import tpcompiler
from tests.passes.stages import Call
from tests.training.test_gradients import PLAN, ROWS, Mlp, built, squares, with_own_samples
from tests.zoo.faults import collectives_of, without_collective
from tpcompiler.api.request import Request
from tpcompiler.artifact.summary import summarize
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.parallel.program_subject import compared_calls, subject_of
from tpcompiler.plan.plan import Plan
from tpcompiler.runtime.artifact import SINGLE
from tpcompiler.solver.estimate import measure_memory, sent_by
from tpcompiler.solver.solution import Solution
from tpcompiler.terminal.tables import Table

REST = {"**": "shard_at_rest(dp)"}


@cache
def converted(ranks: int) -> tuple[tpcompiler.ParallelProgram, Any, int]:
    """A Llama of which each rank holds a share, the arguments of a call, and the bytes of its parameters."""
    model, _, _, named = built("llama")
    return with_own_samples({"dp": ranks}, REST), named, sum(each.numel() * 4 for each in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_what_a_rank_holds_and_sends(ranks: int) -> None:
    """An n-th of all parameters and gradients; two gathers of each (of the embedding one) and one scatter."""
    made, named, total = converted(ranks)
    held = made.rank_program(0).state_dict.values()
    assert sum(each.numel() * 4 for each in held) * ranks == total
    embedding, sent = 64 * 32 * 4, Counter[str]()
    for each in made.collectives():
        sent[each.kind] += each.wire_bytes
    assert sent["all_gather"] == (2 * total - embedding) * (ranks - 1) // ranks
    assert sent["reduce_scatter"] == total * (ranks - 1) // ranks
    assert {each.why for each in made.collectives() if each.kind == "all_gather"} == {"plan-demanded"}
    assert made.verify((), named).ok


@pytest.mark.slow
def test_beside_layers_that_are_cut(tmp_path: Any) -> None:
    """Over tp the collectives of layers; of a weight that tp cuts, dp gathers the half that tp leaves."""
    made, (*_, named) = with_own_samples({"dp": 2, "tp": 2}, {**PLAN, **REST}), built("llama")
    kinds = Counter((each.kind, each.axis) for each in made.collectives())
    parameters = 2 * 9 + 3
    assert kinds == {
        ("all_gather", "dp"): 2 * parameters - 1,
        ("reduce_scatter", "dp"): parameters,
        ("all_reduce", "tp"): 2 * (2 + 2) + 1,
        ("all_reduce", "dp"): 2,  # the loss, and how many labels count
    }
    weight = next(row for row in made.manifest().tensors if row.name == "model.layers.0.self_attn.q_proj.weight")
    assert weight.sharding == "[S(0), S(0, outside dp)]"
    made.save(tmp_path / "out")  # and proves the files
    assert tpcompiler.open(tmp_path / "out").verify((), named).ok


@pytest.mark.slow
def test_one_layer_ahead() -> None:
    """A gather starts when the one before it has been waited for: no more than one is under way."""
    made, _, _ = converted(2)
    open_gathers, most = set(), 0
    for node in made.rank_program(0).graph.nodes:
        if edit.is_collective(node) and "all_gather" in str(node.target):
            open_gathers.add(node)
        most = max(most, len(open_gathers))
        if edit.is_wait(node):
            open_gathers.discard(node.args[0])
    assert most == 1


@pytest.mark.slow
def test_without_a_scatter_or_a_gather_it_is_wrong() -> None:
    _, program, args, named = built("mlp")
    made = tpcompiler.parallelize(program, {"dp": 2}, REST, inputs={"x": ROWS, "labels": ROWS})
    subject, call = subject_of(made.only), [(SINGLE, args, named)]
    assert compared_calls({SINGLE: subject}, call).ok
    for each in collectives_of(subject.programs[0]):
        damaged = [without_collective(rank, each) for rank in subject.programs]
        assert not compared_calls({SINGLE: replace(subject, programs=damaged)}, call).ok, each


def test_what_no_axis_divides_stays_whole_and_is_named() -> None:
    model = Call(lambda self, x: self.up(x).square().mean(), up=nn.Linear(4, 3))
    program = tpcompiler.export_training(model, (torch.randn(4, 4),))
    made = tpcompiler.parallelize(program, {"dp": 2}, {"up": "shard_at_rest"}, inputs=[ROWS])
    shardings = {row.name: row.sharding for row in made.manifest().tensors}
    assert shardings == {"up.weight": "S(1)", "up.bias": "R"}
    assert_expected_inline(
        "\n".join(note.text for note in made.manifest().notes if "whole" in note.text),
        """'up.bias' [3] is held whole over dp=2, which divides no dim (the plan ("up": "shard_at_rest"))""",
    )
    assert made.verify().ok


MLP: dict[str, Any] = {"inputs": {"x": ROWS, "labels": ROWS}, "outputs": {"outputs.output": ROWS}}


@pytest.mark.slow
def test_the_search_takes_it_where_nothing_else_fits() -> None:
    """With layers that are cut alone a rank holds 2.34 kB, 0.9 kB of it AdamW's. The plan gives the same program."""
    _, program, args, named = built("mlp")
    given = {**MLP, "memory": 2_000}
    made = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, "auto", **given)
    plan = made.manifest().plan
    assert (plan["gate"], plan["gate.weight"]) == ("colwise", "shard_at_rest(dp)")
    assert "; without it a call would take" in made.report()
    assert "state of adamw 448 B" in made.report()
    assert made.verify(args, named).ok
    again = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, plan, **given)
    shardings, others = ({row.name: row.sharding for row in each.manifest().tensors} for each in (made, again))
    assert shardings == others
    assert again.collectives() == made.collectives()
    without_state = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, "auto", optimizer="none", **given)
    assert "gate.weight" not in without_state.manifest().plan


def placed(program: ExportedProgram, plan: Plan, **asked: Any) -> Solution:
    return find_placements([*Request(program, {"dp": 2}, plan, **MLP, **asked).conversions().values()])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "none"])
def test_memory_by_hand(optimizer: Any) -> None:
    """Layers of 8 x 8 and 8, on two rows of 8 of each rank.

    At the peak, where the first gradient of a weight is made: x, labels, what gate, up, silu, their product and down
    make, the loss, its gradient, that of the product, and the gradient of the weight as it is before its sum.
    """
    program = built("mlp")[1]
    parameters, row = 3 * (8 * 8 + 8) * 4, 2 * 8 * 4
    state = parameters * {"adamw": 2, "sgd": 1, "none": 0}[optimizer]
    found = placed(program, Plan(), optimizer=optimizer)
    held = measure_memory(found)
    assert (held.weights, held.gradients, held.state) == (parameters, parameters, state)
    assert held.activations == 9 * row + 4 + 8 * 8 * 4
    sharded = Plan.of({"up": "shard_at_rest", "gate": "shard_at_rest", "down": "shard_at_rest"})
    found = placed(program, sharded, optimizer=optimizer)
    held = measure_memory(found)
    assert (held.weights, held.gradients, held.state) == (parameters // 2, parameters // 2, state // 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_report_and_diagnose_tell_gradients_and_the_optimizer_s_state(ranks: int) -> None:
    made, _, total = converted(ranks)
    told = summarize(made.manifest()).training
    assert told is not None
    assert (told.gradients, told.state) == (total, 2 * total)
    assert told.gradients_per_rank == [total // ranks] * ranks
    assert told.state_per_rank == [2 * total // ranks] * ranks
    assert "gradients  adamw state" in made.report().splitlines()[2]
    if ranks == 2:
        found = tpcompiler.diagnose(built("mlp")[1], memory=10**6, optimizer="sgd", machine="ideal")
        (held,) = found.meshes["tp=1"].costs
        assert (held.gradients, held.optimizer) == (864, 864)
        assert held.total == 3 * 864 + held.activations
        (table,) = (part for part in found.parts() if isinstance(part, Table) and part.title.startswith("a rank holds"))
        assert table.headers[1:5] == ["weights", "gradients", "sgd state", "at peak"]


def test_gathers_are_priced() -> None:
    """Of P bytes two ranks gather P/2 and scatter P/2, where a sum over dp sends P; and they gather a weight again."""
    program = built("mlp")[1]
    machine, resting = read_machine("ideal"), Plan.of(dict.fromkeys(["up", "gate", "down"], "shard_at_rest"))
    sharded, whole = (placed(program, plan, machine=machine) for plan in (resting, Plan()))
    kinds = Counter(kind for kind, _, _ in sent_by(sharded))
    assert (kinds["all_gather"], kinds["reduce_scatter"]) == (6 + 1, 6)  # of weights, the backward needs down's alone
    again = machine.collective_seconds("all_gather", ("dp",), 8 * 8 * 4 / 2, sharded.mesh)
    assert sharded.seconds - whole.seconds == pytest.approx(again, rel=0.01)


def test_written_and_read() -> None:
    plan = Plan.of({"**": "shard_at_rest(fsdp)", "up": "colwise"})
    assert plan.to_data() == {"**": "shard_at_rest(fsdp)", "up": "colwise"}
    assert Plan.of(plan.to_data()) == plan
    assert Plan.of({"**": "shard_at_rest"}).to_data() == REST


def test_an_axis_that_the_mesh_lacks() -> None:
    program = tpcompiler.export_training(
        Mlp(), (torch.randn(4, 8),), loss=squares, targets={"labels": torch.randn(4, 8)}
    )
    with pytest.raises(PlanError) as raised:
        tpcompiler.parallelize(program, {"tp": 2}, REST)
    assert_expected_inline(
        str(raised.value),
        """\
'shard_at_rest(dp)' names no axis of the mesh tp=2
  help: name one of tp
  asked by: the plan ("**": "shard_at_rest(dp)")""",
    )
