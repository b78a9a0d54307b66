"""What the search decides on every machine of the package, beside Megatron's plan: `python -m tools.bench_decisions`.

Every model is built from its dimensions without weights and with two layers: layers alike are placed alike, so that
more of them repeat what these cost, and the embedding and the head count once. For each call, number of ranks and
machine: the predicted time of `auto` over that of Megatron's plan, the collectives of a layer, and the same search with
every latency halved and doubled. The first table is that of docs/decisions.md; then follow the cells where `auto` is
slower than Megatron's plan, where a decode of 8 sends more often than it, and where a latency changes the plan of a
decode.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch.export import ExportedProgram

from tools.published.model import Dims, export_bert, export_decoder, megatron_plan
from tpcompiler.api.request import Request
from tpcompiler.cost.machine import Links, Machine
from tpcompiler.cost.machine_file import read_machine, shipped_machines
from tpcompiler.cost.timeline import duration
from tpcompiler.ir.edit import module_path
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.solver.estimate import measure_step_time, sends_of
from tpcompiler.solver.solution import Solution

LAYERS, BEFORE = 2, 1024  # tokens before the one of a decode
RANKS = (2, 4, 8)
EVEN = 1.0001  # what ties may add
DECODERS = {
    "Llama 8B": Dims(LAYERS, 4096, 14336, 32, 8, 128256),
    "Llama 70B": Dims(LAYERS, 8192, 28672, 64, 8, 128256),
    "GPT-2": Dims(LAYERS, 768, 3072, 12, 12, 50257, gated=False),
    "GPT-2 XL": Dims(LAYERS, 1600, 6400, 25, 25, 50257, gated=False),
    "Mixtral": Dims(LAYERS, 4096, 14336, 32, 8, 32000, experts=8),
}
BERT = {  # the plan by hand of an encoder, whose heads are not cut
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}


class Call(NamedTuple):
    """A call of a model, and the plan of Megatron for it."""

    model: str
    name: str
    export: Callable[[], ExportedProgram]
    plan: dict[str, str]
    is_decode: bool = False
    batch: int = 1


class Cell(NamedTuple):
    """A call on a number of ranks of a machine: seconds of both plans, and what each sends in a layer.

    `changed`: of each factor on all latencies under which the plan is another one, the seconds that the plan then
    takes, and those of the other.
    """

    call: Call
    ranks: int
    machine: str
    ours: float
    theirs: float
    sends: float
    changed: dict[float, tuple[float, float]]

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def find_calls() -> Iterator[Call]:
    """All calls. An encoder has no decode: its batches are of 128 tokens, and 512 are its longest."""
    for model, dims in DECODERS.items():
        for batch, steps in ((1, 1), (8, 1), (64, 1), (1, 128), (1, 2048)):
            yield decoder_call(model, dims, batch, steps)
    for batch, steps in ((1, 128), (8, 128), (64, 128), (1, 512)):
        yield Call("BERT", f"{batch} x {steps} tokens", partial(export_bert, LAYERS, batch, steps), BERT)


def decoder_call(model: str, dims: Dims, batch: int, steps: int) -> Call:
    is_decode = steps == 1
    name = f"decode, batch {batch}" if is_decode else f"prefill of {steps:,}"

    def export() -> ExportedProgram:
        return export_decoder(dims, batch, BEFORE if is_decode else steps, is_decode=is_decode)

    return Call(model, name, export, megatron_plan(dims, whole_head=False), is_decode, batch)


def find_machines(ranks: int, only: str = "") -> dict[str, Machine]:
    """The machines of the package, without those that are another one to so few ranks."""
    found: dict[str, Machine] = {}
    for name in shipped_machines():
        own = read_machine(name)
        if own.ranks_per_node >= ranks:
            own = dataclasses.replace(own, ranks_per_node=0, between_nodes={})
        if name.startswith(only) and all(
            dataclasses.replace(own, name=other) != known for other, known in found.items()
        ):
            found[name] = dataclasses.replace(own, name=name)
    return found


def with_latencies(machine: Machine, factor: float) -> Machine:
    """The machine with every latency of a link times a factor."""

    def scaled(links: Links) -> Links:
        return {
            of: [own._replace(latency=own.latency * factor, hop=own.hop * factor) for own in each]
            for of, each in links.items()
        }

    return dataclasses.replace(machine, links=scaled(machine.links), between_nodes=scaled(machine.between_nodes))


def predict_seconds(found: Solution, machine: Machine) -> float:
    return measure_step_time(found, machine).total


def place_on(machine: Machine, conversions: Sequence[Conversion]) -> Solution:
    return find_placements([dataclasses.replace(own.with_asked(memory=None), machine=machine) for own in conversions])


def decide(
    call: Call, ranks: int, machine: Machine, auto: Sequence[Conversion], megatron: Sequence[Conversion]
) -> Cell:
    found, theirs = place_on(machine, auto), place_on(machine, megatron)
    changed: dict[float, tuple[float, float]] = {}
    for factor in (0.5, 2.0) if call.is_decode else ():
        other = with_latencies(machine, factor)
        then = place_on(other, auto)
        if then.styles != found.styles:
            changed[factor] = predict_seconds(found, other), predict_seconds(then, other)
    ours, megatrons = predict_seconds(found, machine), predict_seconds(theirs, machine)
    sends = sum(".layer" in f".{module_path(value)}" for value, _ in sends_of(found)) / LAYERS  # of a layer's values
    return Cell(call, ranks, machine.name, ours, megatrons, sends, changed)


def decide_call(call: Call, ranks: Sequence[int] = RANKS, machine: str = "") -> Iterator[Cell]:
    """The cells of a call, on machines whose name begins so."""
    exported = call.export()
    for n in ranks:
        ours, theirs = ([*Request(exported, n, plan).conversions().values()] for plan in ("auto", call.plan))
        for each in find_machines(n, machine).values():
            yield decide(call, n, each, ours, theirs)


def render_table(cells: Sequence[Cell]) -> Iterator[str]:
    """Lines of Markdown: by model and call, of each number of ranks the least and the greatest over all machines."""
    ranks = sorted({cell.ranks for cell in cells})
    yield f"| model | call | {' | '.join(f'tp={n}' for n in ranks)} |"
    yield f"|{'---|' * (len(ranks) + 2)}"
    for call in dict.fromkeys((cell.call.model, cell.call.name) for cell in cells):
        own = [cell for cell in cells if (cell.call.model, cell.call.name) == call]
        ratios = [_span([f"{cell.ratio:.2f}" for cell in own if cell.ranks == n]) for n in ranks]
        yield f"| {' | '.join((*call, *ratios))} |"


def _span(values: Sequence[str]) -> str:
    least, most = min(values, key=float), max(values, key=float)
    return least if least == most else f"{least} to {most}"


def list_exceptions(cells: Sequence[Cell]) -> Iterator[str]:
    """The cells that are not as they should be, in words."""
    decodes = [cell for cell in cells if cell.call.is_decode]
    slower = [cell for cell in cells if cell.ratio > EVEN]
    yield f"slower than Megatron's plan: {len(slower)} of {len(cells)}"
    yield from (f"  {_where(cell)}: {_both(cell.ours, cell.theirs)}" for cell in slower)
    eights = [cell for cell in decodes if cell.call.batch == 8]
    often = [cell for cell in eights if cell.sends > 2]
    yield f"more than two collectives in a layer of a decode of 8: {len(often)} of {len(eights)}"
    yield from (f"  {_where(cell)}: {cell.sends:g}" for cell in often)
    for factor, word in ((0.5, "halved"), (2.0, "doubled")):
        changed = [cell for cell in decodes if factor in cell.changed]
        yield f"another plan of a decode with latencies {word}: {len(changed)} of {len(decodes)}"
        yield from (f"  {_where(cell)}: {_both(*cell.changed[factor])}" for cell in changed)
        of = Counter((cell.call.model, cell.ranks) for cell in changed)
        yield from (f"  in all {model}, tp={n}: {count}" for (model, n), count in of.items())


def _where(cell: Cell) -> str:
    return f"{cell.call.model}, {cell.call.name}, tp={cell.ranks}, {cell.machine}"


def _both(one: float, other: float) -> str:
    return f"{duration(one)} against {duration(other)} ({one / other - 1:+.1%})"


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="models whose name begins so")
    options.add_argument("--machine", default="", help="machines whose name begins so")
    options.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    asked = options.parse_args(words)
    warnings.simplefilter("ignore")
    cells, chosen = list[Cell](), [call for call in find_calls() if call.model.startswith(asked.only)]
    for cell in (cell for call in chosen for cell in decide_call(call, asked.ranks, asked.machine)):
        cells.append(cell)
        said = f"{cell.ratio:.4f}, {cell.sends:g} a layer" + (f", {cell.changed}" if cell.changed else "")
        print(f"{_where(cell)}: {_both(cell.ours, cell.theirs)}, {said}", file=sys.stderr, flush=True)
    print("\n".join((*render_table(cells), "", *list_exceptions(cells))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
