"""A wrong algorithm is noticed, though the compiler and the check share it or write it alike: the check has its own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpcompiler
from tests.trust.subjects import SUBJECTS, Subject, _subject
from tpcompiler.ir import nan_safe_reduce
from tpcompiler.judge.sound.check import CheckReport
from tpcompiler.rules import infer


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 0)


class Extrema(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.amax(0), (x * 2).amin(0)


def broken(patch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Run the function with one piece of its source replaced, whoever has imported it."""
    source = inspect.getsource(function)
    assert source.count(old) == 1
    made = dict(vars(sys.modules[function.__module__]))
    exec(source.replace(old, new), made)
    patch.setattr(function, "__code__", made[function.__name__].__code__)


def check(subject: Subject) -> CheckReport:
    return subject.check(subject.sound, with_original=False)


MUTANTS: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "no sum is pending": (infer.shardings, "if factor in rule.reduced for axis", "if False for axis", "attend"),
    "no sum of one gradient is pending": (
        infer.shardings,
        "if factor in sums for axis",
        "if False for axis",
        "trained",
    ),
    "a bias is no addend": (infer.shardings, "if index in rule.pattern.addends}", "if False}", "rows"),
    "what must be whole is cut": (infer._check, "if factor in rule.pattern.whole:", "if False:", "softmax"),
    "NaN is not above all": (nan_safe_reduce._nan, "limits.max if", "limits.max - 1 if", "extrema"),
    "NaN is not below all": (nan_safe_reduce._nan, "else limits.min", "else limits.min + 1", "extrema"),
    "NaN in the wrong place": (nan_safe_reduce._nan, 'op == "max"', 'op != "max"', "extrema"),
    "bits that are not flipped": (nan_safe_reduce._mirror, "torch.iinfo(bits.dtype).max)", "1)", "extrema"),
    "another sign": (nan_safe_reduce._mirror, "bits - 1", "bits - 2", "extrema"),
    "no extremum is lossy": (nan_safe_reduce.is_lossy, "op in EXTREMA", "False", "extrema"),
    "a minimum is not lossy": (nan_safe_reduce.is_lossy, "op in EXTREMA", 'op == "max"', "extrema"),
}
MOVES = "moves and reduces values, and does nothing else"
FINDINGS = {
    "no sum is pending": "pending",
    "no sum of one gradient is pending": "pending by its rule",
    "a bias is no addend": "its addends alone must be pending there",
    "what must be whole is cut": "is cut in a dim that its rule needs whole",
    "NaN is not above all": MOVES,
    "NaN is not below all": MOVES,
    "NaN in the wrong place": "what is encoded for",
    "bits that are not flipped": MOVES,
    "another sign": MOVES,
    "no extremum is lossy": "in which a backend may lose a rank's NaN",
    "a minimum is not lossy": "in which a backend may lose a rank's NaN",
}


def extrema() -> Subject:
    x = torch.randn(6, 4)
    exported = torch.export.export(Extrema(), (x,))
    return _subject(exported, {"tp": 2}, {}, [((x,), {})], inputs=["S(0)"])


def softmax() -> Subject:
    x = torch.randn(6, 4)
    exported = torch.export.export(Softmax(), (x,))
    return _subject(exported, {"tp": 2}, {}, [((x,), {})], inputs=["S(0)"], outputs=["S(0)"])


def trained() -> Subject:
    """Two convolutions: output channels add to the gradient of what the second reads, samples to that of its weight."""
    x = torch.randn(2, 4, 6, 6)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 6, 3))
    exported = tpcompiler.export_training(net, (x,), loss=lambda made: made.square().mean())
    return _subject(exported, {"tp": 2}, {"1": "colwise"}, [((x,), {})])


@pytest.mark.sample(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_algorithm_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, old, new, model = MUTANTS[name]
    make = {"softmax": softmax, "extrema": extrema, "trained": trained}.get(model) or SUBJECTS[model]
    assert check(make()).ok
    broken(monkeypatch, function, old, new)
    report = check(make())
    assert not report.ok
    assert FINDINGS[name] in report.findings[0]
