"""One rank of `answers_of_ranks`: make its calls of the package, and write the results and writes to a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler._torch import WRITTEN_KINDS, tree_flatten, tree_unflatten
from tpcompiler.checkpoint.load import load
from tpcompiler.judge.compare.processes import share_gpus


def main(directory: str, folder: str, trust: str, same_bits: str, checkpoint: str | None = None) -> None:
    share_gpus()
    loaded = load(directory, compiled=True, trust=bool(trust), checkpoint=checkpoint, same_bits=bool(same_bits))
    rank = dist.get_rank()
    answers = []
    for name, flat in torch.load(Path(folder) / f"{rank}.calls", weights_only=True):
        module = loaded[name] if isinstance(loaded, dict) else loaded
        answers.append(_call(module, module.exported_program, flat))
    torch.save(answers, Path(folder) / f"{rank}.answers")
    dist.destroy_process_group()


def _call(module: Any, program: ExportedProgram, flat: list[Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the flat outputs, and the values written, by the name of the buffer or input."""
    specs = program.graph_signature.input_specs
    taken = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    held: Mapping[str, Any] = {**program.constants, **program.state_dict, **dict(zip(taken, flat, strict=True))}
    written = [str(spec.target) for spec in program.graph_signature.output_specs if spec.kind in WRITTEN_KINDS]
    before = {name: held[name].clone() for name in program.graph_signature.buffers if name not in written}
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec) if program.call_spec.in_spec else (flat, {})
    outputs = tree_flatten(module(*args, **kwargs))[0]
    # Batch norm writes its statistics without a signature that says so.
    written += [name for name, value in before.items() if not torch.equal(value, held[name])]
    return [_own(value) for value in outputs], {name: _own(held[name]) for name in written}


def _own(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
