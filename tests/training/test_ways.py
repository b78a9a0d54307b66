"""Ways people train, on gloo processes from files: each is as on the single device."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import tpcompiler
from tests.launch import run_ranks
from tests.passes.stages import Call
from tests.training.test_gradients import ROWS
from tests.training.test_steps import Grouped
from tests.training.test_steps import group_of_one as group_of_one
from tests.training.ways import master_weights, momentum, overflowing, scaled, step
from tpcompiler.checkpoint.distributed import _make_state
from tpcompiler.checkpoint.restrictions import forbid_on_shares
from tpcompiler.checkpoint.training import _trained_outputs
from tpcompiler.errors import ArtifactError, InputsError, UnsupportedError
from tpcompiler.ir.shares import cut, row_sharding

PLAN = {"up": "colwise", "down": "rowwise"}
WORKER = Path(__file__).parent / "ways_worker.py"


def network() -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), x.flip(-1))

    torch.manual_seed(0)
    return Call(forward, up=nn.Linear(8, 16), down=nn.Linear(16, 8)).double()


def batches() -> torch.Tensor:
    return torch.randn(4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def saved(folder: Path, mesh: dict[str, int], dtype: torch.dtype = torch.float64) -> Any:
    program = tpcompiler.export_training(network().to(dtype), (batches()[0].to(dtype),))
    plan, inputs = (PLAN if "tp" in mesh else {}), ([ROWS] if "dp" in mesh else None)
    made = tpcompiler.parallelize(program, mesh, plan, inputs=inputs)
    made.save(folder)
    return made


def assert_shares(made: Any, shares: Any, whole: dict[str, torch.Tensor], within: float) -> None:
    for rank, own in enumerate(shares):
        wanted = {
            row.name: cut(whole[row.name].detach(), row_sharding(row, made.mesh), made.mesh, rank)
            for row in made.manifest().tensors
            if row.name in whole
        }
        torch.testing.assert_close(own, wanted, rtol=within, atol=within)


@pytest.mark.slow
def test_optimizers_schedules_scales_and_sums(tmp_path: Path) -> None:
    """SGD with momentum on a schedule, a scale that overflows, sums left out of one backward, float32 masters."""
    made = {
        "tp": saved(tmp_path / "tp", {"tp": 2}),
        "dp": saved(tmp_path / "dp", {"dp": 2}),
        "f32": saved(tmp_path / "f32", {"tp": 2}, torch.float32),
        "bf16": saved(tmp_path / "bf16", {"tp": 2}, torch.bfloat16),
    }
    torch.save(batches(), tmp_path / "batches")
    ways = ["tp_momentum", "f32_scaled", "dp_sums", "bf16"]
    run_ranks(2, WORKER, tmp_path, *ways)
    got = {way: [torch.load(tmp_path / f"{way}.{rank}") for rank in range(2)] for way in ways}

    model = network()
    losses = momentum(model, batches())
    for own in got["tp_momentum"]:
        torch.testing.assert_close(own["losses"], losses, rtol=1e-12, atol=1e-12)
    assert_shares(made["tp"], [own["parameters"] for own in got["tp_momentum"]], dict(model.named_parameters()), 1e-12)

    model = network().float()
    scales = scaled(model, overflowing(batches()), torch.amp.GradScaler("cpu", init_scale=2.0**110))
    assert scales == [2.0**110, *[2.0**109] * 3]
    assert [own["scales"] for own in got["f32_scaled"]] == [scales] * 2
    assert_shares(made["f32"], [own["parameters"] for own in got["f32_scaled"]], dict(model.named_parameters()), 1e-5)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one, two in batches().view(-1, 2, 8, 8):
        optimizer.zero_grad()
        (model(one) + model(two)).backward()
        optimizer.step()
    assert_shares(made["dp"], [own["parameters"] for own in got["dp_sums"]], dict(model.named_parameters()), 1e-12)

    model = network().bfloat16()
    start, masters = copy.deepcopy(dict(model.named_parameters())), master_weights(model, batches())
    assert_shares(made["bf16"], [own["master"] for own in got["bf16"]], masters, 1e-3)  # a step is of 1e-3
    assert all((masters[name] - start[name].float()).abs().max() > 3e-3 for name in masters)


@pytest.mark.slow
def test_written_by_four_ranks_and_read_by_two(tmp_path: Path) -> None:
    """Two steps of AdamW on 2 x 2 ranks, two more on 2: the bits that were written, and the losses of one device."""
    four, two = saved(tmp_path / "four", {"dp": 2, "tp": 2}), saved(tmp_path / "tp", {"tp": 2})
    torch.save(batches(), tmp_path / "batches")
    run_ranks(4, WORKER, tmp_path, "four_write")
    run_ranks(2, WORKER, tmp_path, "tp_resume")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, x) for x in batches()]
    written = [torch.load(tmp_path / f"four_write.{rank}") for rank in range(4)]
    read = [torch.load(tmp_path / f"tp_resume.{rank}") for rank in range(2)]
    for first in (0, 2):  # of each half of the samples
        for rank in range(2):
            torch.testing.assert_close(read[rank]["read"], written[first + rank]["parameters"], rtol=0, atol=0)
    for own in written:
        torch.testing.assert_close(own["losses"], losses[:2], rtol=1e-12, atol=1e-12)
    for own in read:
        torch.testing.assert_close(own["losses"], losses[2:], rtol=1e-12, atol=1e-12)
    assert_shares(two, [own["parameters"] for own in read], dict(model.named_parameters()), 1e-12)
    assert four.world_size == 4


@pytest.mark.slow
def test_a_packed_matrix_is_written_by_three_ranks_and_read_by_two(tmp_path: Path) -> None:
    """Unequal shares of queries next to keys and values that all ranks hold, with the optimizer's state."""
    torch.manual_seed(0)
    model = Grouped().double()
    model.qkv = nn.Linear(8, 24, bias=False, dtype=torch.float64)  # AdamW would follow the noise of keys' biases
    program = tpcompiler.export_training(model, (batches()[0][None],))
    plan = {"qkv": "colwise", "out": "rowwise"}
    made = {}
    for name, mesh in {"three": {"tp": [2, 1, 1]}, "two": {"tp": 2}, "one": {"tp": 1}}.items():
        made[name] = tpcompiler.parallelize(program, mesh, plan)
        made[name].save(tmp_path / name)
    assert "parts" in str(next(row.sharding for row in made["three"].manifest().tensors if row.name == "qkv.weight"))
    torch.save(batches()[:, None], tmp_path / "batches")
    run_ranks(3, WORKER, tmp_path, "three_write")
    run_ranks(2, WORKER, tmp_path, "two_resume")
    run_ranks(1, WORKER, tmp_path, "one_resume")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, x) for x in batches()[:, None]]
    for name in ("two", "one"):
        read = [torch.load(tmp_path / f"{name}_resume.{rank}") for rank in range(made[name].world_size)]
        for own in read:
            torch.testing.assert_close(own["losses"], losses[2:], rtol=1e-12, atol=1e-12)
        assert_shares(made[name], [own["parameters"] for own in read], dict(model.named_parameters()), 1e-12)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda values: torch.optim.AdamW(values, lr=0.1, weight_decay=0.5),
    "adam": lambda values: torch.optim.Adam(values, lr=0.1, weight_decay=0.5),
    "decay": lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9, weight_decay=0.5),
    "dampening": lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9, dampening=0.5),
    "nadam": lambda values: torch.optim.NAdam(values, lr=0.1),
    "asgd": lambda values: torch.optim.ASGD(values, lr=0.1),
    "rprop": lambda values: torch.optim.Rprop(values, lr=0.1),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_is_read_before_the_first_step(name: str, tmp_path: Path, group_of_one: None) -> None:
    """Of one before the first step, and one behind two; a layer is frozen, and another has no gradient."""
    model = Call(
        lambda self, x: self.o(torch.relu(self.f(self.i(x)))).square().mean(),
        **{each: nn.Linear(8, 8) for each in ("i", "f", "o", "unused")},
    )
    model.f.requires_grad_(False)  # type: ignore[union-attr]
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    tpcompiler.parallelize(tpcompiler.export_training(model, (x,)), 1, {}).save(tmp_path / "out")

    def begin(saved: str = "") -> tuple[Any, Any]:
        module = tpcompiler.load(tmp_path / "out", training=True)
        optimizer = OPTIMIZERS[name](module.parameters())
        if saved:
            dcp.load(module.distributed_state(optimizer), checkpoint_id=tmp_path / saved)
        return module, optimizer

    module, optimizer = begin()
    dcp.save(module.distributed_state(optimizer), checkpoint_id=tmp_path / "0")
    for _ in range(2):
        step(module, optimizer, x)
    dcp.save(module.distributed_state(optimizer), checkpoint_id=tmp_path / "2")
    results = []
    for saved, steps in (("", 4), ("0", 4), ("2", 2)):
        module, optimizer = begin(saved)
        for _ in range(steps):
            step(module, optimizer, x)
        results.append({key: value.detach() for key, value in module.named_parameters()})
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


