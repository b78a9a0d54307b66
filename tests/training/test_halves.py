"""Forward and backward as two programs: the same numbers and collectives, fewer bytes in between."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

import tpcompiler
from tests.launch import run_ranks
from tests.passes.stages import Call
from tests.training.test_gradients import PLAN, Images, cross_entropy, with_own_samples
from tests.training.test_steps import group_of_one as group_of_one
from tpcompiler.checkpoint.halves import Halves
from tpcompiler.errors import InputsError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.shares import cut, row_sharding

HOW = ["min-cut", "all", "none"]


def network(width: int = 32) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            x = torch.sigmoid(h) * torch.tanh(h) * torch.exp(-h * h) + x
        return x.square().mean()

    return Call(forward, layers=layers).double()


def loaded(folder: Path, model: nn.Module, *args: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
    """One rank's module in a world of one, recomputing in each way."""
    tpcompiler.parallelize(tpcompiler.export_training(model, args, **kwargs), 1, {}).save(folder / "out")
    return {how: tpcompiler.load(folder / "out", training=True, recompute=how) for how in HOW}  # type: ignore[arg-type]


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: each.grad for name, each in module.named_parameters()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("rest", [{}, {"**": "shard_at_rest(dp)"}], ids=["whole over dp", "in shards"])
def test_no_collective_twice(rest: dict[str, str]) -> None:
    """Each half has its own, in their order; what it saves is least if everything is recomputed."""
    rank = with_own_samples({"dp": 2, "tp": 2}, {**PLAN, **rest}).rank_program(0)
    sent = [str(node.args) for node in rank.graph.nodes if edit.is_collective(node)]
    saved = {}
    for how in HOW:
        halves = Halves(rank, how)  # type: ignore[arg-type]
        each = [
            [node for node in half.graph.nodes if edit.is_collective(node)]
            for half in (halves.forward, halves.backward)
        ]
        kinds = [Counter((node.target, node.args[-1]) for node in own) for own in (*each, each[0] + each[1])]
        assert kinds[2] == Counter((n.target, n.args[-1]) for n in rank.graph.nodes if edit.is_collective(n))
        gathers = 2 * 9 + 3 if rest else 0
        assert len(each[0]) == gathers + 2 * 2 + 1 + 2  # Megatron's, the embedding's, and the loss'
        assert len(each[1]) == (gathers - 1 + gathers if rest else 1) + 2 * 2
        assert all(len(edit.waits_of(node)) for own in each for node in own)
        saved[how] = halves.saved_bytes
        backward = halves.without_sums(dict.fromkeys(halves.last_sums, 2))
        left = [node for node in backward.graph.nodes if edit.is_collective(node) and ":dp" in str(node.args[-1])]
        assert len(left) == (gathers - 1 + gathers if rest else 0)  # a reduce_scatter leaves a share, and is made
    assert len(sent) == len(each[0]) + len(each[1])
    assert saved["min-cut"] < saved["none"]
    assert rest or saved["all"] < saved["min-cut"]  # of gathered parameters the products are saved, not these


