"""One artifact on any number of processes: each runs several ranks, and all outputs have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.launch import fork_ranks
from tpcompiler import ParallelProgram, TpCompilerWarning
from tpcompiler.errors import ArtifactError, LaunchError, MeshError, UnsupportedError
from tpcompiler.ir import hosting
from tpcompiler.ir.hosting import Hosts
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import join, same_bits
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.runtime.package import package_to_run

WORKER = Path(__file__).parent / "same_bits_worker.py"
PLAN = {"a": "colwise", "b": "rowwise"}


class Block(nn.Module):
    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, inner), nn.Linear(inner, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.b(F.gelu(self.a(x))))


class Cached(Block):
    """Writes a buffer that ranks share the elements of, and one that all have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cut", torch.zeros(1, 16))
        self.register_buffer("whole", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        self.cut.add_(h.mean((0, 1)))
        self.whole.mul_(0.5).add_(x.mean((0, 1)))
        return self.b(F.gelu(h + self.cut)) + self.whole


class Attention(nn.Module):
    """8 heads, which read 2 of keys and values: several ranks share one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> Any:
        shape = (*x.shape[:2], -1, 4)
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Drawing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return self.b(F.dropout(self.a(x), 0.5, training=True)) + torch.rand(8)


class Branching(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return torch.cond(y.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (y,))


class Writing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        x.mul_(2)
        return y


class Moved(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.relu()


class WithLoss(Block):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.mse_loss(super().forward(x), y)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def converted(make: Callable[[], nn.Module], x: torch.Tensor, mesh: Any, plan: Any, **more: Any) -> ParallelProgram:
    shapes = more.pop("shapes", None)
    program = export(randomised(make()), (x,), dynamic_shapes=shapes)
    return tpcompiler.parallelize(program, mesh, plan, machine="ideal", **more)


X = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1))
QKVO = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
ROWS: Mapping[str, tuple[Callable[[], nn.Module], torch.Tensor, Any, Any, dict[str, Any]]] = {
    "sums, 8 ranks": (Block, X, 8, PLAN, {}),
    "sums, 6 ranks, of which 3 are no subtree": (lambda: Block(24), X, 6, PLAN, {}),
    "uneven shares": (Block, X, 3, PLAN, {}),
    "unequal devices": (Block, X, {"tp": [2, 1, 1]}, PLAN, {}),
    "gathers": (Block, X, 4, {"a": "colwise_gather_output"}, {}),
    "the sequence cut": (lambda: Block(24), X, 6, PLAN, {"inputs": ["S(1)"], "outputs": ["S(1)"]}),
    "the sequence cut, of any length": (
        Block,
        X,
        4,
        PLAN,
        {"inputs": ["S(1)"], "outputs": ["S(1)"], "shapes": ({1: 4 * Dim("s", min=1, max=16)},)},
    ),
    "to other dims": (Moved, X, 4, {}, {"inputs": ["S(0)"], "outputs": ["S(1)"]}),
    "to other dims, uneven": (Moved, X[:, :6, :7], 4, {}, {"inputs": ["S(1)"], "outputs": ["S(2)"]}),
    "samples and layers cut": (
        Block,
        X,
        {"dp": 2, "tp": 4},
        PLAN,
        {"inputs": [{"dp": "S(0)"}], "outputs": [{"dp": "S(0)"}], "shapes": ({0: Dim("b", min=2, max=64)},)},
    ),
    "two dims of an input cut": (
        Block,
        X,
        {"dp": 2, "tp": 2},
        PLAN,
        {"inputs": [{"dp": "S(0)", "tp": "S(1)"}], "outputs": [{"dp": "S(0)", "tp": "S(1)"}]},
    ),
    "an input that is cut and written": (Writing, X, {"dp": 2, "tp": 2}, PLAN, {"inputs": [{"dp": "S(0)"}]}),
    "buffers": (Cached, X, 4, PLAN, {}),
    "shared heads": (Attention, torch.randn(2, 8, 32), 8, QKVO, {}),
    "attention in turns": (
        Attention,
        torch.randn(2, 8, 32),
        {"cp": 2, "tp": 2},
        QKVO,
        {"inputs": [{"cp": "S(1)"}], "outputs": [{"cp": "S(1)"}]},
    ),
    "random numbers": (Drawing, X, 4, PLAN, {}),
    "bodies": (Branching, X, 4, PLAN, {}),
    "half precision": (lambda: Block().bfloat16(), X.bfloat16(), 8, PLAN, {}),
}


QUICK = {"sums, 6 ranks, of which 3 are no subtree", "the sequence cut", "samples and layers cut", "buffers"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ROWS])
def test_all_numbers_of_processes_give_the_same_bits(name: str) -> None:
    make, x, mesh, plan, more = ROWS[name]
    made = converted(make, x, mesh, plan, **more)
    report = made.verify((x,), then=[(x + 1,)], same_bits=True)
    assert report.ok, report
    assert f"on {made.world_size}: " in report.note
    assert "on 1: " in report.note


@pytest.mark.slow
def test_the_table_has_every_kind_of_collective() -> None:
    kinds = set[str]()
    for name in ("sums, 8 ranks", "gathers", "the sequence cut", "to other dims"):
        make, x, mesh, plan, more = ROWS[name]
        kinds |= {each.kind for each in converted(make, x, mesh, plan, **more).collectives()}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def _bits(report: VerifyReport) -> list[str]:
    return [each.name for each in report.outputs if not each.ok]


def test_another_order_of_a_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = converted(*ROWS["sums, 8 ranks"][:4])

    def in_a_row(values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
        total = values[0]
        for value in values[1:]:
            total = combine(total, value)
        return total

    monkeypatch.setattr(hosting, "in_pairs", in_a_row)
    report = made.verify((X,), same_bits=True)
    assert not report.ok
    assert _bits(report)
    assert all("has other bits on" in name for name in _bits(report))


@pytest.mark.slow
def test_a_kernel_of_another_shape_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = converted(*ROWS["half precision"][:4]), hosting._Hosted._repeat

    def wider(self: Any, node: Any, args: Any, kwargs: Any) -> Any:
        """Compute a layer of a process that runs several ranks in float32, as another kernel might."""
        call = plain(self, node, args, kwargs)
        if "linear" in node.name and self.hosts.each > 1:
            call.target = lambda *own: torch.ops.aten.linear(*(each.float() for each in own)).bfloat16() + 1e-3
        return call

    monkeypatch.setattr(hosting._Hosted, "_repeat", wider)
    assert _bits(made.verify((X.bfloat16(),), same_bits=True))


@pytest.mark.parametrize(
    ("mesh", "inputs"),
    [
        pytest.param({"tp": 4}, None, marks=pytest.mark.slow),
        pytest.param({"tp": 3}, None, marks=pytest.mark.slow),
        ({"dp": 2, "tp": 2}, "dp"),
    ],
)
def test_gradients_have_the_same_bits(mesh: dict[str, int], inputs: str | None) -> None:
    made = tpcompiler.parallelize(trained(), mesh, PLAN, inputs=_samples(inputs))
    report = made.verify(batch(), same_bits=True)
    assert report.ok, report
    assert any(each.name == "gradients.a.weight" for each in report.outputs)


def trained() -> ExportedProgram:
    return tpcompiler.export_training(randomised(WithLoss()), batch())


def batch(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 8, 12, 8, generator=torch.Generator().manual_seed(seed))
    return x, y


def _samples(axis: str | None) -> Any:
    return {name: {axis: "S(0)"} for name in ("x", "y")} if axis else None


def run(directory: Path, processes: int, calls: Sequence[Sequence[Any]], how: str = "call") -> list[list[Any]]:
    """The results of each process, whose calls are given."""
    torch.save(list(calls), directory / f"{processes}.calls")
    fork_ranks(processes, WORKER, directory / "out", how)
    return [torch.load(directory / f"{processes}.{at}.results") for at in range(processes)]


def test_processes_give_the_same_bits_from_files(tmp_path: Path) -> None:
    made = converted(*ROWS["buffers"][:4])
    made.save(tmp_path / "out")
    calls = [(X,), (X + 1,), (X - 1,)]
    two, one = (run(tmp_path, processes, [calls] * processes) for processes in (2, 1))
    for results in (*two, *one):
        assert all(same_bits(got, want) for got, want in zip(results, one[0], strict=True))
    model = randomised(Cached())
    for args, got in zip(calls, one[0], strict=True):
        torch.testing.assert_close(got, model(*args))


@pytest.mark.slow
def test_packages_of_any_number_of_processes_give_the_same_bits(tmp_path: Path) -> None:
    make, *rest = ROWS["buffers"][:4]
    converted(lambda: make().bfloat16(), rest[0].bfloat16(), *rest[1:]).save(tmp_path / "out")
    calls = [(X.bfloat16(),), ((X + 1).bfloat16(),)]
    found = []
    tpcompiler.open(tmp_path / "out").package(check=False)  # which has files that the next has not
    for processes in (2, 1):
        made, report = tpcompiler.open(tmp_path / "out").package(processes=processes)
        assert report is not None
        assert report.ok, report
        assert made.models == {"model": {"model_0": [*range(processes)]}}
        found += run(tmp_path, processes, [calls] * processes, "compiled")
    for results in found[1:]:
        assert all(same_bits(got, want) for got, want in zip(results, found[0], strict=True))
    with pytest.raises(ArtifactError, match="for 1 processes with the same bits, and this is a process for each rank"):
        package_to_run(tmp_path / "out", True, False)
    with pytest.warns(TpCompilerWarning, match="for 1 processes with the same bits, .* the programs run uncompiled"):
        assert package_to_run(tmp_path / "out", None, True, processes=2) is None


def test_a_trainer_has_no_package_for_processes(tmp_path: Path) -> None:
    tpcompiler.parallelize(trained(), 2, PLAN).save(tmp_path / "out")
    with pytest.raises(UnsupportedError, match="returns gradients, and no package of processes does"):
        tpcompiler.open(tmp_path / "out").package(processes=1)


@pytest.mark.parametrize("op", ["sum", "product", "max"])
def test_a_pending_output_is_one_term_of_its_process(op: str) -> None:
    mesh = Mesh.of({"tp": 4})
    hosts, sharding = Hosts(mesh, 2), Sharding.of(Partial(op), mesh, 2, "y")
    terms = torch.randn(2, 3, 4)
    parts = [
        part
        for process, term in enumerate(terms)
        for part in hosting.split_tensor(term, sharding, hosts, process, term.shape)
    ]
    whole = {"sum": terms.sum(0), "product": terms.prod(0), "max": terms.amax(0)}[op]
    torch.testing.assert_close(join(parts, sharding, mesh, (3, 4))[0], whole)


@pytest.mark.parametrize("axis", [pytest.param(None, marks=pytest.mark.slow), "dp"])
def test_steps_of_training_have_the_same_bits(axis: str | None, tmp_path: Path) -> None:
    mesh = {"dp": 2, "tp": 2} if axis else {"tp": 4}
    tpcompiler.parallelize(trained(), mesh, PLAN, inputs=_samples(axis)).save(tmp_path / "out")
    steps = [batch(seed) for seed in range(3)]
    halves = [[[each.chunk(2)[at] for each in args] for args in steps] for at in range(2)]
    two = run(tmp_path, 2, halves if axis else [steps] * 2, "train")
    (one,) = run(tmp_path, 1, [steps], "train")
    parameters, leaves = one.pop(), {}
    for process, results in enumerate(two):
        shares = results.pop()
        assert all(same_bits(got, want) for got, want in zip(results, one, strict=True))
        for name, value in shares.items():  # rank 0's or, on process 1, rank 2's have no prefix
            first = f"rank_2.{name}" if process and f"rank_2.{name}" in parameters else name
            leaves[first] = value
    assert all(same_bits(value, parameters[name]) for name, value in leaves.items() if name in parameters)
    assert {"a.weight", "rank_1.a.weight"} <= leaves.keys() & parameters.keys()
    eager = randomised(WithLoss())
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    for args, loss in zip(steps, one[::2], strict=True):
        optimizer.zero_grad()
        own = eager(*args)
        own.backward()
        torch.testing.assert_close(loss, own.detach())
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize(
    ("mesh", "processes", "able"),
    [({"tp": 8}, 3, "1, 2, 4 or 8"), ({"dp": 3, "tp": 2}, 2, "1, 3 or 6"), ({"dp": 2, "tp": 3}, 4, "1, 2 or 6")],
)
def test_processes_that_cannot_run_whole_ranks_are_refused(mesh: dict[str, int], processes: int, able: str) -> None:
    with pytest.raises(MeshError, match=f"{processes} processes cannot run") as refusal:
        Hosts(Mesh.of(mesh), processes)
    assert able in str(refusal.value)


def test_a_world_that_divides_no_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(*ROWS["buffers"][:4]).save(tmp_path / "out")
    monkeypatch.setenv("RANK", "0")
    for world, hosts, told in (("3", True, "with a divisor of 4"), ("2", False, "convert for 2")):
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(LaunchError, match=f"for 4 ranks, this world has {world}.*") as refusal:
            tpcompiler.load(tmp_path / "out", same_bits=hosts)
        assert told in str(refusal.value)


def test_what_cannot_be_hosted_is_refused_by_name() -> None:
    pending = converted(Block, X, 2, PLAN, inputs=["P(sum)"])
    with pytest.raises(UnsupportedError, match="input 'x' is a pending sum"):
        pending.verify((X,), same_bits=True)

    other = {"two": export(randomised(Block()), (X,)), "one": export(randomised(Moved()), (X,))}
    apart = tpcompiler.parallelize(other, 2, {}, degrees={"one": 1})
    with pytest.raises(UnsupportedError, match="different numbers of ranks"):
        apart.verify(same_bits=True)

    class Strange(Block):
        def __init__(self) -> None:
            super().__init__()
            self.rank_1 = nn.Module()
            self.rank_1.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(self.rank_1.a(x))

    strange = converted(Strange, X, 2, PLAN)
    with pytest.raises(UnsupportedError, match=r"would be called 'rank_1\.a\.weight'"):
        strange.verify((X,), same_bits=True)
