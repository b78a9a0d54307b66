"""Dynamic sizes of an exported program, under the names that the example gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from tpcompiler._torch import find_failed_guard, input_values, sym_expr
from tpcompiler.frontend.example_inputs import Example

MOST = 1024  # of a size without a given limit


class Sizes:
    """The named sizes of an example's inputs, and the `dynamic_shapes` to try for them."""

    def __init__(self, example: Example, limits: Mapping[str, tuple[int, int]]) -> None:
        self._of, self._inputs = example.sizes, example.inputs
        self._example = {
            size: example.inputs[name].shape[dim] for name, dims in example.sizes.items() for dim, size in dims.items()
        }
        self._fixed: set[str] = set()
        self._limits = {size: limits.get(size, (1, MOST)) for size in self._example}

    def proposals(self) -> Iterator[dict[str, Any]]:
        """Yield shapes in which every size is dynamic, then those in which torch decides for each."""
        yield self._shapes({size: Dim(size, min=low, max=high) for size, (low, high) in self._limits.items()})
        yield self.automatic()

    def automatic(self) -> dict[str, Any]:
        """Return shapes in which torch decides for each size."""
        return self._shapes(
            {size: Dim.AUTO(min=low, max=high) for size, (low, high) in self._limits.items() if size not in self._fixed}
        )

    def fix_guarded(self, program: ExportedProgram) -> bool:
        """Fix the sizes for which the program accepts only some values, such as multiples of 4; return True if any."""
        guarded = {size for size in self._example if not self._is_free(program, size)}
        self._fixed |= guarded
        return bool(guarded)

    def _is_free(self, program: ExportedProgram, size: str) -> bool:
        other = self._example[size] + (1 if self._example[size] < self._limits[size][1] else -1)
        shapes = [list(self._inputs[str(name)].shape) for name in program.graph_signature.user_inputs]
        for name, shape in zip(program.graph_signature.user_inputs, shapes, strict=True):
            for dim, each in self._of[str(name)].items():
                shape[dim] = other if each == size else shape[dim]
        return not find_failed_guard(program, [torch.empty(shape, device="meta") for shape in shapes])

    def refinements(self, program: ExportedProgram) -> Iterator[dict[str, Any]]:
        """Yield better shapes for a program with sizes that torch chose: one symbol per size, and sizes down to 1."""
        values, ranges = self._values(program), program.range_constraints
        found = {
            size: (max(int(ranges[one].lower) for one in each), min(int(ranges[one].upper) for one in each))
            for size, each in values.items()
            if all(one in ranges for one in each)
        }
        wider = {size: (1 if self._limits[size][0] == 1 else low, high) for size, (low, high) in found.items()}
        if wider != found:
            yield self._shapes({size: Dim(size, min=low, max=high) for size, (low, high) in wider.items()})
        if any(len(set(each)) > 1 for each in values.values()):
            yield self._shapes({size: Dim(size, min=low, max=high) for size, (low, high) in found.items()})

    def describe(self, program: ExportedProgram, reason: str) -> str:
        """Describe in one line the dynamic sizes, the fixed ones, and the reason."""
        dynamic: list[str] = []
        fixed: dict[str, list[str]] = {}
        for size, values in self._values(program).items():
            if any(value.is_number for value in values):
                own = "torch.export takes 1 for a constant" if self._example[size] == 1 else reason
                fixed.setdefault(own, []).append(f"{size} {self._example[size]}")
                continue
            ranges = [program.range_constraints[value] for value in values if value in program.range_constraints]
            least = max((int(one.lower) for one in ranges), default=0)
            dynamic.append(f"{size} (from {least})" if least > self._limits[size][0] else size)
        parts = [f"dynamic: {', '.join(dynamic)}"] if dynamic else []
        return "; ".join([*parts, *(f"fixed: {', '.join(sizes)} ({reason})" for reason, sizes in fixed.items())])

    def _shapes(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: {dim: chosen[size] for dim, size in dims.items() if size in chosen} or None
            for name, dims in self._of.items()
        }

    def _values(self, program: ExportedProgram) -> dict[str, list[Any]]:
        """Map a size to its values in the shapes of the program's inputs, as expressions."""
        values = input_values(program)
        values_of: dict[str, list[Any]] = {}
        for name, dims in self._of.items():
            for dim, size in dims.items():
                values_of.setdefault(size, []).append(sym_expr(values[name].shape[dim]))
        return values_of
