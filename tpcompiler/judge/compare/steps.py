"""Steps of an optimizer in all runs of a program with gradients, and the difference of the parameters after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import RETURNED_KINDS
from tpcompiler.errors import InputsError
from tpcompiler.ir.program import Program, tied
from tpcompiler.judge.compare.judge import FLOOR, Difference, Layout, largest_magnitude, widened

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": lambda values: torch.optim.AdamW(values, lr=1e-3),
    "sgd": lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9),
}
# A gradient may be off by its tolerance, in another direction at each step. Four sign patterns that are orthogonal over
# four steps show at least half of the worst that this can do to a parameter (the norms of a vector's Walsh transform).
PATTERNS = 4
# That half, and that the single device and a rank may both be off, in opposite directions.
APART = 4.0


class OptimizerSteps:
    """The parameters of all runs, step after step, each with a separate optimizer.

    Args:
        program: the single-device program.
        optimizer: the name of one of `OPTIMIZERS`.

    Raises:
        InputsError: the program has no gradients, or no optimizer has the name.
    """

    def __init__(self, program: ExportedProgram, optimizer: str) -> None:
        if optimizer not in OPTIMIZERS:
            raise InputsError(f"there is no optimizer {optimizer!r}", help=f"name one of {', '.join(OPTIMIZERS)}")
        returned = [spec for spec in program.graph_signature.output_specs if spec.kind in RETURNED_KINDS]
        self.positions = {
            str(spec.target): at for at, spec in enumerate(returned) if spec.kind is OutputKind.GRADIENT_TO_PARAMETER
        }
        if not self.positions:
            raise InputsError(
                "the program returns no gradients, so an optimizer has nothing to do",
                help="leave out the steps, or export the model and its loss by tpcompiler.export_training",
            )
        own = Program(program, program.graph)
        fqns = {node.name: fqn for node, fqn in own.leaves()}
        self.aliases: dict[str, list[str]] = {}  # of a parameter, the names that share its memory
        for alias, first in tied(own).items():
            self.aliases.setdefault(fqns[first], []).append(fqns[alias])
        self.optimizer = optimizer
        self.number = 0
        self.runs: dict[int, _Parameters] = {}  # by the position of the run; those at the edges are below 0

    def take(
        self,
        gradients: Sequence[Sequence[Any]],
        read: Callable[[str, int], torch.Tensor],
        allowed: Mapping[int, float],
        layout: Layout,
    ) -> tuple[list[dict[str, torch.Tensor]], list[Difference]]:
        """Return the parameters of each run after a step, by all their names, and how far the ranks are off.

        Args:
            gradients: the results of each run: the single device, the same in float64, the ranks.
            read: returns a parameter of a run before its first step.
            allowed: by position among the results, by how much a gradient may be off.
        """
        with torch.inference_mode(False), torch.no_grad():
            stepped = [self._step(run, results, run, read) for run, results in enumerate(gradients)]
            exact, edges = gradients[1], []
            for pattern in range(PATTERNS):
                sign = -1.0 if (pattern & self.number).bit_count() % 2 else 1.0
                moved = list(exact)
                for at in self.positions.values():  # a zero too: two terms may cancel in one order, and not in another
                    moved[at] = exact[at] + sign * allowed[at]
                edges.append(self._step(-1 - pattern, moved, 1, read))
            self.number += 1
            found = [self._difference(name, stepped, edges, layout) for name in self.positions]
        return [{alias: own[name] for name in own for alias in self.aliases[name]} for own in stepped], found

    def _step(
        self, run: int, results: Sequence[Any], like: int, read: Callable[[str, int], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if run not in self.runs:
            self.runs[run] = _Parameters({name: read(name, like) for name in self.positions}, self.optimizer)
        return self.runs[run].step({name: results[at] for name, at in self.positions.items()})

    def _difference(
        self,
        name: str,
        runs: Sequence[Mapping[str, torch.Tensor]],
        edges: Sequence[Mapping[str, torch.Tensor]],
        layout: Layout,
    ) -> Difference:
        """Compare a parameter after a step; each element has a separate tolerance.

        AdamW makes a step of full length in the direction of a gradient, even of one that is zero up to rounding.
        """
        title = f"{name} after {self.optimizer}"
        want, exact, *parts = (each[name].cpu() for each in runs)
        try:
            whole = layout.join(name, parts, want.shape)
        except (RuntimeError, ValueError):
            return Difference(title, math.inf, math.inf, 0.0, False)
        scale = largest_magnitude([want, exact]) or 1.0
        bound = torch.full_like(widened(want), FLOOR * torch.finfo(want.dtype).eps * scale, dtype=torch.float64)
        for edge in edges:
            bound = torch.maximum(bound, APART * (widened(edge[name].cpu()) - widened(exact)).abs())
        off = torch.stack([(widened(each) - widened(want)).abs() for each in whole]).amax(0)
        if not off.numel():
            return Difference(title, 0.0, 0.0, 0.0, True)
        at = int((off / bound).nan_to_num(nan=math.inf).argmax())
        worst, limit = float(off.flatten()[at]), float(bound.flatten()[at])
        return Difference(
            title, float(off.amax()), worst / scale, limit / scale, worst <= limit, magnitude=largest_magnitude([want])
        )


class _Parameters:
    """The parameters of a run and the state of their optimizer."""

    def __init__(self, values: Mapping[str, torch.Tensor], optimizer: str) -> None:
        self.values = {name: value.detach().clone() for name, value in values.items()}
        self.optimizer = OPTIMIZERS[optimizer](self.values.values())

    def step(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, value in self.values.items():
            value.grad = gradients[name].detach().to(value)
        self.optimizer.step()
        return {name: value.detach().clone() for name, value in self.values.items()}
