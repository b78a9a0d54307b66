"""What one call sends, over the models of the tests: as it was converted, as counted by hand, and as DTensor runs it.

    python -m tools.bench_comm [--world 2] [NAME ...]

DTensor runs each model eagerly under `CommDebugMode`, with the same plan in `parallelize_module`, on the fake process
group: what it computes means nothing, what it sends does. Where it cannot, the line says why. Wire bytes are those that
each rank sends on a ring.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpcompiler
from tests.zoo.case import Case
from tests.zoo.index import CASES
from tpcompiler.cost.collective import KIND_OF, wire_bytes
from tpcompiler.plan.plan import Plan

Sent = tuple[int, Counter[str]]  # wire bytes, and calls by kind


class Unwritten(Exception):
    """The plan says what no style of torch does."""


class WireMode(CommDebugMode):
    """Sums up wire bytes too."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.bytes, self.kinds = world, 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        kind = KIND_OF.get(func.__name__.split(".")[0]) if func.namespace == "_c10d_functional" else None
        if kind is not None and out is not NotImplemented:
            payload = out if kind == "all_gather" else args[0]
            self.bytes += wire_bytes(kind, payload.numel() * payload.itemsize, self.world)
            self.kinds[kind] += 1
        return out


def torch_style(entry: Any, is_embedding: bool) -> ParallelStyle | None:
    """What torch has for an entry of a plan; None where the layer stays whole."""
    style = entry.style
    if style.whole or (style.outputs and style.cut is None):
        return None
    if style.packed or style.inputs or style.name == "placement":
        raise Unwritten(f"torch has no style like {style.written!r}")
    if style.cut == "out":
        return ColwiseParallel(output_layouts=style.outputs[0]) if style.outputs else ColwiseParallel()
    return RowwiseParallel(input_layouts=Replicate()) if is_embedding else RowwiseParallel()


def styles_of(model: nn.Module, plan: Mapping[str, object]) -> dict[str, ParallelStyle]:
    modules, found = dict(model.named_modules()), dict[str, ParallelStyle]()
    for entry in Plan.of(plan).entries:
        names = [name for name in modules if entry.matches(name)]
        if not names:
            raise Unwritten(f"'{entry.pattern}' names weights")
        for name in names:
            if style := torch_style(entry, isinstance(modules[name], nn.Embedding)):
                found[name] = style
    return found


def run_eagerly(case: Case, world: int, mesh: DeviceMesh) -> Sent:
    model = case.build()
    styles = styles_of(model, case.asked())
    parallelize_module(model, mesh, dict(styles))
    with torch.no_grad(), WireMode(world) as mode:
        model(**copy.deepcopy(case.inputs(*case.example)))
    return mode.bytes, mode.kinds


def convert(case: Case, world: int) -> Sent:
    made = tpcompiler.parallelize(case.export(False), world, case.asked()).collectives()
    return sum(c.wire_bytes for c in made), Counter(c.kind for c in made)


def by_hand(case: Case) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for (_, kind), count in case.by_hand().items():
        kinds[kind.partition(" ")[0]] += count
    return kinds


def said(kinds: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()) if count) or "nothing"


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="models of tests/zoo; without one, all")
    options.add_argument("--world", type=int, default=2)
    asked = options.parse_args(words)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=asked.world, store=FakeStore())
    mesh, verdicts = init_device_mesh("cpu", (asked.world,)), Counter[str]()
    for name in asked.names or CASES:
        case = CASES[name]
        ours, kinds = convert(case, asked.world)
        try:
            theirs, their_kinds = run_eagerly(case, asked.world, mesh)
            verdict = "more than ours" if theirs > ours else "the same" if theirs == ours else "less than ours"
            eager = f"{theirs:,} bytes ({said(their_kinds)}), {verdict}"
        except Exception as error:  # whatever torch says of a model that it cannot run
            text = str(error).strip().partition("\n")[0][:100]
            verdict, eager = "fails", f"fails: {type(error).__name__}: {text}"
        verdicts[f"DTensor: {verdict}"] += 1
        verdicts["as by hand" if kinds == by_hand(case) else "not as by hand"] += 1
        hand = said(by_hand(case)) + (", pending" if case.pending else "")
        print(f"{name}: {ours:,} bytes ({said(kinds)}); by hand {hand}; DTensor {eager}", flush=True)
    dist.destroy_process_group()
    print("; ".join(f"{verdict}: {count}" for verdict, count in sorted(verdicts.items())))
    return int(bool(verdicts["not as by hand"]))


if __name__ == "__main__":
    raise SystemExit(main())