class Counting(torch.optim.Optimizer):
    """Gradient descent with a count of its steps, in the state of each parameter or in its groups, and no "lr"."""

    def __init__(self, values: Any, in_group: bool) -> None:
        super().__init__(values, {"rate": 0.1, **({"steps": 0} if in_group else {})})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "steps" in group:
                group["steps"] += 1
            for value in (each for each in group["params"] if each.grad is not None):
                own = self.state[value]
                own.setdefault("mean", torch.zeros_like(value)).lerp_(value.grad, 0.1)
                if "steps" not in group:
                    own["steps"] = own.get("steps", 0) + 1
                value.sub_(group["rate"] * own["mean"] / (group.get("steps", 0) + 1))


def late_group(module: Any) -> Any:
    optimizer = torch.optim.Adam(module.up.parameters())
    module(batches()[0]).backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(module.down.parameters())})
    return optimizer


NO_STATE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number of a parameter": (
        lambda module: Counting(module.parameters(), False),
        "Counting keeps 'up.weight.steps' as a Python int",
    ),
    "a closure": (lambda module: torch.optim.LBFGS(module.parameters()), "LBFGS takes a function in each step"),
    "another parameter": (
        lambda module: torch.optim.SGD([*module.parameters(), nn.Parameter(torch.ones(3))]),
        "has a tensor [3] that is no parameter of the module",
    ),
    "a group that came late": (late_group, "has no state of 'down.weight' yet, and has state of 'up.weight'"),
}