@pytest.mark.slow
def test_a_rank_without_samples_has_the_collectives_of_the_others(tmp_path: Path) -> None:
    """4 samples over 3 ranks are 2, 2 and 0, and a convolution of none uses no weight: its gather stays in the forward."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv(self.up(x).transpose(1, 2)))
        return self.down(F.avg_pool1d(y, 2).transpose(1, 2)).square().mean()

    torch.manual_seed(0)
    model = Call(forward, up=nn.Linear(6, 6), conv=nn.Conv1d(6, 6, 3, padding=1), down=nn.Linear(6, 6)).double()
    x = torch.randn(4, 4, 6, dtype=torch.float64)
    program = tpcompiler.parallelize(
        tpcompiler.export_training(model, (x,)), {"dp": 3}, {"**": "shard_at_rest(dp)"}, inputs=[{"dp": "S(0)"}]
    )
    ranks = [program.only.rank_program(rank) for rank in range(3)]
    for how in HOW:
        first, *others = [Halves(rank, how).collectives for rank in ranks]  # type: ignore[arg-type]
        assert others == [first, first]
        assert sum(map(len, first)) == sum(map(edit.is_collective, ranks[0].graph.nodes))
    program.save(tmp_path / "out")
    torch.save([x[:2], x[2:], x[4:]], tmp_path / "shares")
    script = tmp_path / "step.py"
    script.write_text(
        "import sys, torch, tpcompiler, torch.distributed as dist\n"
        "module = tpcompiler.load(sys.argv[1] + '/out', training=True)\n"
        "loss = module(torch.load(sys.argv[1] + '/shares')[dist.get_rank()])\n"
        "loss.backward()\n"
        "norms = torch.stack([module.clip_grad_norm_(1e9, power) for power in (2.0, 1, 'inf')])\n"
        "made = loss.detach(), norms, {name: v.grad for name, v in module.named_parameters()}\n"
        "torch.save(made, f'{sys.argv[1]}/{dist.get_rank()}.made')\n"
        "dist.destroy_process_group()\n"
    )
    run_ranks(3, script, tmp_path)
    wanted = model(x)
    wanted.backward()
    powers: Any = (2.0, 1.0, float("inf"))
    norms = torch.stack([torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, power) for power in powers])
    whole = gradients(model)
    for rank in range(3):
        loss, own_norms, own = torch.load(tmp_path / f"{rank}.made")
        torch.testing.assert_close((loss, own_norms), (wanted.detach(), norms), rtol=1e-12, atol=0)
        rows = {row.name: row_sharding(row, program.mesh) for row in program.manifest().tensors if row.name in whole}
        shares = {name: cut(whole[name], sharding, program.mesh, rank) for name, sharding in rows.items()}
        torch.testing.assert_close(own, shares, rtol=1e-11, atol=1e-14)


@pytest.mark.slow
def test_micro_batches_in_flight(tmp_path: Path, group_of_one: None) -> None:
    """Backwards in another order than the forwards; one that is scaled; a step in between is refused."""
    model, x = network(), torch.randn(2, 4, 32, dtype=torch.float64)
    (model(x[0]) + model(x[1]) * 3).backward()
    for module in loaded(tmp_path, model, x[0]).values():
        losses = [module(each) for each in x]
        (losses[1] * 3).backward()
        losses[0].backward()
        torch.testing.assert_close(gradients(module), gradients(model), rtol=1e-12, atol=1e-14)
        with pytest.raises(RuntimeError, match="had its backward before"):
            losses[0].backward()
        late = module(x[0])
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        with pytest.raises(RuntimeError, match="parameters have changed"):
            late.backward()


def test_values_that_change_before_the_backward(tmp_path: Path, group_of_one: None) -> None:
    """A loader may reuse its memory, and a caller may change an output: torch raises where a backward needs the value."""

    def forward(self: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
        y = torch.tanh(self.up(x) * self.scale)
        return {"loss": ((y - target) * target).sum(), "output": y}

    torch.manual_seed(0)
    parts = {"up": nn.Linear(8, 8), "scale": torch.rand(8) + 1}
    model, args = Call(forward, **parts).double(), torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    modules = loaded(tmp_path, model, *args, loss="loss")
    changes: dict[str, Callable[[Any, Any, Any], Any]] = {
        "x": lambda own, given, made: given[0].zero_(),
        "target": lambda own, given, made: given[1].zero_(),
        "scale": lambda own, given, made: own.get_buffer("scale").zero_(),
        "output": lambda own, given, made: made["output"].zero_(),
    }
    for how, module in modules.items():
        for name, change in changes.items():
            for own in (model, module):
                given = [each.clone() for each in args]
                made = own(*given)
                with torch.no_grad():
                    change(own, given, made)
                if own is module and name == "output" and how != "none":
                    continue  # the backward may compute it again
                with pytest.raises(RuntimeError, match=r"in.?place"):
                    made["loss"].backward()
                own.get_buffer("scale").copy_(parts["scale"])
        given = [each.clone() for each in args]
        loss = module(*given)["loss"]
        loss.backward()
        given[0].zero_()  # as the next batch is read


def test_only_the_loss_has_a_backward(tmp_path: Path, group_of_one: None) -> None:
    """What comes before the module, or uses another output, would be trained without its part of the gradient."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        h = self.up(x)
        return {"loss": h.square().mean(), "aux": (h.abs().mean(), h.argmax()), "same": x}

    model, x = Call(forward, up=nn.Linear(8, 8)), torch.randn(4, 8)
    asks = x.clone().requires_grad_()
    for module in loaded(tmp_path, model, asks, loss="loss").values():
        with pytest.raises(InputsError, match="input 'x' requires a gradient"):
            module(asks)
        with torch.no_grad():
            assert not module(asks)["loss"].requires_grad
        made = module(x)
        assert not x.requires_grad
        made["aux"][0].mul_(2)
        with pytest.raises(RuntimeError, match=r"output 'aux\.0' has no gradient"):
            (made["loss"] + made["aux"][0]).backward()
        made, wanted = module(x), model(x)
        assert made["aux"][1].dtype == torch.int64
        model.zero_grad()
        module.zero_grad()
        (made["loss"] + made["aux"][0].detach()).backward()
        wanted["loss"].backward()
        torch.testing.assert_close(gradients(module), gradients(model))


