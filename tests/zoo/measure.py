"""Convert a case and measure what it states: for the tests and for the table."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

import tpcompiler
from tests.compared import compare
from tests.machines import CALLS
from tests.zoo.case import OUTSIDE, Case
from tpcompiler import ParallelProgram
from tpcompiler.errors import InternalError, TpCompilerWarning
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import PLACEMENT, read_claim
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.compare.judge import Difference
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.judge.compare.trial import reference_of
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.parallel.program_subject import layout_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.inputs import flatten_inputs
from tpcompiler.runtime.records import Collective, TensorRecord

WORLDS = (2, 4)
FALLBACK = "fallback"
# The judge allows 8 times a model's float32 noise, which is about 1e-6, and 4.5e-6 of a state-space scan on some CPUs; a
# dropped all_reduce gives about 1. A tolerance above this bound would say that the case is too ill-conditioned to judge by.
LOOSEST = 5e-5


def _attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: object, **kwargs: object) -> int:
    return 2 * torch.Size(q[:-1]).numel() * k[-2] * (q[-1] + v[-1])


def _grouped_flops(a: Sequence[int], b: Sequence[int], *args: object, **kwargs: object) -> int:
    return 2 * torch.Size(a).numel() * b[-1]


def _uncounted() -> dict[object, Callable[..., int]]:
    """What torch's counter leaves out on the CPU."""
    known = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._grouped_mm: _grouped_flops,
    }
    of_experts = getattr(torch.ops.transformers, "grouped_mm_fallback", None)  # once transformers is imported
    return {**known, of_experts: _grouped_flops} if of_experts else known


@dataclass(frozen=True)
class Measured:
    """A case in one of its exports on one world.

    Attributes:
        program: None where only errors were asked for.
        differences: of every output at every size that the program was run at.
        found: (layer or OUTSIDE, kind) -> count; a fallback says so in its kind.
        cut: the share of all parameters' bytes that is cut.
        flops: the share of the FLOPs that is cut.
    """

    case: Case
    dynamic: bool
    world: int
    program: ParallelProgram
    differences: tuple[Difference, ...]
    found: Counter[tuple[str, str]]
    cut: float
    flops: float
    seconds: float

    @property
    def equal(self) -> bool:
        """Every output, on every rank and at every size, is the single device's, at a tolerance that means something."""
        return bool(self.differences) and all(d.ok and d.tolerance < LOOSEST for d in self.differences)

    @property
    def counted(self) -> bool:
        return self.found == self.case.by_hand()

    @property
    def cut_enough(self) -> bool:
        return self.cut >= self.case.cut

    @property
    def flops_enough(self) -> bool:
        return self.flops >= self.case.flops

    @cached_property
    def early_waits(self) -> list[str]:
        """The waits before an op that does not use their result, unless memory is too short to wait later."""
        notes = [note.text for note in self.program.manifest().notes if note.kind == "overlap"]
        pairs = waits_too_early(self.program.rank_program(0).graph)
        return [f"{wait.name} before {op.name}" for wait, op in pairs if not any("at once" in text for text in notes)]

    @property
    def ok(self) -> bool:
        return self.equal and self.counted and self.cut_enough and self.flops_enough and not self.early_waits

    @cached_property
    def alarms(self) -> list[str]:
        """What `tpcompiler check` says against the ranks' programs: as files, where these may differ, on one world."""
        if self.dynamic and self.world == WORLDS[0]:
            return self._refused_as_files()
        ranks = read_ranks(self.program.only)
        model = canonicalize(self.program.only.original())
        return check_programs(ranks, self.program.manifest(), self.program.only.original(), model=model).findings

    def _refused_as_files(self) -> list[str]:
        with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
            warnings.simplefilter("error", TpCompilerWarning)  # that they need trust
            try:
                self.program.save(Path(directory) / "out")
            except (InternalError, TpCompilerWarning) as error:
                return [str(error)]
        return []

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=strain)


def strain(difference: Difference) -> float:
    """How much of what is allowed is used up; integers allow nothing."""
    return difference.rel / max(difference.tolerance, torch.finfo(torch.float64).tiny)


@lru_cache(maxsize=4)
def exported(case: Case, dynamic: bool) -> ExportedProgram:
    return case.export(dynamic)


@lru_cache(maxsize=4)
def alone(case: Case, dynamic: bool) -> ExportedProgram:
    """What one device runs: made once for all worlds and sizes, because torch takes longer over it than the rest."""
    return reference_of(exported(case, dynamic))


