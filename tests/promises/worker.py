"""One rank: what each rank of real processes gets from a saved program, called in every way."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import tpcompiler
from tests.long import some
from tests.promises.models import CASES
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.runtime.inputs import flatten_inputs

Bits = dict[str, str]
INDUCTOR = some(("conv", "odd"), 2)  # one that g++ compiles in two seconds, and another


def bits(value: torch.Tensor) -> str:
    """Shape, strides and content."""
    content = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    return f"{tuple(value.shape)} {value.stride()} {content}"


class Replicas(fx.Interpreter):
    """Run the graph itself, and note the bits of every value that claims to be replicated."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self.found: Bits = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and read_claim(n).sharding == ["R"]:
            self.found[f"{read_claim(n).origin} {read_claim(n).reshard or ''}"] = bits(value)
        return value


def replicas(program: ExportedProgram, inputs: dict[str, torch.Tensor]) -> Bits:
    feed = iter(flatten_inputs(program, (), inputs))
    state = {**program.state_dict, **program.constants}
    arguments = [state[s.target] if s.target in state else next(feed) for s in program.graph_signature.input_specs]
    run = Replicas(program)
    with torch.no_grad():
        outputs = run.run(*arguments)
    return run.found | {f"output {i}": bits(v) for i, v in enumerate(outputs) if isinstance(v, torch.Tensor)}


def flat(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def largest(got: Any, want: Any) -> float:
    """The largest difference over all outputs, relative to the largest magnitude of each."""
    pairs = zip(flat(got), flat(want), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def gradients(program: ExportedProgram, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the sum of squares of the first output."""
    module = program.module()
    named = dict(module.named_parameters())
    loss = flat(module(**inputs))[0].square().sum()
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), materialize_grads=True), strict=True))


def main(folder: Path, names: list[str], compile_too: bool) -> None:
    for name in names:
        module = tpcompiler.load(folder / name)
        rank = dist.get_rank()
        program, inputs = module.exported_program, CASES[name].inputs
        first = module(**inputs)
        result: dict[str, Any] = {"replicas": replicas(program, inputs)}
        result["module"] = {f"output {i}": bits(value) for i, value in enumerate(flat(first))}
        result["strides"] = [value.stride() for value in flat(first)]
        result["again"] = largest(module(**inputs), first)
        try:
            sum(value.sum() for value in flat(first)).backward()
        except RuntimeError as error:
            result["backward"] = str(error)
        tree = torch.export.unflatten(program)
        with torch.no_grad():
            result["unflattened"] = largest(tree(**inputs), first)
        result["modules"] = [n for n, _ in tree.named_modules() if n]
        if name == "odd":
            result["gradients"] = gradients(program, inputs)
        if compile_too:
            for backend in ("aot_eager", *(["inductor"] if name in INDUCTOR else [])):
                compiled = torch.compile(module, fullgraph=True, backend=backend)
                result[backend] = largest(compiled(**inputs), first)
        for fqn, value in program.state_dict.items():
            if rank == 1 and fqn.endswith("norm.weight"):  # the negative control: another bit in what is replicated
                value.data[0] = torch.nextafter(value.data[0], torch.tensor(9.0))
        result["disturbed"] = replicas(program, inputs)
        torch.save(result, folder / f"{name}.{rank}.out")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[3:], sys.argv[2] == "compile")