def test_outputs_of_layers_of_which_some_are_frozen(tmp_path: Path, group_of_one: None) -> None:
    """An output asks for a gradient if one of its own parameters does, whichever comes first."""
    model = Call(
        lambda self, x: (lambda h: {"loss": self.down(h).square().mean(), "hidden": h})(torch.tanh(self.up(x))),
        up=nn.Linear(8, 8),
        down=nn.Linear(8, 8),
    )
    x = torch.randn(4, 8)
    module = loaded(tmp_path, model, x, loss="loss")["all"]
    for frozen in (["up.weight"], ["up.weight", "up.bias"], ["down.weight"]):
        for own in (model, module):
            for name, each in own.named_parameters():
                each.requires_grad_(name not in frozen)
        made, wanted = module(x), model(x)
        assert made["hidden"].requires_grad == wanted["hidden"].requires_grad
        if wanted["hidden"].requires_grad:
            with pytest.raises(RuntimeError, match="output 'hidden' has no gradient"):
                (made["loss"] + made["hidden"].sum()).backward()


def test_a_gradient_of_a_gradient_is_refused(tmp_path: Path, group_of_one: None) -> None:
    x = torch.randn(4, 32, dtype=torch.float64)
    module = loaded(tmp_path, Call(lambda self, x: self.up(x).square().mean(), up=nn.Linear(32, 8)).double(), x)["all"]
    with pytest.raises(RuntimeError, match="have no gradient themselves: call backward without create_graph=True"):
        torch.autograd.grad(module(x), list(module.parameters()), create_graph=True)


class _Live(TorchDispatchMode):
    """The most bytes of new values that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(made):
            if isinstance(each, torch.Tensor):
                memory = each.untyped_storage()
                if memory._cdata not in self.known:
                    self.known.add(memory._cdata)
                    self.now, self.most = self.now + memory.nbytes(), max(self.most, self.now + memory.nbytes())
                    weakref.finalize(memory, self._end, memory._cdata, memory.nbytes())
        return made

    def _end(self, memory: int, count: int) -> None:
        self.known.discard(memory)
        self.now -= count


def peak(step: Callable[[], Any]) -> int:
    with _Live() as live:
        step()
    return live.most


@pytest.mark.slow
def test_less_at_the_peak_than_at_once(tmp_path: Path, group_of_one: None) -> None:
    """Samples are many, so activations are most of it."""
    model, x = network(), torch.randn(512, 32, dtype=torch.float64)
    modules = loaded(tmp_path, model, x)
    joint = modules["none"].exported_program.module()
    with torch.no_grad():
        most = {"at once": peak(lambda: joint(x))}
    for how, module in modules.items():
        most[how] = peak(lambda: module(x).backward())  # noqa: B023
    assert most["min-cut"] < 0.8 * most["at once"]
    assert most["none"] < 1.1 * most["at once"]
    value = 512 * 32 * 8
    saved = {how: module.saved_bytes // value for how, module in modules.items()}
    assert saved["all"] == 0
    assert saved["min-cut"] <= 5 * 6 < 6 * 6 <= saved["none"]


@pytest.mark.slow
def test_buffers_that_are_written(tmp_path: Path, group_of_one: None) -> None:
    torch.manual_seed(0)
    model, x, labels = Images().double().train(), torch.randn(4, 3, 10, 10).double(), torch.tensor([0, 3, 1, 4])
    modules = loaded(tmp_path, model, x, loss=cross_entropy, targets={"labels": labels})
    for _ in range(2):
        cross_entropy(model(x), labels).backward()
        for module in modules.values():
            module(x, labels=labels)["loss"].backward()
    for module in modules.values():
        torch.testing.assert_close(gradients(module), gradients(model), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dict(module.named_buffers()), dict(model.named_buffers()))


def drops(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(self.up(x)), 0.5, training=True).square().sum()


def drops_after_others(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Nothing uses the first and the last draw."""
    torch.rand(3)
    h = self.up(x)
    noise = torch.randn_like(h)
    h = h + (noise * h - (noise * h).detach())
    y = F.dropout(torch.tanh(h), 0.5, training=True).square().sum()
    torch.rand(5)
    return y