def test_state_that_a_checkpoint_cannot_hold(tmp_path: Path, group_of_one: None) -> None:
    saved(tmp_path / "out", {"tp": 1})
    for make, message in NO_STATE.values():
        module = tpcompiler.load(tmp_path / "out", training=True)
        optimizer = make(module)
        before = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
        with pytest.raises(ArtifactError, match=re.escape(message)):
            module.distributed_state(optimizer)
        after = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
        assert after == before


def test_optimizers_that_need_whole_parameters(tmp_path: Path) -> None:
    """With shares, ranks of LBFGS even call their closures more or less often than others, and wait for each other."""
    module = network()
    forbid_on_shares(module, saved(tmp_path / "tp", {"tp": 2}).manifest())
    whole, parameters = network(), list(module.parameters())
    forbid_on_shares(whole, saved(tmp_path / "dp", {"dp": 2}).manifest())

    def closure(module: Any = module) -> Any:
        loss = module(batches()[0])
        loss.backward()
        return loss

    closure()
    closure(whole)
    message = "LBFGS steps by products of all gradients, and each rank holds a share of 'up.weight'"
    with pytest.raises(UnsupportedError, match=message):
        torch.optim.LBFGS(parameters).step(closure)
    with pytest.raises(UnsupportedError, match=r"Adafactor steps by means of rows and columns, .* 'up.weight'"):
        torch.optim.Adafactor(parameters).step()
    torch.optim.AdamW(parameters).step()
    torch.optim.Adafactor([module.down.bias]).step()  # all ranks have it
    torch.optim.LBFGS(whole.parameters()).step(lambda: closure(whole))


def test_hooks_of_steps_see_no_step_that_makes_state() -> None:
    value, seen = nn.Parameter(torch.ones(3)), list[str]()
    optimizer = torch.optim.Adam([value])
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    _make_state(optimizer, [value])
    assert not seen
    optimizer.step()
    assert seen == ["before", "after"]


def test_outputs_that_depend_on_no_parameter(tmp_path: Path, group_of_one: None) -> None:
    def forward(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.tanh(self.a(x)).square().mean(), "x": x, "half": x.abs() / 2}

    model, x = Call(forward, a=nn.Linear(8, 8)), torch.randn(4, 8)
    tpcompiler.parallelize(tpcompiler.export_training(model, (x,), loss="loss"), 1, {}).save(tmp_path / "out")
    module: Any = tpcompiler.load(tmp_path / "out", training=True)
    for each in (model, module):
        made = each(x)
        assert [value.requires_grad for value in made.values()] == [True, False, False]
        (made["loss"] * made["half"].mean() / made["x"].square().mean()).backward()
    torch.testing.assert_close(module.a.weight.grad, model.a.weight.grad)  # type: ignore[union-attr]


