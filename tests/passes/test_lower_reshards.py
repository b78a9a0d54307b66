"""Every reshard becomes the collectives that make it, on this rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.export import export

from tests.passes.stages import Call, routed
from tests.torchs_changes import torchs_change
from tpcompiler import parallelize
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import has_reshard, origin_of, reshard_of
from tpcompiler.ir.placements import parse_placement
from tpcompiler.ir.program import PlacedProgram
from tpcompiler.ir.text import program_text
from tpcompiler.passes.localize_shapes import localize_shapes
from tpcompiler.passes.lower_reshards import lower_reshards

CHANGE = Call(lambda self, x: x)


def changed(shape: tuple[int, ...], source: str, target: str, degree: int, **kwargs: Any) -> PlacedProgram:
    return routed(CHANGE, (torch.randn(shape),), degree=degree, inputs=[source], outputs=[target], **kwargs)


def text(shape: tuple[int, ...], source: str, target: str, *, degree: int = 2, rank: int = 0, **kwargs: Any) -> str:
    """What one change is lowered to, with the sizes of this rank."""
    program = localize_shapes(lower_reshards(changed(shape, source, target, degree, **kwargs), (rank,), {}), {})
    return program_text(program)


def test_a_sum_is_reduced() -> None:
    assert_expected_inline(
        text((4, 6), "P(sum)", "R"),
        """\
x: P(sum) = input f32[4, 6]
all_reduce = all_reduce(x, 'sum', 'tp=2:tp')
wait_tensor: R = wait_tensor(all_reduce)
return wait_tensor
""",
    )
    assert_expected_inline(
        text((4, 6), "P(max)", "R"),
        """\
x: P(max) = input f32[4, 6]
view = view(x, i32)
bitwise_right_shift = bitwise_right_shift(view, 31)
bitwise_and = bitwise_and(bitwise_right_shift, 2147483647)
bitwise_xor = bitwise_xor(view, bitwise_and)
isnan = isnan(x)
masked_fill = masked_fill(bitwise_xor, isnan, 2147483647)
all_reduce = all_reduce(masked_fill, 'max', 'tp=2:tp')
wait_tensor = wait_tensor(all_reduce)
bitwise_right_shift_1 = bitwise_right_shift(wait_tensor, 31)
bitwise_and_1 = bitwise_and(bitwise_right_shift_1, 2147483647)
bitwise_xor_1 = bitwise_xor(wait_tensor, bitwise_and_1)
view_1: R = view(bitwise_xor_1, f32)
return view_1
""",
    )


def test_a_sum_is_reduced_and_cut() -> None:
    assert_expected_inline(
        text((4, 6), "P(sum)", "S(0)"),
        """\
x: P(sum) = input f32[4, 6]
reduce_scatter_tensor = reduce_scatter_tensor(x, 'sum', 2, 'tp=2:tp')
wait_tensor: S(0) = wait_tensor(reduce_scatter_tensor)
return wait_tensor
""",
    )
    assert_expected_inline(
        text((4, 6), "P(sum)", "S(1)"),
        """\
