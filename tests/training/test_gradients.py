"""Programs of a loss and its gradients: they are those of autograd, on one device and on all ranks together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind

import tpcompiler
from tests.trust.damage import Artifact
from tests.zoo.faults import collectives_of, without_collective
from tpcompiler.errors import UnsupportedError
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.parallel.program_subject import compared_calls, subject_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import SINGLE

IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))
ROWS = {"dp": "S(0)"}
PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return made


class Images(nn.Module):
    """Convolutions with groups, statistics that are written, a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=4)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        made: torch.Tensor = self.head(self.second(x).mean((2, 3)))
        return made


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale, self.unused = nn.Embedding(32, 8), nn.Parameter(torch.randn(8)), nn.Linear(2, 2)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.scale.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.embed(ids) * self.scale)
        return made


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    return model


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def squares(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, labels)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any]] = {  # model, inputs, loss function, targets
    "mlp": (Mlp, (torch.randn(4, 8),), squares, {"labels": torch.randn(4, 8)}),
    "images": (Images, (torch.randn(4, 3, 10, 10),), cross_entropy, {"labels": torch.tensor([0, 3, 1, 4])}),
    "tied": (Tied, (IDS,), cross_entropy, {"labels": IDS}),
    "llama": (llama, (), None, {"input_ids": IDS, "labels": IDS}),
}


@cache
def built(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, ExportedProgram, tuple[Any, ...], Any]:
    """A model with random weights in training mode, its program with gradients, and the arguments of a call.

    Who changes the model or the state of the program takes a dtype that no other test does.
    """
    torch.manual_seed(0)
    make, args, loss, named = CASES[name]
    cast = lambda each: each.to(dtype) if each.is_floating_point() else each  # noqa: E731
    model, args = make().to(dtype).train(), tuple(map(cast, args))
    named = {key: cast(value) for key, value in named.items()}
    if loss is None:
        return model, tpcompiler.export_training(model, args, named), args, named
    return model, tpcompiler.export_training(model, args, loss=loss, targets=named), args, named


