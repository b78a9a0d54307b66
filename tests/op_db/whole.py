"""Torch's samples through the whole compiler: export, cut one dim of one input, convert, run all ranks, compare, check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram

import tpcompiler.parallel.conversion
from tests.passes.stages import cuts_are_kept
from tpcompiler._torch import tree_flatten, tree_unflatten
from tpcompiler.errors import InternalError, TpCompilerError
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.passes._reshard_reasons import ALSO_ASKED
from tpcompiler.passes.canonicalize import canonicalize

WORLD = 2


@dataclass(frozen=True)
class Outcome:
    """What became of one cut: "right" (no fallback), "gathered" (right, with a reported fallback), "refused" (by an
    error of this package), "wrong" or "crash"."""

    what: str
    placed: str  # "1: S(0)": the second tensor of the sample, cut in its first dim; "" before any cut
    text: str = ""


class _Sample(torch.nn.Module):
    """One call of an op as a model: tensors are inputs, everything else is fixed."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op
        leaves, self.spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.leaves = [None if isinstance(v, torch.Tensor) else v for v in leaves]
        self.at = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
        # Slices of one memory are no inputs that a user gives.
        self.tensors = tuple(leaves[i].detach().clone() for i in self.at)

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


def largest(samples: Any, count: int) -> list[Any]:
    """The samples with the most dims of more than one element, in torch's order among equals."""
    return sorted(samples, key=_cuttable, reverse=True)[:count]


def _cuttable(sample: Any) -> int:
    tensors = (v for v in tree_flatten((sample.input, sample.args, sample.kwargs))[0] if isinstance(v, torch.Tensor))
    return sum(size > 1 for v in tensors for size in v.shape if v.numel())


def outcomes(op: Any, sample: Any) -> Iterator[Outcome]:
    """Every dim of more than one element of every tensor of the sample, cut by itself.

    Yields nothing where torch does not export the sample.
    """
    model = _Sample(op, sample)
    if not model.tensors:
        return
    with torch.no_grad():
        try:
            exported = torch.export.export(model, model.tensors)
        except Exception:
            return
    try:
        canonical = canonicalize(exported)
    except TpCompilerError as error:
        yield Outcome("refused", "", error.message)
        return
    except Exception as error:
        yield Outcome("crash", "", _said(error))
        return
    # `verify` compares with the canonical program here, so that one is compared with the op itself.
    want = model(*model.tensors)
    torch.manual_seed(42)  # as torch does in those samples that draw
    got = canonical.source.module()(*model.tensors)
    try:
        torch.testing.assert_close(got, want, equal_nan=True, check_stride=False)
    except AssertionError as error:
        yield Outcome("wrong", "", f"the canonical program: {_said(error)}")
        return
    with mock.patch("tpcompiler.parallel.conversion.canonicalize", return_value=canonical):
        for at, tensor in enumerate(model.tensors):
            for dim in (d for d, size in enumerate(tensor.shape) if size > 1):
                inputs = [f"S({dim})" if i == at else None for i in range(len(model.tensors))]
                yield _outcome(canonical.source, model.tensors, inputs, f"{at}: S({dim})")


def _outcome(exported: ExportedProgram, tensors: Any, inputs: Any, placed: str) -> Outcome:
    try:
        with cuts_are_kept():
            made = tpcompiler.parallelize(exported, WORLD, {}, inputs=inputs)
        report = made.verify(tensors)
        ranks = read_ranks(made.only)
        alarms = check_programs(ranks, made.manifest(), exported, model=canonicalize(made.only.original())).findings
        gathered = [c.reason for c in made.collectives() if c.why == "fallback" or ALSO_ASKED in c.reason]
    except InternalError as error:
        return Outcome("crash", placed, _said(error))
    except TpCompilerError as error:
        return Outcome("refused", placed, error.message)
    except Exception as error:
        return Outcome("crash", placed, _said(error))
    if not report.ok:
        return Outcome("wrong", placed, str(report))
    if alarms:
        return Outcome("wrong", placed, f"check: {alarms[0]}")
    return Outcome("gathered" if gathered else "right", placed, "; ".join(gathered))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
