"""Changes of the manifest, the boundary and the tensors of sound artifacts, each found by another question."""

from __future__ import annotations

import torch
from msgspec.structs import force_setattr, replace
from torch.export.graph_signature import OutputKind

from tests.trust.damage import Artifact, aten, claim, inserted, nodes, on, row
from tpcompiler.ir import edit


@on("rows")
def an_output_too_many_in_the_manifest(a: Artifact) -> None:
    a.manifest.outputs.append(replace(a.manifest.outputs[0], name="more"))


@on("rows")
def another_dtype_of_an_output(a: Artifact) -> None:
    force_setattr(row(a, "outputs", "y"), "dtype", "bf16")


@on("rows")
def another_shape_of_an_output(a: Artifact) -> None:
    row(a, "outputs", "y").shape[0] = 5


@on("rows")
def written_back_with_another_sharding(a: Artifact) -> None:
    for program in a.ranks:
        place = next(
            i for i, s in enumerate(program.graph_signature.output_specs) if s.kind is OutputKind.BUFFER_MUTATION
        )
        values = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        before = values[place]
        values[place] = inserted(program.graph.output_node(), aten.zeros_like.default, (before,), before)
        claim(values[place])["sharding"] = ["P(sum)"]
        program.graph.output_node().args = (tuple(values),)


@on("attend")
def ranks_of_other_structures(a: Artifact) -> None:
    signature = a.last.module_call_graph[0].signature
    assert signature is not None
    spec = signature.out_spec
    signature.out_spec = type(spec)(dict, ["one", "two"], [spec.child(0), spec.child(1)])


@on("attend")
def a_structure_that_is_not_the_original_s(a: Artifact) -> None:
    for program in a.ranks:
        signature = program.module_call_graph[0].signature
        assert signature is not None
        spec = signature.out_spec
        signature.out_spec = type(spec)(dict, ["one", "two"], [spec.child(0), spec.child(1)])


@on("images")
def a_tensor_that_a_rank_does_not_have(a: Artifact) -> None:
    del a.last.state_dict["norm.weight"]


@on("images")
def a_tensor_of_another_dtype(a: Artifact) -> None:
    a.put(1, "norm.weight", a.leaf(1, "norm.weight").double())


@on("images")
def a_tensor_of_another_shape(a: Artifact) -> None:
    a.put(1, "norm.weight", a.leaf(1, "norm.weight")[:2])


@on("images")
def a_tensor_that_overlaps_itself(a: Artifact) -> None:
    name = next(row.name for row in a.manifest.tensors if len(row.shape) > 1)
    weight = a.leaf(1, name)
    a.last.state_dict[name] = torch.nn.Parameter(weight.as_strided(weight.shape, (1,) * weight.ndim), False)


@on("uneven")
def a_collective_for_fewer_ranks(a: Artifact) -> None:
    for program in a.ranks:
        start = next(node for node in program.graph.nodes if "all_gather" in str(node.target))
        start.update_arg(1, 1)


@on("images")
def a_collective_that_is_not_there(a: Artifact) -> None:
    a.manifest.collectives.append(a.manifest.collectives[-1])


@on("images")
def a_collective_that_sends_more(a: Artifact) -> None:
    last = a.manifest.collectives[-1]
    force_setattr(last, "wire_bytes", last.wire_bytes - 1)


@on("images")
def a_tensor_of_another_kind(a: Artifact) -> None:
    force_setattr(a.manifest.tensors[0], "kind", "buffer")


@on("images")
def a_tensor_tied_to_another(a: Artifact) -> None:
    first, second, *_ = a.manifest.tensors
    force_setattr(second, "tied_to", first.name)


@on("images")
def a_tensor_tied_to_none(a: Artifact) -> None:
    force_setattr(a.manifest.tensors[0], "tied_to", "nothing")


@on("uneven")
def a_rank_that_ends_before_the_others(a: Artifact) -> None:
    start = next(node for node in a.last.graph.nodes if "all_gather" in str(node.target))
    stand_in = inserted(start, aten.cat.default, ([start.args[0]] * 2,), start)
    next(iter(start.users)).replace_all_uses_with(stand_in)
    edit.erase(next(iter(start.users)))
    edit.erase(start)


@on("images")
def a_wait_for_no_collective(a: Artifact) -> None:
    for start in nodes(a, "all_reduce"):
        next(iter(start.users)).args = start.args[:1]


@on("images")
def a_group_that_nobody_knows(a: Artifact) -> None:
    for start in nodes(a, "all_reduce"):
        start.update_arg(2, "tp=2:other")


@on("images")
def an_input_that_the_manifest_leaves_out(a: Artifact) -> None:
    del a.manifest.inputs[0]


@on("images")
def an_input_of_another_name(a: Artifact) -> None:
    force_setattr(a.manifest.inputs[0], "name", "y")


@on("images")
def an_input_of_other_dims(a: Artifact) -> None:
    a.manifest.inputs[0].shape.append(3)


@on("images")
def an_input_of_another_size(a: Artifact) -> None:
    a.manifest.inputs[0].shape[0] = 3


@on("images")
def a_sharding_that_cannot_be_read(a: Artifact) -> None:
    force_setattr(row(a, "tensors", "norm.weight"), "sharding", "S(7)")