def with_own_samples(mesh: dict[str, int], plan: dict[str, str]) -> tpcompiler.ParallelProgram:
    """The Llama, of which each rank along dp takes its own samples and returns their logits."""
    _, program, _, named = built("llama")
    inputs, outputs = dict.fromkeys(named, ROWS), {"outputs.logits": ROWS}
    return tpcompiler.parallelize(program, mesh, plan, inputs=inputs, outputs=outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_what_autograd_makes(name: str) -> None:
    model, program, args, named = built(name, torch.float64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    module = program.module(check_guards=False)
    got = module(*args, **named)
    loss_function = CASES[name][2]
    loss = model(**named).loss if loss_function is None else loss_function(model(*args), **named)
    loss.backward()
    torch.testing.assert_close(got["outputs"]["loss"], loss)
    wanted = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    torch.testing.assert_close(got["gradients"], wanted)
    after = {key: value for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert bool(after) == (name == "images")
    torch.testing.assert_close({key: module.state_dict()[key] for key in after}, after)


def collectives(made: tpcompiler.ParallelProgram) -> Counter[tuple[str, str, str]]:
    return Counter((each.kind, each.axis, each.why) for each in made.collectives())


@pytest.mark.slow
def test_megatron_s_collectives() -> None:
    """Two all_reduce a layer forward, two backward; one for the embedding, one for the gradient of the head's input.

    The loss is of whole logits: with `lm_head` cut, they are gathered (`gather_output`), 4 x 6 x 64 floats.
    """
    _, program, args, named = built("llama")
    made = tpcompiler.parallelize(program, 2, {**PLAN, "lm_head": "colwise_gather_output"}, machine="ideal")
    assert collectives(made) == {
        ("all_reduce", "tp", "inherent"): 2 * (2 + 2) + 1 + 1,
        ("all_gather", "tp", "plan-demanded"): 1,
    }
    sums, gathered = 4 * 6 * 32 * 4, 4 * 6 * 64 * 4
    assert sum(each.wire_bytes for each in made.collectives()) == 10 * sums + gathered // 2
    assert made.verify(args, named).ok


@pytest.mark.slow
def test_sums_over_samples() -> None:
    """The example's ids are smaller than all gradients, and are not gathered to save their sums, which are in one."""
    model, program, args, named = built("llama")
    made = tpcompiler.parallelize(program, {"dp": 2}, {}, inputs=dict.fromkeys(named, ROWS))
    of_the_loss = 2  # the sum, and how many labels count
    assert collectives(made) == {
        ("all_reduce", "dp", "inherent"): 1 + of_the_loss,
        ("all_gather", "dp", "plan-demanded"): 1,  # the logits, which are asked for whole
    }
    parameters = sum(each.numel() * 4 for each in model.parameters())
    assert max(each.payload_bytes for each in made.collectives() if each.kind == "all_reduce") == parameters
    assert made.verify(args, named).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_all_ranks_together(name: str, mesh: dict[str, int]) -> None:
    plans: dict[str, dict[str, str]] = {
        "mlp": {"gate": "colwise", "up": "colwise", "down": "rowwise"},
        "images": {"first": "colwise", "second": "S(0)", "head": "rowwise"},
        "tied": {"embed": "embedding_rowwise"},
        "llama": PLAN,
    }
    _, program, args, named = built(name)
    places = [node.name for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    inputs = dict.fromkeys(places, ROWS) if "dp" in mesh else {}
    made = tpcompiler.parallelize(program, mesh, plans[name] if "tp" in mesh else {}, inputs=inputs)
    call = [(SINGLE, args, named)]
    subject = subject_of(made.only)
    assert compared_calls({SINGLE: subject}, call).ok
    for each in collectives_of(subject.programs[0]):
        damaged = [without_collective(rank, each) for rank in subject.programs]
        assert not compared_calls({SINGLE: replace(subject, programs=damaged)}, call).ok, each


class Dropped(nn.Module):
    """Dropout in layers and in attention, under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = self.qkv(x).view(4, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
            made: torch.Tensor = self.out(F.dropout(y.transpose(1, 2).reshape(4, 6, 8), 0.3, self.training))
            return made.float() + x


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}], ids=str)
def test_random_numbers_and_narrow_floats(mesh: dict[str, int]) -> None:
    """All ranks drop what the single device drops, and autograd with the same seed."""
    torch.manual_seed(0)
    model, x, labels = Dropped().train(), torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    program = tpcompiler.export_training(model, (x,), loss=squares, targets={"labels": labels})
    torch.manual_seed(1)
    got = program.module(check_guards=False)(x, labels=labels)["gradients"]
    torch.manual_seed(1)
    squares(model(x), labels).backward()
    torch.testing.assert_close(got, {name: value.grad for name, value in model.named_parameters()})
    inputs = {"x": ROWS, "labels": ROWS} if "dp" in mesh else {}
    made = tpcompiler.parallelize(program, mesh, {"out": "rowwise"} if "tp" in mesh else {}, inputs=inputs)
    assert made.verify((x,), {"labels": labels}).ok
    torch.manual_seed(2)
    assert not torch.equal(
        program.module(check_guards=False)(x, labels=labels)["gradients"]["out.bias"], got["out.bias"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("without_weights", [False, True])
def test_any_number_of_samples_and_tokens(without_weights: bool) -> None:
    """Exported with dynamic sizes; with weights compared at sizes that the export has not seen."""
    shape = {0: Dim("samples"), 1: Dim("length", max=64)}
    sizes = {"input_ids": shape, "labels": shape}
    with tpcompiler.weightless() if without_weights else nullcontext():
        example = dict.fromkeys(sizes, IDS)
        program = tpcompiler.export_training(llama().train(), kwargs=example, dynamic_shapes=sizes)
    outputs = {"outputs.logits": ROWS}
    made = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, PLAN, inputs=dict.fromkeys(sizes, ROWS), outputs=outputs)
    assert collectives(made) == {
        ("all_reduce", "dp", "inherent"): 1 + 2,
        ("all_reduce", "tp", "inherent"): 2 * (2 + 2) + 1,
    }
    for own in () if without_weights else ((4, 6), (2, 9)):
        ids = torch.randint(0, 64, own)
        assert made.verify(kwargs={"input_ids": ids, "labels": ids}).ok


def swapped(made: tpcompiler.ParallelProgram, first: str, second: str) -> list[str]:
    """What the check says of programs that return two gradients under each other's name."""
    artifact = Artifact.of(made)
    for program in artifact.ranks:
        specs = program.graph_signature.output_specs
        kinds = OutputKind.GRADIENT_TO_PARAMETER
        at = [next(i for i, s in enumerate(specs) if s.kind is kinds and s.target == name) for name in (first, second)]
        values: Any = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        values[at[0]], values[at[1]] = values[at[1]], values[at[0]]
        program.graph.output_node().args = (tuple(values),)
    return check_programs(artifact.written(), artifact.manifest, model=canonicalize(made.only.original())).findings


def test_gradients_of_other_parameters_are_refused() -> None:
    made = tpcompiler.parallelize(built("mlp")[1], 2, {"gate": "colwise", "up": "colwise", "down": "rowwise"})
    assert swapped(made, "gate.weight", "gate.weight") == []
    assert swapped(made, "gate.weight", "down.weight")  # cut otherwise
    assert swapped(made, "gate.weight", "up.weight")  # cut alike


def test_hooks_of_a_model_with_a_loss_function() -> None:
    """They would get the targets, and the loss in place of the output; those of layers are in the program."""
    x = torch.randn(4, 8)
    for register in (
        lambda model: model.register_forward_hook(lambda module, given, made: 3 * made),
        lambda model: model.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True),
    ):
        model = Mlp()
        register(model)
        with pytest.raises(UnsupportedError, match="a hook would see them"):
            tpcompiler.export_training(model, (x,), loss=squares, targets={"labels": x})
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, given, made: 3 * made)
    model.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    program = tpcompiler.export_training(model, (x,), loss=squares, targets={"labels": x})
    got = program.module(check_guards=False)(x, labels=x)["outputs"]["loss"]
    torch.testing.assert_close(got, squares(model(x), x))


class Heads(nn.Module):
    """Linear attention puts an activation between heads and a product."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(8, 8), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.a(x).view(2, 3, 4, 2).transpose(1, 2)
        return (self.act(heads) @ torch.ones(2, 2)).square().mean()


@pytest.mark.parametrize("act", [F.elu, F.softplus, F.hardswish, F.hardtanh, F.hardsigmoid, F.logsigmoid])
def test_gradients_whose_kernels_lay_them_out_as_no_trace_says(act: Any) -> None:
    program = tpcompiler.export_training(Heads(act), (torch.randn(2, 3, 8),))
    assert tpcompiler.parallelize(program, 2, {"a": "colwise"}).verify((torch.randn(2, 3, 8),)).ok
