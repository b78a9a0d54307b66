"""Any exported program becomes one flat functional graph, with the ops that have rules whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.export import export

import tpcompiler
from tests.passes.stages import Call, canonical
from tpcompiler.errors import ProgramError
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.text import op_name, program_text
from tpcompiler.passes.canonicalize import canonicalize


def block(self: Any, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mixed = F.scaled_dot_product_attention(q, q, q)
    mixed = mixed.to(torch.float32).flatten(1)
    return F.layer_norm(F.linear(x, self.w), (3,)) + F.glu(mixed).sum() + x.softmax(-1).matmul(self.w.t())


ARGS = torch.randn(2, 4, 6), torch.randn(2, 5)


def text(program: CanonicalProgram) -> str:
    return program_text(program)


def test_wrappers_and_assertions_go_and_ops_with_rules_stay() -> None:
    assert_expected_inline(
        text(canonical(Call(block, w=(3, 5)), ARGS)),
        """\
p_w = w f32[3, 5]
q = input f32[2, 4, 6]
x = input f32[2, 5]
scaled_dot_product_attention = scaled_dot_product_attention(q, q, q)
view = view(scaled_dot_product_attention, [2, 24])
linear = linear(x, p_w)
layer_norm = layer_norm(linear, [3], None, None, 1e-05, False)
slice_1 = slice(view, 1, 0, 12)
slice_2 = slice(view, 1, 12, 24)
sigmoid = sigmoid(slice_2)
mul = mul(slice_1, sigmoid)
sum_1 = sum(mul)
add = add(layer_norm, sum_1)
softmax = softmax(x, -1)
t = t(p_w)
matmul = matmul(softmax, t)
add_1 = add(add, matmul)
return add_1
""",
    )


def test_canonical_form_is_a_fixed_point() -> None:
    once = canonical(Call(block, w=(3, 5)), ARGS)
    assert text(canonicalize(once.source)) == text(once)


def test_mutations_are_written_back_by_the_signature() -> None:
    def count(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum())
        self.total.mul_(2)
        return x + self.total

    program = canonical(Call(count, total=torch.zeros(())), (torch.randn(3),))
    assert_expected_inline(
        text(program),
        """\
b_total = total f32[]
x = input f32[3]
sum_1 = sum(x)
add = add(b_total, sum_1)
mul = mul(add, 2)
add_1 = add(x, mul)
return mul, add_1
""",
    )
    assert list(program.mutations()) == [(0, "total")]


def test_what_nobody_uses_goes_but_runtime_assertions_stay() -> None:
    def checked(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x.exp()
        index = ids.max().item()
        torch._check(index >= 0)
        torch._check(index < 3)
        return x[index]

    program = canonical(Call(checked), (torch.randn(3, 4), torch.tensor([1, 2])))
    names = [op_name(node) for node in edit.calls(program.graph)]
    assert names[:2] + names[-1:] == ["max", "_local_scalar_dense", "select"]
    assert {"ge", "lt", "_assert_scalar"} <= set(names[2:-1])


def test_the_given_program_is_not_changed() -> None:
    program = export(Call(block, w=(3, 5)), ARGS)
    before = str(program.graph)
    canonicalize(program)
    assert str(program.graph) == before


def test_a_program_that_cannot_be_decomposed() -> None:
    program = export(Call(lambda self, x: x + 1), (torch.randn(3),))
    node = next(node for node in program.graph.nodes if node.op == "call_function")
    node.args = (node.args[0], "one")
    with pytest.raises(ProgramError) as error:
        canonicalize(program)
    assert str(error.value).startswith("the program cannot be made functional: ")
    assert "check that it runs: exported_program.run_decompositions() fails in the same way" in str(error.value)


def test_rows_that_are_written_in_the_model_are_a_slice() -> None:
    """Consecutive ones; a buffer's rows, others and a mask stay look-ups."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, [-2]], x[[0, 1]], x[:, [1, 0]], x[..., [0, 2]], x[:, self.table]

    module = Call(forward, table=torch.tensor([1, 2]))
    program = export(module, (torch.randn(4, 10, 3),))
    text = program_text(canonicalize(program))
    assert_expected_inline(
        text[text.index("x = ") :],
        """\
x = input f32[4, 10, 3]
rows = slice(x, 1, 8, 9)
index = clone(rows, memory_format=torch.contiguous_format)
rows_1 = slice(x, 0, 0, 2)
index_1 = clone(rows_1, memory_format=torch.contiguous_format)
clone_2 = clone(c_lifted_tensor_2)
index_2 = index(x, [None, clone_2])
clone_3 = clone(c_lifted_tensor_3)
index_3 = index(x, [None, None, clone_3])
index_4 = index(x, [None, b_table])
return index, index_1, index_2, index_3, index_4
""",
    )
    made = tpcompiler.parallelize(program, 2, {}, inputs=["S(0)"])
    assert made.verify((torch.randn(4, 10, 3),)).ok