def drops_paths(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Drawn in float64 by the kernel, and in float32 by torch's decomposition."""
    return (self.up(x) * torch.bernoulli(torch.full((len(x), 1), 0.7).to(x))).square().sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("forward", [drops, drops_after_others, drops_paths])
def test_random_numbers_are_drawn_once(forward: Any, tmp_path: Path, group_of_one: None) -> None:
    """After a step the generator's state is the single device's, so that the next call drops the same."""
    torch.manual_seed(0)
    model, x = Call(forward, up=nn.Linear(8, 8)).double(), torch.randn(4, 8, dtype=torch.float64)
    modules = loaded(tmp_path, model, x)
    drawn = []
    for each in (*modules.values(), model):
        torch.manual_seed(1)
        for _ in range(2):
            each(x).backward()
        drawn.append(torch.get_rng_state())
    for module, state in zip(modules.values(), drawn, strict=False):
        torch.testing.assert_close(gradients(module), gradients(model))
        assert torch.equal(state, drawn[-1])


@pytest.mark.slow
def test_any_number_of_samples(tmp_path: Path, group_of_one: None) -> None:
    model = network()
    shapes = ({0: Dim("samples", min=2)},)
    for module in loaded(tmp_path, model, torch.randn(4, 32).double(), dynamic_shapes=shapes).values():
        for samples in (3, 7):
            x = torch.randn(samples, 32, dtype=torch.float64)
            module.zero_grad()
            model.zero_grad()
            module(x).backward()
            model(x).backward()
            torch.testing.assert_close(gradients(module), gradients(model), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_one_that_is_not_the_gradient_of_the_loss(tmp_path: Path, group_of_one: None) -> None:
    """It comes first, and one gradient is multiplied by it."""
    model, x = network(), torch.randn(4, 32, dtype=torch.float64)
    program = tpcompiler.export_training(model, (x,))
    (output,) = program.graph.find_nodes(op="output")
    gradient = output.args[0][-1]
    with program.graph.inserting_before(next(iter(edit.calls(program.graph)))):
        one = program.graph.call_function(torch.ops.aten.full.default, ([], 1), {"dtype": x.dtype})
    with program.graph.inserting_before(output):
        product = program.graph.call_function(torch.ops.aten.mul.Tensor, (gradient, one))
    one.meta["val"], product.meta["val"] = torch.ops.aten.sum(gradient.meta["val"]), gradient.meta["val"]
    program.graph_signature.replace_all_uses(gradient.name, product.name)
    output.replace_input_with(gradient, product)
    tpcompiler.parallelize(program, 1, {}).save(tmp_path / "out")
    for how in HOW:
        module: Any = tpcompiler.load(tmp_path / "out", training=True, recompute=how)  # type: ignore[arg-type]
        assert sum(n.target is torch.ops.aten.full.default for n in module.exported_program.graph.nodes) == 2
        model.zero_grad()
        (module(x) * 3).backward()
        (model(x) * 3).backward()
        torch.testing.assert_close(gradients(module), gradients(model), rtol=1e-12, atol=1e-14)


def test_a_package_has_no_backward(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no backward of its own"):
        tpcompiler.load(tmp_path, training=True, compiled=True)
