"""The models that are damaged: eleven of the zoo, as unlike as it has them, and small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

import tpcompiler
from tests.compared import compare
from tests.quantised.layers import Awq, Pair
from tests.trust import small
from tests.trust.damage import Artifact
from tests.zoo.case import randomise
from tests.zoo.index import CASES
from tpcompiler._torch import with_state
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.shares import read_sharding
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.sound.check import CheckReport, check_programs
from tpcompiler.passes.canonicalize import canonicalize

Call = tuple[Sequence[Any], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A converted model, and the calls that `verify` makes of it."""

    program: tpcompiler.ParallelProgram
    reference: ExportedProgram
    sound: Artifact
    output_names: list[str]
    calls: list[Call]

    @cached_property
    def model(self) -> CanonicalProgram:
        """What the artifact keeps of it: weights have no values."""
        made = canonicalize(self.original)
        hollow = {
            fqn: node.meta["val"]
            for node, spec in made.inputs()
            if (fqn := str(spec.target)) and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        }
        state, constants = (
            {**held, **{name: hollow[name] for name in held.keys() & hollow.keys()}}
            for held in (made.source.state_dict, made.source.constants)
        )
        return CanonicalProgram(
            with_state(made.source, state, constants, made.source.module_call_graph, None), made.graph
        )

    @property
    def original(self) -> ExportedProgram:
        return self.program.only.original()

    def check(self, artifact: Artifact, *, with_original: bool) -> CheckReport:
        original = self.original if with_original else None
        return check_programs(artifact.written(), artifact.manifest, original, model=self.model)

    def verified(self, artifact: Artifact) -> bool:
        """What `tpcompiler verify` says of the files: everything is laid out as the manifest says."""
        manifest = artifact.manifest
        placed = manifest.placed()
        shardings = {name: read_sharding(row.sharding, artifact.mesh, len(row.shape)) for name, row in placed}
        (args, kwargs), *then = self.calls
        report = compare(
            self.reference,
            artifact.ranks,
            args,
            kwargs,
            Layout(artifact.mesh, shardings),
            [row.name for row in manifest.inputs],
            self.output_names,
            then=then,
        )
        return report.ok


def _subject(exported: ExportedProgram, mesh: object, plan: Any, calls: list[Call], **boundary: Any) -> Subject:
    program = tpcompiler.parallelize(exported, mesh, plan, **boundary)  # type: ignore[arg-type]
    names = program.converted.resharded.output_names()
    return Subject(program, exported, Artifact.of(program), names, calls)


def _of_zoo(name: str, ranks: int, dynamic: bool = False) -> Callable[[], Subject]:
    def make() -> Subject:
        case = CASES[name]
        then = case.then(*case.example) if case.then else ()
        return _subject(
            case.export(dynamic),
            {"tp": ranks},
            case.asked(),
            [((), case.inputs(*case.example)), *(((), inputs) for inputs in then)],
        )

    return make