@pytest.mark.slow
def test_outputs_require_a_gradient_where_the_module_s_do(tmp_path: Path, group_of_one: None) -> None:
    def forward(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(x)
        with torch.no_grad():
            score = (self.b(h.relu()) * 2).sum(0)
        y = self.b(torch.relu(h)) + self.seen
        self.seen.copy_(score.detach())
        detached = h.detach()
        partly = detached * 3 + y
        values = {"h": detached, "score": score, "y": y, "sum": (detached * 2).sum(0), "partly": partly}
        return {"loss": y.square().mean(), **values, "positive": (h > 0).float(), "frozen": self.c(x), "same": y}

    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8).requires_grad_(False)}
    model, x = Call(forward, **parts), torch.randn(4, 8)
    model.register_buffer("seen", torch.zeros(8))
    program = tpcompiler.export_training(model, (x,), loss="loss")
    wanted = [value.requires_grad for value in model(x).values()]
    assert wanted == [True, False, False, True, False, True, False, False, True]
    made = tpcompiler.parallelize(program, 2, {"a": "colwise", "b": "rowwise"})
    assert made.verify((x,)).ok
    for rank in (0, 1):
        assert [*map(bool, _trained_outputs(made.rank_program(rank)))][1 : len(wanted)] == wanted[1:]
    tpcompiler.parallelize(program, 1, {}).save(tmp_path / "out")
    module: Any = tpcompiler.load(tmp_path / "out", training=True)
    outputs = module(x)
    assert [value.requires_grad for value in outputs.values()] == wanted
    (outputs["loss"] * outputs["h"].mean()).backward()  # a detached value may weigh the loss
    with pytest.raises(RuntimeError, match="output 'partly' has no gradient"):
        module(x)["partly"].sum().backward()


def test_a_parameter_that_was_frozen_at_export_stays_so(tmp_path: Path, group_of_one: None) -> None:
    model = network()
    model.down.requires_grad_(False)  # type: ignore[union-attr]
    x = batches()[0]
    tpcompiler.parallelize(tpcompiler.export_training(model, (x,)), 1, {}).save(tmp_path / "out")
    module: Any = tpcompiler.load(tmp_path / "out", training=True)
    module(x).backward()
    assert module.down.weight.grad is None
    module.up.bias.requires_grad_(False)  # the other way has its effect
    module.zero_grad()
    module(x).backward()
    assert module.up.bias.grad is None
    module.down.weight.requires_grad_()
    with pytest.raises(InputsError, match=r"parameter 'down\.weight' requires a gradient, and the program has none"):
        module(x)
    with torch.no_grad():
        module(x)


def test_a_loaded_module_is_not_copied_and_has_the_dtypes_of_its_export(tmp_path: Path, group_of_one: None) -> None:
    saved(tmp_path / "out", {"tp": 1})
    module: Any = tpcompiler.load(tmp_path / "out", training=True)
    with pytest.raises(UnsupportedError, match="a module loaded for training cannot be copied"):
        torch.optim.swa_utils.AveragedModel(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(UnsupportedError, match=r"torch\.autocast is on"):
            module(batches()[0])
        with torch.autocast("cpu", enabled=False):
            loss = module(batches()[0])
        loss.backward()
    model = network()
    model(batches()[0]).backward()
    torch.testing.assert_close(module.up.weight.grad, model.up.weight.grad)


def test_a_program_exported_under_autocast() -> None:
    """The second draw does not read casts of the parameters before it."""
    model, x = network().float(), batches()[0].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = tpcompiler.export_training(model, (x,))
        model(x).backward()
    got = program.module(check_guards=False)(x)["gradients"]["up.weight"]
    torch.testing.assert_close(got, model.up.weight.grad, rtol=2e-2, atol=1e-4)


def test_norms_and_wrong_arguments(tmp_path: Path, group_of_one: None) -> None:
    saved(tmp_path / "out", {"tp": 1})
    module: Any = tpcompiler.load(tmp_path / "out", training=True)
    model = network()
    for power in (2.0, 1.0, 3.0, float("inf"), "inf"):
        norms = []
        for each in (model, module):
            each.zero_grad()
            each(batches()[0]).backward()
            if each is model:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, float(power), foreach=True))
            else:
                norms.append(module.clip_grad_norm_(0.01, norm_type=power, error_if_nonfinite=True, foreach=True))
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(module.up.weight.grad, model.up.weight.grad, rtol=1e-12, atol=0)
    module.up.bias.grad.fill_(float("inf"))
    with pytest.raises(RuntimeError, match="is inf, so it cannot be clipped"):
        module.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(InputsError, match="the norm 0 is not positive"):
        module.clip_grad_norm_(1.0, 0)