@lru_cache(maxsize=8)
def measured(case: Case, dynamic: bool, world: int) -> Measured:
    """Convert and run: at the size of the example, the dynamic program at all others too."""
    began = time.perf_counter()
    program = tpcompiler.parallelize(exported(case, dynamic), world, case.asked(), machine=CALLS)
    sizes = (case.example, *(case.others if dynamic else ()))
    further = [[((), inputs) for inputs in case.then(*size)] if case.then else [] for size in sizes]
    ranks = [program.rank_program(rank) for rank in range(world)]
    reports = [
        compared(alone(case, dynamic), program, ranks, case.inputs(*size), then)
        for size, then in zip(sizes, further, strict=True)
    ]
    return Measured(
        case=case,
        dynamic=dynamic,
        world=world,
        program=program,
        differences=tuple(d for report in reports for d in report.outputs),
        found=counts(case, program.collectives()),
        cut=cut_share(program),
        flops=flops_share(alone(case, dynamic), ranks, case.inputs(*case.example)),
        seconds=time.perf_counter() - began,
    )


def counts(case: Case, collectives: Iterable[Collective]) -> Counter[tuple[str, str]]:
    paths = [re.compile(re.escape(layers.path).replace(r"\*", r"\d+") + r"(?=\.|$)") for layers in case.layers]
    found: Counter[tuple[str, str]] = Counter()
    for c in collectives:
        inside = [m[0] for path in paths if (m := path.match(c.module))]
        kind = f"{c.kind} ({FALLBACK})" if c.why == FALLBACK else c.kind
        found[inside[0] if inside else OUTSIDE, kind] += 1
    return found


def waits_too_early(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the waits, each with an op that follows it before its first use and is no part of a change of sharding."""
    nodes = list(graph.nodes)
    for at, node in enumerate(nodes):
        if edit.is_wait(node):
            for other in nodes[at + 1 :]:
                if node in other.all_input_nodes:
                    break
                if not edit.is_wait(other) and (other.meta.get(PLACEMENT) or read_claim(other)).reshard is None:
                    yield node, other


def cut_share(program: ParallelProgram) -> float:
    """The share of the bytes of all parameters, tied ones once, that lie in parameters cut over the ranks."""
    state = program.only.original().state_dict
    sizes = {True: 0, False: 0}
    for row in program.manifest().tensors:
        if row.kind == "parameter" and row.tied_to is None:
            sizes[is_cut(row)] += torch.Size(row.shape).numel() * state[row.name].element_size()
    return sizes[True] / sum(sizes.values())


def compared(
    alone: ExportedProgram,
    program: ParallelProgram,
    ranks: Sequence[ExportedProgram],
    inputs: dict[str, torch.Tensor],
    then: Sequence[tuple[tuple[()], dict[str, torch.Tensor]]] = (),
) -> VerifyReport:
    """`program.verify` of these programs of the ranks, which may be damaged on purpose."""
    return compare(
        alone,
        ranks,
        (),
        inputs,
        layout_of(program.only),
        [node.name for node in program.converted.resharded.user_inputs()],
        program.converted.resharded.output_names(),
        intermediate=program.converted.resharded.source,
        then=then,
    )


def flops_share(alone: ExportedProgram, ranks: Sequence[ExportedProgram], inputs: dict[str, torch.Tensor]) -> float:
    """1 where all ranks together compute what one device does; 0 where each computes all of it.

    Matrix products and convolutions are counted, those of attention among them.
    """
    flat = flatten_inputs(alone, (), inputs)
    whole = _flops([alone], [flat])
    repeated = _flops(ranks, [flat] * len(ranks)) - whole
    return 1 - repeated / (whole * (len(ranks) - 1)) if whole else 1.0


def _flops(programs: Sequence[ExportedProgram], flat: Sequence[Sequence[object]]) -> int:
    with FlopCounterMode(display=False, custom_mapping=_uncounted()) as counter:
        simulate(programs, flat)
    return counter.get_total_flops()


def is_cut(row: TensorRecord) -> bool:
    return "S(" in row.sharding


def unseen_parameters(case: Case) -> set[str]:
    """Parameters that could be wrong unnoticed: with their halves swapped along a dim, as wrong shards would be, the
    outputs are the same. Those that the case calls inert are left out if they are."""
    model, inputs = case.build(), case.inputs(*case.example)
    with torch.no_grad():
        expected = _tensors(model(**inputs))
        unseen = set()
        for fqn, parameter in model.named_parameters():
            kept = parameter.clone()
            for dim in (d for d in range(min(2, parameter.ndim)) if parameter.shape[d] > 1):
                parameter.copy_(kept.roll(parameter.shape[dim] // 2, dim))
                got = _tensors(model(**inputs))
                pairs = zip(got, expected, strict=True)
                # Forty times what the judge may allow.
                if not any((a - b).abs().max() > 40 * LOOSEST * b.abs().max() for a, b in pairs):
                    unseen.add(fqn)
            parameter.copy_(kept)
    return unseen ^ {fqn for fqn, _ in model.named_parameters() if fqn.endswith(tuple(case.inert))}


def _tensors(result: object) -> list[torch.Tensor]:
    values = result.values() if isinstance(result, dict) else [result]
    return [value for value in values if isinstance(value, torch.Tensor)]