def _rows(mesh: dict[str, int], **boundary: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        ids = torch.arange(4 * 6).view(4, 6) % 11
        exported = torch.export.export(randomise(small.Rows()), (ids,))
        plan = {"table": "rowwise", "packed": "colwise", "down": "rowwise", "back": "colwise_gather_output"}
        return _subject(exported, mesh, plan, [((ids,), {}), (((ids + 3) % 11,), {})], **boundary)

    return make


def _attend() -> Subject:
    tokens, batch = Dim("tokens", min=2, max=64), Dim("batch", max=64)
    inputs = {"x": _noise(2, 6, 16), "shift": _noise(2, 6, 16)}
    sizes = {name: {0: batch, 1: tokens} for name in inputs}
    exported = torch.export.export(randomise(small.Attend()), (), inputs, dynamic_shapes=sizes)
    plan = {"packed": "colwise", "out": "rowwise", "gate": "colwise", "up": "colwise", "down": "rowwise"}
    return _subject(exported, {"tp": 2}, plan, [((), inputs)], inputs={"shift": "S(1)"})


def _images() -> Subject:
    x = _noise(2, 4, 6, 6)
    plan = {"first": "colwise", "by_channel": "colwise", "last": "rowwise"}
    return _subject(torch.export.export(randomise(small.Images()), (x,)), {"tp": 2}, plan, [((x,), {})])


def _uneven() -> Subject:
    x = _noise(5, 6)
    plan = {"one": "colwise_gather_output", "two": "colwise", "three": "colwise_gather_output"}
    exported = torch.export.export(randomise(small.Uneven()), (x,))
    return _subject(exported, {"tp": 2}, plan, [((x,), {})], outputs=["S(0)"])


def _choose() -> Subject:
    x = _noise(4, 8)
    exported = torch.export.export(randomise(small.Choose()), (x,))
    return _subject(exported, {"tp": 2}, {"up": "colwise", "down": "rowwise"}, [((x,), {})])


def _quantised() -> Subject:
    x = _noise(4, 128)
    exported = torch.export.export(Pair(Awq), (x,))
    return _subject(exported, {"tp": 2}, {"up": "colwise", "down": "rowwise"}, [((x,), {})])


def _cache_by_steps() -> Subject:
    calls: list[Call] = [
        ((_noise(2, 4, 1, 16), _noise(2, 2, 1, 16), _noise(2, 2, 1, 16) + 1, torch.tensor([at])), {}) for at in (5, 14)
    ]
    exported = torch.export.export(small.Decode(), calls[0][0])
    return _subject(exported, {"tp": 2}, {"keys": "S(2)", "values": "S(2)"}, calls)


def _in_turns() -> Subject:
    calls: list[Call] = [((_noise(2, 4, 8, 16), _noise(2, 2, 8, 16), _noise(2, 2, 8, 16) + 1), {})]
    exported = torch.export.export(small.Turns(), calls[0][0])
    asked = {"inputs": ["S(2)"] * 3, "outputs": ["S(2)"]}
    return _subject(exported, {"tp": 2}, {"attend": "attend_in_turns"}, calls, **asked)


def _dispatched() -> Subject:
    from tests.passes import test_dispatch_experts as experts

    net, rows = experts.built(experts=4), [{"ep": "S(0)"}]
    plan = dict.fromkeys(("up", "down"), "dispatch_experts")
    exported = torch.export.export(net, (experts.X,))
    return _subject(exported, {"ep": 2}, plan, [((experts.X,), {})], inputs=rows, outputs=rows)


def _batches() -> Subject:
    """Batch norm in training, and a scan, over samples that are cut."""
    x = _noise(8, 4, 6)
    exported = torch.export.export(randomise(small.Batches()).train(), (x,))
    return _subject(exported, {"dp": 2}, {}, [((x,), {}), ((x + 1,), {})], inputs=["S(0)"], outputs=["S(0)"])


def _training() -> Subject:
    """Gradients, of parameters that are cut at rest."""
    from tests.training.test_gradients import ROWS, Mlp

    x, target = _noise(8, 8), _noise(8, 8)
    exported = tpcompiler.export_training(
        randomise(Mlp()), (x,), loss=torch.nn.functional.mse_loss, targets={"target": target}
    )
    plan = {"up": "colwise", "down": "rowwise", "**": "shard_at_rest(dp)"}
    inputs = dict.fromkeys(("x", "target"), ROWS)
    return _subject(exported, {"dp": 2, "tp": 2}, plan, [((x,), {"target": target})], inputs=inputs)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "rows": _rows({"tp": 2}),
    "rows, 4 ranks": _rows({"tp": 4}),
    "rows, two axes": _rows({"dp": 2, "tp": 2}, inputs={"ids": {"dp": "S(0)"}}),
    "attend": _attend,
    "images": _images,
    "uneven": _uneven,
    "choose": _choose,
    "quantised": _quantised,
    "cache by steps": _cache_by_steps,
    "in turns": _in_turns,
    "dispatched": _dispatched,
    "batches": _batches,
    "training": _training,
    "llama": _of_zoo("llama", 2),
    "llama, dynamic": _of_zoo("llama", 2, dynamic=True),
    "gpt2": _of_zoo("gpt2", 2),
    "llama_cached": _of_zoo("llama_cached", 2),
    "llama_1_kv": _of_zoo("llama_1_kv", 4),
    "t5": _of_zoo("t5", 2),
    "resnet": _of_zoo("resnet", 2),
    "mamba": _of_zoo("mamba", 2),
    "mixtral": _of_zoo("mixtral", 2),
    "vit": _of_zoo("vit", 2),
    "dlrm": _of_zoo("dlrm", 2),
    "gpt_oss": _of_zoo("gpt_oss", 2),
}


@lru_cache(maxsize=12)  # the small ones, and two of the zoo
def subject(name: str) -> Subject:
    return SUBJECTS[name]()
