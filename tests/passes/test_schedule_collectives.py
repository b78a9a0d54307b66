"""Collectives start right after their operand and are waited for right before their first use, in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import tpcompiler
from tests.passes.stages import Call, local
from tests.zoo.measure import waits_too_early
from tpcompiler.cost.peak import find_peak, local_values
from tpcompiler.ir import edit
from tpcompiler.ir.text import program_text
from tpcompiler.passes.schedule_collectives import schedule_collectives


def text(module: Call, x: torch.Tensor, plan: dict[str, str] | None = None, **kwargs: Any) -> str:
    return program_text(schedule_collectives(local(module, (x,), plan or {}, **kwargs)))


def test_a_wait_moves_down_to_its_first_use() -> None:
    module = Call(lambda self, x: (x @ self.a) @ self.b + torch.sin(x), a=(4, 8), b=(8, 4))
    assert_expected_inline(
        text(module, torch.randn(2, 4), {"a": "S(1)", "b": "S(0)"}),
        """\
p_a: S(1) = a f32[4, 4]
p_b: S(0) = b f32[4, 4]
x: R = input f32[2, 4]
matmul: S(1) = matmul(x, p_a)
matmul_1: P(sum) = matmul(matmul, p_b)
all_reduce = all_reduce(matmul_1, 'sum', 'tp=2:tp')
sin: R = sin(x)
wait_tensor: R = wait_tensor(all_reduce)
add: R = add(wait_tensor, sin)
return add
""",
    )


def test_a_start_moves_up_to_its_operand_with_what_goes_before_it() -> None:
    """An output is gathered at the end where nobody else needs it whole; its dim is not the first in memory."""
    module = Call(lambda self, x: (x @ self.a, torch.sin(x) @ self.b), a=(4, 8), b=(4, 4))
    assert_expected_inline(
        text(module, torch.randn(2, 4), {"a": "S(1)"}, outputs=["R", None]),
        """\
p_a: S(1) = a f32[4, 4]
p_b: R = b f32[4, 4]
x: R = input f32[2, 4]
matmul: S(1) = matmul(x, p_a)
unsqueeze = unsqueeze(matmul, 0)
all_gather_into_tensor = all_gather_into_tensor(unsqueeze, 2, 'tp=2:tp')
sin: R = sin(x)
matmul_1: R = matmul(sin, p_b)
wait_tensor = wait_tensor(all_gather_into_tensor)
permute = permute(wait_tensor, [1, 0, 2])
clone = clone(permute, memory_format=torch.contiguous_format)
view: R = view(clone, [2, 8])
return view, matmul_1
""",
    )


def test_a_piece_that_nothing_uses_stays_in_its_change() -> None:
    """Of a gather of parts, the replicated one is taken from the first rank; `check` reads a change up to its last op."""
    module = Call(lambda self, x: torch.sin(x.sort(0).values) + x)
    lines = text(module, torch.randn(6), degree=2, inputs=["S(0, parts 2r 4)"]).splitlines()
    unused = next(at for at, line in enumerate(lines) if line.startswith("getitem_3 = getitem(split_with_sizes_1, 0)"))
    assert "getitem_3" not in " ".join(lines[:unused] + lines[unused + 1 :])
    assert lines[unused - 1].startswith("split_with_sizes_1")
    program = tpcompiler.parallelize(torch.export.export(module, (torch.randn(6),)), 2, {}, inputs=["S(0, parts 2r 4)"])
    assert program.check().ok


class Aside(Call):
    """A product that is gathered, and another one that is not, of 512 bytes."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: (x @ self.a, (torch.sin(x) @ self.b).sum(1)), a=(4, 8), b=(4, 64))


# The gather makes 2 x 8 numbers of 4 bytes, of a rank's half; nothing else waits for it.
BETWEEN, ASIDE, HALF, GATHERED = 2 * 4 * 4, 2 * 64 * 4, 2 * 4 * 4, 2 * 8 * 4
LEAST = 2 * 4 * 4 + HALF + BETWEEN + ASIDE  # the input, half a product, a sine, and the other product


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("limit", "most", "notes"),
    [
        (None, LEAST + GATHERED, ["a rank holds 64 B more at the peak ('matmul_1')"]),
        (LEAST + GATHERED, LEAST + GATHERED, ["a rank holds 64 B more at the peak ('matmul_1')"]),
        (
            LEAST + GATHERED - 1,
            LEAST,
            ["waited for at once, because a rank would hold more than its limit of memory: 1 of 1 collectives"],
        ),
    ],
)
def test_a_limit_on_memory(limit: int | None, most: int, notes: list[str]) -> None:
    program = local(Aside(), (torch.randn(2, 4),), {"a": "S(1)"}, outputs=["R", None])
    values = local_values(program)
    made = schedule_collectives(program, limit)
    assert find_peak(list(made.graph.nodes), values)[0] == most
    assert [note.text for note in made.notes] == notes
    names = [node.name for node in made.graph.nodes]
    assert (names.index("all_gather_into_tensor") < names.index("matmul_1")) == (most > LEAST)