x: P(sum) = input f32[4, 6]
split = split(x, 3, 1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
cat = cat([getitem, getitem_1])
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp=2:tp')
wait_tensor: S(1) = wait_tensor(reduce_scatter_tensor)
return wait_tensor
""",
    )


def test_a_shard_is_gathered() -> None:
    assert_expected_inline(
        text((4, 6), "S(0)", "R"),
        """\
x: S(0) = input f32[2, 6]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp=2:tp')
wait_tensor: R = wait_tensor(all_gather_into_tensor)
return wait_tensor
""",
    )
    assert_expected_inline(
        text((4, 6), "S(1)", "R"),
        """\
x: S(1) = input f32[4, 3]
unsqueeze = unsqueeze(x, 0)
all_gather_into_tensor = all_gather_into_tensor(unsqueeze, 2, 'tp=2:tp')
wait_tensor = wait_tensor(all_gather_into_tensor)
permute = permute(wait_tensor, [1, 0, 2])
clone = clone(permute, memory_format=torch.contiguous_format)
view: R = view(clone, [4, 6])
return view
""",
    )


def test_dims_are_exchanged() -> None:
    """With torch, on CPU, this would be a gather: as many times the bytes as there are ranks."""
    assert_expected_inline(
        text((4, 6), "S(0)", "S(1)"),
        """\
x: S(0) = input f32[2, 6]
view = view(x, [2, 2, 3])
permute = permute(view, [1, 0, 2])
clone = clone(permute, memory_format=torch.contiguous_format)
all_to_all_single = all_to_all_single(clone, [1, 1], [1, 1], 'tp=2:tp')
wait_tensor = wait_tensor(all_to_all_single)
view_1: S(1) = view(wait_tensor, [4, 3])
return view_1
""",
    )


@pytest.mark.slow
def test_what_another_reshard_made_is_changed_in_its_global_shape() -> None:
    """A sum that is reduced for two users, one of which needs more of it."""
    module = Call(lambda self, x: (torch.relu(y := x @ self.w), y.sort(0).values), w=(6, 8))
    x = torch.randn(4, 6)
    made = parallelize(
        export(module, (x,)), {"dp": 2, "tp": 2}, {"w": "S(0)"}, inputs=[{"dp": "S(0)"}], outputs=[{"dp": "S(0)"}, None]
    )
    assert made.verify((x,)).ok
    assert_expected_inline(
        program_text(made.converted.partition.local_program(0)),
        """\
p_w: [R, S(0)] = w f32[3, 8]
x: [S(0), R] = input f32[2, 6]
rank_number = rank_number([0, 3, 0, 3])
rank_number_1 = rank_number([0, 0, 2, 2])
arange = arange(3, device=device(type='cpu'), pin_memory=False)
add = add(arange, rank_number)
index_select: [S(0), S(1)] = index_select(x, 1, add)
matmul: [S(0), P(sum)] = matmul(index_select, p_w)
reduce_scatter_tensor = reduce_scatter_tensor(matmul, 'sum', 2, 'dp=2,tp=2:tp')
wait_tensor = wait_tensor(reduce_scatter_tensor)
all_gather_into_tensor = all_gather_into_tensor(wait_tensor, 4, 'dp=2,tp=2:dp.tp')
arange_1 = arange(2, device=device(type='cpu'), pin_memory=False)
add_1 = add(arange_1, rank_number_1)
wait_tensor_1: [R, R] = wait_tensor(all_gather_into_tensor)
index_select_1: [S(0), R] = index_select(wait_tensor_1, 0, add_1)
relu: [S(0), R] = relu(index_select_1)
sort: ([R, R], [R, R]) = sort(wait_tensor_1, 0)
getitem: [R, R] = getitem(sort, 0)
return relu, getitem
""",
    )
    inside: dict[str, set[str]] = {}
    for node in made.converted.partition.local_program(0).graph.nodes:
        if has_reshard(node):
            inside.setdefault(reshard_of(node).name, set()).add(origin_of(node))
    assert [*inside.values()] == [{"x"}, {"matmul"}, {"matmul"}]


@pytest.mark.parametrize("degree", [2, 4])
def test_an_even_change_is_torch_s_own(degree: int) -> None:
    """Node by node, on one axis; a gather of an inner dim and an exchange have fewer nodes than torch's."""
    shape, differs = (8, 16, 24), []
    reductions = [*itertools.product(("P(sum)", "P(avg)"), ("R", "S(0)", "S(1)", "S(2)"))]
    for source, target in [*reductions, ("S(0)", "R"), ("R", "P(sum)")]:
        ours = lower_reshards(changed(shape, source, target, degree), (0,), {}).graph
        ends = [parse_placement(text) for text in (source, target)]
        theirs = torchs_change(shape, *ends, degree, f"tp={degree}:tp")
        differs += [f"{source} -> {target}"] if calls_of(ours) != calls_of(theirs) else []
    assert differs == []


def calls_of(graph: fx.Graph) -> list[Any]:
    at = {node: number for number, node in enumerate(graph.nodes)}
    return [(node.target, fx.map_arg(node.args, at.__getitem__)) for node in edit.calls(graph)]


def test_what_a_reshard_becomes_carries_it() -> None:
    program = lower_reshards(changed((4, 6), "S(0)", "R", 2), (0,), {})
    marked = {node.name: reshard_of(node).name for node in program.graph.nodes if has_reshard(node)}
    assert marked == {"all_gather_into_tensor": "reshard", "wait_tensor": "reshard"}