def test_slices_count_from_the_start() -> None:
    """From the end of a shard, a negative number would count to another element."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, -3:], x[:, :-3], x[-9:-1], x.slice_scatter(x[:, :2], 1, -4, -2)

    text = program_text(canonicalize(export(Call(forward), (torch.randn(4, 10),))))
    assert_expected_inline(
        text[text.index("x = ") :],
        """\
x = input f32[4, 10]
slice_1 = slice(x, 1, 7, 9223372036854775807)
slice_2 = slice(x, 1, 0, 7)
slice_3 = slice(x, 0, 0, 3)
slice_4 = slice(x, 1, 0, 2)
slice_scatter = slice_scatter(x, slice_4, 1, 6, 8)
return slice_1, slice_2, slice_3, slice_scatter
""",
    )


class LeastOfTwo(torch.nn.Module):
    """Heads of as many steps as the shorter of two inputs has; how many heads there are is left to the view."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        steps: Any = torch.sym_min(x.shape[1], y.shape[1])  # type: ignore[no-untyped-call]
        mixed = x[:, :steps] + y[:, :steps]
        heads = self.q(mixed).view(mixed.shape[0], steps, -1, 8)
        made: torch.Tensor = self.o(torch.relu(heads).reshape(mixed.shape[0], steps, 32))
        return made


def test_a_size_that_a_view_infers_is_written(tmp_path: Path) -> None:
    """torch does not find again that it is 4 once it has read the sizes from a file."""
    inputs = (torch.randn(3, 20, 32), torch.randn(3, 22, 32))
    auto = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    program = torch.export.export(LeastOfTwo(), inputs, dynamic_shapes=(auto, auto))
    sizes = [node.args[1] for node in canonicalize(program).graph.nodes if node.target is torch.ops.aten.view.default]
    assert [size[2:] for size in sizes] == [[4, 8], [32]]
    made = tpcompiler.parallelize(program, 2, {"q": "colwise", "o": "rowwise"})
    made.save(tmp_path / "out")  # and checks the files
    assert made.verify(inputs).ok


def look_up(self: Any, mask: torch.Tensor) -> Any:
    """Read a mask for each sample and key, as models do, and in two other orders."""
    samples, keys = torch.arange(mask.shape[0])[:, None, None, None], torch.arange(mask.shape[1]) + 0
    return mask[samples, keys], mask[samples, keys.flip(0)], mask[samples.flatten(), keys[:, None]]


def test_a_look_up_of_all_positions_in_order_is_the_value() -> None:
    """A rank with some of the samples reads all of them; other positions are looked up."""
    program = canonical(Call(look_up), (torch.rand(3, 3) > 0.5,))
    first, *others = (edit.producer(value)[0] for value in program.output.args[0])
    assert [op_name(first), op_name(edit.operands(first)[0])] == ["clone", "unsqueeze"]
    assert edit.shape(first) == (3, 1, 1, 3)
    assert [op_name(other) for other in others] == ["index", "index"]