def test_the_limit_that_is_asked_for() -> None:
    """Half of `a` and all of `b` are held too. The limit is on what the search counts; the numbers stay right."""
    program, x = torch.export.export(Aside(), (torch.randn(2, 4),)), torch.randn(2, 4)
    held = (4 * 8 // 2 + 4 * 64) * 4
    for limit, kept in ((held + LEAST + GATHERED, False), (held + LEAST + GATHERED - 1, True)):
        made = tpcompiler.parallelize(program, 2, {"a": "S(1)", "b": "R"}, outputs=["R", None], memory=limit)
        (note,) = (note.text for note in made.manifest().notes if note.kind == "overlap")
        assert note.startswith("waited for at once") == kept
        assert f"memory of collectives that run during other ops:\n  {note}\n" in made.report()
        assert made.verify((x,)).ok
        assert made.check().ok


def test_all_ranks_wait_as_the_first_does() -> None:
    """Seven columns, so that each rank has another program; the check wants one order."""
    module = Call(lambda self, x: (x @ self.a, (torch.sin(x) @ self.b).sum(1)), a=(4, 7), b=(4, 64))
    program, x = torch.export.export(module, (torch.randn(2, 4),)), torch.randn(2, 4)
    held, most = (4 * 4 + 4 * 64) * 4, LEAST + GATHERED
    for limit in (held + most, held + most - 1):
        made = tpcompiler.parallelize(program, 2, {"a": "S(1)", "b": "R"}, outputs=["R", None], memory=limit)
        assert len(made.converted.classes()) == 2
        for rank in range(2):
            names = [node.name for node in made.rank_program(rank).graph.nodes]
            assert (names.index("all_gather_into_tensor") < names.index("sin")) == (limit == held + most)
        assert made.verify((x,)).ok
        assert made.check().ok


def test_what_a_gather_sends_is_held_until_its_wait() -> None:
    """An all_reduce sends a copy that it makes."""
    gathered = local(Aside(), (torch.randn(2, 4),), {"a": "S(1)"}, outputs=["R", None])
    reduced = local(Call(lambda self, x: (x @ self.a, torch.sin(x)), a=(4, 8)), (torch.randn(2, 4),), {"a": "S(0)"})
    for program, held in ((gathered, True), (reduced, False)):
        schedule_collectives(program)
        nodes = {node.name: node for node in program.graph.nodes}
        wait = next(node for node in nodes.values() if edit.is_wait(node))
        values = local_values(program)
        alone = values._replace(size={nodes["matmul"]: 1})
        peaks = [find_peak(list(program.graph.nodes), alone, {node: 1})[0] for node in (nodes["sin"], wait)]
        assert peaks == [1 + held] * 2


def test_waits_too_early_are_seen() -> None:
    """Negative control of the test of the models: before the pass there are some."""
    program = local(
        Call(lambda self, x: (x @ self.a) @ self.b + torch.sin(x), a=(4, 8), b=(8, 4)),
        (torch.randn(2, 4),),
        {"a": "S(1)", "b": "S(0)"},
    )
    assert [(wait.name, op.name) for wait, op in waits_too_early(program.graph)] == [("wait_tensor", "sin")]
    assert not list(waits_too_early(schedule_collectives(program).graph))


def test_the_order_of_collectives_is_kept() -> None:
    module = Call(lambda self, x: (x @ self.a, torch.sin(x) @ self.b, x.sum()), a=(4, 8), b=(4, 8))
    program = local(module, (torch.randn(2, 4),), {"a": "S(1)", "b": "S(1)"}, outputs=["R", "R", None])
    before = [node.name for node in program.graph.nodes if edit.is_collective(node)]
    after = [node.name for node in schedule_collectives(program).graph.nodes if edit.is_collective(node)]
    assert len(before) == 2
    assert before == after
