"""Judge one output of all ranks against the single device's, at a tolerance derived from the program itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join
from tpcompiler.runtime.records import Record

# A sum of the same terms in another order has a rounding error of the same size as the first order's. The error of
# one order is measured (float32 against float64); 8 allows for the spread of the maximum over a few outputs. A wrong
# shard or a missing reduction is off by about 1, five orders of magnitude above.
SPREAD = 8.0
FLOOR = 16.0  # units of machine epsilon: two orders of summation cannot be distinguished below this
# Where rounding decides between two branches, float32 and float64 may differ by anything. An error above half of the
# output's scale is still wrong, unless the two differ by at most ROUNDED units of machine epsilon of the input values:
# an output that is zero except for rounding, such as the mean of normalised values, has no scale.
CEILING = 0.5
ROUNDED = 64.0
# The error of one order in one number may be small by chance, and float64 has no wider type to be measured in. So
# outputs of at most FEW elements, and those in float64, are judged by the largest of ROUNDINGS more errors, those of
# values that are moved by a unit in the last place.
FEW, ROUNDINGS = 16, 4
# Next to a mask's -1e9, no logit of 10 could be wrong relative to the scale. Values this far apart, the larger ones at
# least LARGE, are judged separately.
GAP, LARGE = 1e3, 1e4


class Difference(Record, frozen=True, omit_defaults=False):
    """One output, or a value that is written back."""

    name: str  # of the output, or of the value that is written back
    abs: float  # the largest difference over all ranks
    rel: float  # the same over the largest magnitude of the reference, where it is largest relative to its tolerance
    tolerance: float  # the largest `rel` that is allowed (`bands`)
    ok: bool  # true if it is within that
    counted: bool = False  # true for integers and booleans, of which `abs` and `rel` count the wrong ones
    finite: bool = True  # true if the reference has a finite number; without one, being equal proves nothing
    strays: int = 0  # the elements that are NaN or infinite in the reference or on a rank, and not the same in both
    magnitude: float = 0.0  # the largest of the reference, 0 for integers and booleans


def incomparable(name: str) -> Difference:
    """Return the difference of values that are wrong and have no numbers to compare."""
    return Difference(name, float("inf"), float("inf"), 0.0, False)


@dataclass(frozen=True)
class Layout:
    """The shardings of tensors at the boundary, by name; `output NAME` for an output."""

    mesh: Mesh
    shardings: Mapping[str, Sharding]

    def cut(self, name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's share of a global tensor."""
        return cut(value, self.shardings[name], self.mesh, rank)

    def join(self, name: str, parts: Sequence[torch.Tensor], shape: torch.Size) -> list[torch.Tensor]:
        """Join the ranks' shares: one whole tensor for each set of replicas."""
        return join(parts, self.shardings[name], self.mesh, shape)


def difference(
    name: str,
    laid_out: str,
    want: Any,
    exact: Any,
    parts: Sequence[Any],
    layout: Layout,
    magnitude: float,
    others: Sequence[torch.Tensor] = (),
) -> Difference:
    """Return the difference of one output or value written back.

    `laid_out` is its name in the layout, `magnitude` the largest magnitude in the program's computation, `others` are
    more roundings of `want`.
    """
    if not isinstance(want, torch.Tensor):
        return Difference(name, 0.0, 0.0, 0.0, True) if all(part == want for part in parts) else incomparable(name)
    want, exact, parts = (
        want.detach().cpu(),
        exact.detach().cpu(),
        [part.detach().cpu() for part in parts],
    )  # a program may use two devices
    try:
        whole = layout.join(laid_out, parts, want.shape)
    except (RuntimeError, ValueError):
        return incomparable(name)
    if any(w.shape != want.shape or w.dtype != want.dtype for w in whole):
        return incomparable(name)
    if not want.numel():
        return Difference(name, 0.0, 0.0, 0.0, True)
    if not is_rounded(want):
        wrong = max(float((w != want).sum()) for w in whole)
        return Difference(name, wrong, wrong, 0.0, wrong == 0, counted=True)
    epsilon = torch.finfo(want.dtype).eps
    largest, verdicts = 0.0, []
    for band in bands(exact):
        scale, noise = scale_and_noise(want[band], exact[band])
        noise = max([noise, *(largest_difference(o.cpu()[band], want[band]) / scale for o in others)])
        tolerance = max(SPREAD * noise, FLOOR * epsilon)
        if noise * scale > ROUNDED * epsilon * magnitude:
            tolerance = min(tolerance, CEILING)
        off = max(largest_difference(w[band], want[band]) for w in whole)
        largest = max(largest, off)
        verdicts.append((off / scale / tolerance, off / scale, tolerance))
    _, rel, tolerance = max(verdicts)
    finite = bool(widened(want).isfinite().any())
    strays = max(_count_strays(w, want) for w in whole)
    ok = rel <= tolerance and not strays
    magnitude = largest_magnitude([want])
    return Difference(name, largest, rel, tolerance, ok, finite=finite, strays=strays, magnitude=magnitude)


def bands(exact: torch.Tensor) -> list[torch.Tensor]:
    """Return masks of the elements that are judged together: one, or several if magnitudes have a `GAP`."""
    size = exact.abs().nan_to_num(nan=0.0, posinf=0.0)
    if size.amax() < LARGE:
        return [torch.full_like(size, True, dtype=torch.bool)]
    rising = size.flatten().sort().values
    above = rising[1:][(rising[1:] >= LARGE) & (rising[1:] > GAP * rising[:-1])]
    number = torch.bucketize(size, above, right=True)
    return [number == band for band in range(len(above) + 1)]


def scale_and_noise(want: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return the largest finite magnitude, and the rounding error relative to it."""
    want, exact = widened(want), widened(exact)
    finite = want.isfinite() & exact.isfinite()
    if not finite.any():
        return 1.0, 0.0
    scale = float(max(exact[finite].abs().amax(), want[finite].abs().amax())) or 1.0
    return scale, float((want[finite] - exact[finite]).abs().amax()) / scale


def largest_magnitude(values: Iterable[Any]) -> float:
    """Return the largest finite magnitude in tensors of floats, or 0."""
    rounded = (value.detach() for value in values if isinstance(value, torch.Tensor) and is_rounded(value))
    return max((float(widened(v).abs().nan_to_num(0.0, 0.0, 0.0).amax()) for v in rounded if v.numel()), default=0.0)


def ordinary_magnitude(values: Iterable[Any]) -> float:
    """Return the largest magnitude in tensors of floats, without the numbers of a mask, which `bands` sets apart."""
    rounded = (value.detach() for value in values if isinstance(value, torch.Tensor) and is_rounded(value))
    return largest_magnitude(value[bands(widened(value))[0]] for value in rounded if value.numel())


def largest_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference; equal infinities, and NaNs in the same places, are equal."""
    got, want = widened(got), widened(want)
    same = (got == want) | (got.isnan() & want.isnan())
    apart = torch.where(same, 0.0, (got - want).abs())
    return float(apart.nan_to_num(nan=float("inf")).amax())


def _count_strays(got: torch.Tensor, want: torch.Tensor) -> int:
    """Count the elements that are NaN or infinite in one tensor and differ from the other's."""
    got, want = widened(got), widened(want)
    same = (got == want) | (got.isnan() & want.isnan()) | (got.isfinite() & want.isfinite())
    return int((~same).sum())


def is_rounded(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def widened(value: torch.Tensor) -> torch.Tensor:
    """Convert to double precision: torch has no isfinite for float8."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
