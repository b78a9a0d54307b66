"""Parameters held in shards between their uses: gathered twice, their gradients scattered; bytes by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import tpcompiler
from tests.passes.stages import Call
from tests.training.test_gradients import PLAN, ROWS, Mlp, built, squares
from tests.zoo.faults import collectives_of, without_collective
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.parallel.compared import compared_calls, subject_of
from tpcompiler.plan import Plan
from tpcompiler.runtime.artifact import SINGLE

REST = {"**": "shard_at_rest(dp)"}


def converted(mesh: dict[str, int], plan: dict[str, str]) -> tuple[tpcompiler.ParallelProgram, Any, int]:
    """A Llama, the arguments of a call, and the bytes of its parameters."""
    model, program, _, named = built("llama")
    outputs = {"outputs.logits": ROWS}
    made = tpcompiler.parallelize(program, mesh, plan, inputs=dict.fromkeys(named, ROWS), outputs=outputs)
    return made, named, sum(each.numel() * 4 for each in model.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_what_a_rank_holds_and_sends(ranks: int) -> None:
    """An n-th of all parameters and gradients; two gathers of each (of the embedding one) and one scatter."""
    made, named, total = converted({"dp": ranks}, REST)
    held = made.rank_program(0).state_dict.values()
    assert sum(each.numel() * 4 for each in held) * ranks == total
    embedding, sent = 64 * 32 * 4, Counter[str]()
    for each in made.collectives():
        sent[each.kind] += each.wire_bytes
    assert sent["all_gather"] == (2 * total - embedding) * (ranks - 1) // ranks
    assert sent["reduce_scatter"] == total * (ranks - 1) // ranks
    assert {each.why for each in made.collectives() if each.kind == "all_gather"} == {"plan-demanded"}
    assert made.verify((), named).ok


def test_beside_layers_that_are_cut(tmp_path: Any) -> None:
    """Over tp the collectives of layers; of a weight that tp cuts, dp gathers the half that tp leaves."""
    made, named, _ = converted({"dp": 2, "tp": 2}, {**PLAN, **REST})
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


def test_one_layer_ahead() -> None:
    """A gather starts when the one before it has been waited for: no more than one is under way."""
    made, _, _ = converted({"dp": 2}, REST)
    open_gathers, most = set(), 0
    for node in made.rank_program(0).graph.nodes:
        if edit.is_collective(node) and "all_gather" in str(node.target):
            open_gathers.add(node)
        most = max(most, len(open_gathers))
        if edit.is_wait(node):
            open_gathers.discard(node.args[0])
    assert most == 1


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


def test_for_inference_too() -> None:
    """The weights are gathered for their use."""
    exported = torch.export.export(Mlp(), (torch.randn(4, 8),))
    made = tpcompiler.parallelize(exported, {"dp": 4}, REST)
    assert Counter(each.kind for each in made.collectives()) == {"all_gather": 6}
    assert made.verify().ok


def test_the_search_takes_it_where_nothing_else_fits() -> None:
    """Layers that are cut alone hold 1.12 kB. The plan that it writes gives the same program."""
    _, program, args, named = built("mlp")
    given: dict[str, Any] = {
        "inputs": {"x": ROWS, "labels": ROWS},
        "outputs": {"outputs.output": ROWS},
        "memory": 1_000,
    }
    made = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, "auto", **given)
    plan = made.manifest().plan
    assert (plan["gate"], plan["gate.weight"]) == ("colwise", "shard_at_rest(dp)")
    assert "; without it a call would take" in made.report()
    assert made.verify(args, named).ok
    again = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, plan, **given)
    shardings, others = ({row.name: row.sharding for row in each.manifest().tensors} for each in (made, again))
    assert shardings == others
    assert again.collectives() == made.collectives()


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
