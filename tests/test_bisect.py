"""A wrong conversion shrinks to the op that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.launch import fork_code
from tests.runtime.commands import call
from tests.runtime.models import randomised
from tpcompiler import parallelize, register_rule
from tpcompiler.api.bisect import bisect, write_piece
from tpcompiler.rules import registry

PLAN = {"first.up": "colwise", "first.down": "rowwise", "second.up": "colwise", "second.down": "rowwise"}


@torch.library.custom_op("tpcompiler_bisect::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


@centred.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layer(nn.Module):
    def __init__(self, centres: bool) -> None:
        super().__init__()
        self.centres = centres
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(centred(h) if self.centres else h)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(False), Layer(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    """That a mean over the last dim may be taken of a shard, of any size."""
    register_rule("tpcompiler_bisect::centred", "b c -> b c", shards="any")
    yield
    del registry._RULES[torch.ops.tpcompiler_bisect.centred.default]


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def test_a_right_conversion_has_no_wrong_piece() -> None:
    program = torch.export.export(randomised(Two()), (X,))
    assert bisect(program, 2, PLAN, (X,)) is None


@pytest.mark.usefixtures("wrong_rule")
def test_the_op_with_a_wrong_rule(tmp_path: Path) -> None:
    program = torch.export.export(randomised(Two()), (X,))
    piece = bisect(program, 2, PLAN, (X,))
    assert piece is not None
    assert piece.ops == ("centred ('centred')",)
    assert piece.plan == {}
    assert piece.inputs == ["S(1)"]
    script = write_piece(piece, tmp_path / "wrong")
    # Without the wrong rule the op is run whole, and the script says that all is right.
    code = "import sys, runpy, tests.test_bisect as t; from tpcompiler import parallelize, register_rule\n"
    wrong = 'register_rule("tpcompiler_bisect::centred", "b c -> b c")\n'
    for before, status, verdict in ((wrong, 1, "NOT EQUAL"), ("", 0, "equal")):
        done = fork_code(f"{code}{before}runpy.run_path({str(script)!r}, run_name='__main__')")
        assert done.returncode == status, done.stderr
        assert any(line.startswith(verdict) for line in done.stdout.splitlines()), done.stdout


@pytest.mark.usefixtures("wrong_rule")
def test_an_op_that_is_wrong_on_a_weight() -> None:
    """The placement of the weight is what makes it wrong."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * centred(self.scale)

    program = torch.export.export(Scaled(), (X,))
    piece = bisect(program, 2, {"scale": "S(1)"}, (X,))
    assert piece is not None
    assert (piece.ops, piece.plan, piece.inputs) == (("centred ('centred')",), {"scale": "S(1)"}, [])


def test_on_the_command_line(tmp_path: Path) -> None:
    """A file that was damaged, with its hash: converted anew, the model is right."""
    program = torch.export.export(randomised(Two()), (X,))
    torch.export.save(program, tmp_path / "model.pt2")
    other = torch.export.export(randomised(Two(), seed=1), (X,))
    parallelize(other, 2, PLAN).save(tmp_path / "out")
    words = ("verify", tmp_path / "out", "--against", tmp_path / "model.pt2", "--bisect", tmp_path / "wrong")
    done = call(*words)
    assert done.exit_code == 1, done.output
    assert "converted again, the model is right" in done.stderr
    assert not (tmp_path / "wrong").exists()
