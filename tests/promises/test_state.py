"""What a rank program keeps of the original: names, types, ranges, pytrees, state; and what it leaves alone."""

from __future__ import annotations

import copy
import hashlib
import io

import pytest
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind

import tpcompiler
from tests.promises.models import CACHE, NAMES, Counting, exported, functional, ranks
from tests.zoo.case import randomise
from tests.zoo.decoders import LLAMA
from tpcompiler.checkpoint.leaves import placed_shardings
from tpcompiler.judge.compare.simulate import simulate


def kinds(signature: ExportGraphSignature) -> list[tuple[object, ...]]:
    """Kind, target and persistence of every input and output; kind and constant value of what is no tensor."""
    inputs = [(s.kind, s.target, s.persistent, getattr(s.arg, "value", None)) for s in signature.input_specs]
    return inputs + [(s.kind, s.target, getattr(s.arg, "value", None)) for s in signature.output_specs]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_names_types_ranges_and_pytrees_are_the_originals(name: str) -> None:
    before = exported(name)
    for after in ranks(name, 2):
        numbers = (InputKind.CONSTANT_TENSOR, "rank_numbers", None, None)
        assert [k for k in kinds(after.graph_signature) if k != numbers] == kinds(functional(name).graph_signature)
        assert after.call_spec == before.call_spec
        assert {str(k): str(v) for k, v in after.range_constraints.items()} == {
            str(k): str(v) for k, v in before.range_constraints.items()
        }
        assert list(after.module().state_dict()) == list(before.module().state_dict())
        assert [n for n, _ in after.module().named_parameters()] == [n for n, _ in before.module().named_parameters()]
        for fqn, value in before.state_dict.items():
            other = after.state_dict[fqn]
            assert (other.dtype, other.requires_grad, type(other)) == (value.dtype, value.requires_grad, type(value))


def test_these_cases_have_what_could_be_lost() -> None:
    before = exported("counting")
    assert {value.requires_grad for value in before.state_dict.values()} == {True, False}
    assert {value.dtype for value in before.state_dict.values()} == {torch.float32, torch.int64}
    assert set(before.constants) == {"scale"}  # not persistent, so not in the state_dict
    assert len(exported("odd_dynamic").range_constraints) == 1


@pytest.mark.slow
def test_a_buffer_keeps_its_shard_from_call_to_call() -> None:
    """Three calls: each rank's columns of the cache, and the count, are those of the single device after three calls."""
    model = randomise(Counting())
    program = tpcompiler.parallelize(torch.export.export(copy.deepcopy(model), (torch.randn(3, 4),)), 2, CACHE)
    assert placed_shardings(program.only.manifest)["seen"].text(program.mesh) == "S(1)"
    programs = [program.rank_program(rank) for rank in range(2)]
    for call in range(1, 4):
        x = torch.randn(3, 4)
        want = model(x)
        for after, result in zip(programs, simulate(programs, [[x], [x]]), strict=True):
            torch.testing.assert_close(result.outputs[0], want)
            after.state_dict.update(result.mutated)
        held = [after.state_dict["seen"] for after in programs]
        assert [tuple(value.shape) for value in held] == [(3, 3), (3, 3)]
        torch.testing.assert_close(torch.cat(held, 1), model.get_buffer("seen"))
        assert [int(after.state_dict["calls"]) for after in programs] == [call, call]


def digest(program: ExportedProgram) -> str:
    file = io.BytesIO()
    torch.export.save(program, file)
    return hashlib.sha256(file.getvalue()).hexdigest()


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("dims", [None, LLAMA.dims], ids=["static", "dynamic"])
def test_the_original_is_not_changed(dims: object) -> None:
    """The same bytes when it is saved before and after; and its shape environment learnt nothing."""
    program = torch.export.export(LLAMA.build(), (), LLAMA.inputs(2, 12), dynamic_shapes=dims)  # type: ignore[arg-type]
    before = digest(program)
    made = tpcompiler.parallelize(program, 2, LLAMA.plan)
    assert made.verify((), LLAMA.inputs(2, 12)).ok
    made.rank_program(1).module()
    assert digest(program) == before
    next(iter(program.state_dict.values())).data[0, 0] += 1  # negative control
    assert digest(program) != before


@pytest.mark.slow
def test_replicas_share_memory_with_the_original_and_shards_do_not() -> None:
    before, (first, second) = exported("odd"), ranks("odd", 2)

    def place(program: ExportedProgram, fqn: str) -> int:
        return program.state_dict[fqn].untyped_storage().data_ptr()

    whole, cut = "norm.weight", "head.weight"
    assert place(first, whole) == place(second, whole) == place(before, whole)
    assert len({place(first, cut), place(second, cut), place(before, cut)}) == 3
    shard = first.state_dict[cut]
    assert shard.untyped_storage().nbytes() == shard.nbytes < before.state_dict[cut].nbytes  # the whole is let go


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "shape"), [("llama", (3, 12)), ("llama_dynamic", (2, 513))])
@pytest.mark.parametrize("guards", [True, False])
def test_sizes_that_the_original_refuses_are_refused(name: str, shape: tuple[int, int], guards: bool) -> None:
    """With the same words, by the guards of `module()` and by the shorter checks of `module(check_guards=False)`."""
    said = []
    for program in (exported(name), *ranks(name, 2)):
        with pytest.raises((AssertionError, RuntimeError)) as raised:
            program.module(check_guards=guards)(input_ids=torch.zeros(shape, dtype=torch.int64))
        said.append(str(raised.value))
    assert len(set(said)) == 1
    assert "input_ids" in said[0]
