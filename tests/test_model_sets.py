"""Programs of several models in one artifact: degrees of their own, and calls of all of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.launch import called
from tests.passes.stages import Call
from tests.training.test_steps import group_of_one as group_of_one
from tests.zoo.case import randomise
from tpcompiler import ArtifactError, InputsError, MeshError, ParallelProgram, PlanError, ProgramError, UnsupportedError
from tpcompiler.parallel import model_families
from tpcompiler.parallel.converted_program import ConvertedProgram

PLAN = {"up": "colwise", "down": "rowwise"}
IDS, PIXELS = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
CALLS: list[Any] = [
    ("vision", (PIXELS + 1,)),
    ("prefill", lambda made: (IDS, made["vision"]["features"])),
    ("draft", lambda made: (made["prefill"]["logits"][:, -1:].argmax(-1),)),
    ("decode", lambda made: ((made["draft"]["logits"].argmax(-1),), {})),
    ("decode", (torch.tensor([[1], [2]]),)),
]


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": self.down(self.up(pixels).relu())}


class Language(nn.Module):
    """A model with a state, in place of a cache of keys and values."""

    cache: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, width), nn.Linear(width, 16)
        self.register_buffer("cache", torch.zeros(2, 8))

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        embedded = self.embed(ids) if features is None else self.embed(ids) + features
        embedded = embedded + self.cache.mean()
        self.cache.copy_(embedded[:, -1])
        return {"logits": self.down(self.up(embedded).relu())}


@cache
def models() -> tuple[Vision, Language, Language]:
    made = Vision(), Language(32), Language(24)
    for model in made:
        randomise(model)
    return made


@cache
def exported() -> dict[str, ExportedProgram]:
    vision, target, draft = models()
    return {
        "vision": export(vision, (PIXELS,)),
        "prefill": export(target, (IDS, PIXELS)),
        "decode": export(target, (IDS[:, :1],)),
        "draft": export(draft, (IDS[:, :1],)),
    }


@cache
def converted(world: int, degree: int) -> ParallelProgram:
    return tpcompiler.parallelize(exported(), world, PLAN, degrees={"draft": degree})


@pytest.mark.slow
def test_only_programs_of_one_model_share_tensors() -> None:
    program = converted(2, 2)
    families = {name: each.manifest().family for name, each in program.items()}
    assert families == {"vision": "vision", "prefill": "prefill", "decode": "prefill", "draft": "draft"}
    stored = {name: {row.name: row.stored_in for row in each.manifest().tensors} for name, each in program.items()}
    assert set(stored["decode"].values()) == {"prefill"}
    assert {*stored["draft"].values(), *stored["vision"].values()} == {None}
    (note,) = [note.text for note in program["prefill"].manifest().notes if note.kind == "apart"]
    assert note.startswith("vision: 4 names stand for other tensors")


def test_a_tensor_that_differs_in_programs_of_one_model_is_refused() -> None:
    _, target, _ = models()
    other = Language(32)
    other.load_state_dict(target.state_dict())
    with torch.no_grad():
        other.down.bias.add_(1)
    with pytest.raises(
        ProgramError, match=r"'down.bias' is .* in program 'prefill' .* in 'decode', or its values differ"
    ):
        tpcompiler.parallelize({**exported(), "decode": export(other, (IDS[:, :1],))}, 2, PLAN)


@pytest.mark.slow
def test_a_program_that_joins_two_models_makes_them_one() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    class Part(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

        def forward(self, x: torch.Tensor) -> Any:
            (part,) = self.children()
            return part(x)

    both, x = randomise(Both()), torch.randn(3, 8)
    parts = {"first": export(Part(one=both.one), (x,)), "second": export(Part(two=both.two), (x,))}
    apart = tpcompiler.parallelize(parts, 2, {})
    assert [each.manifest().family for each in apart.values()] == ["first", "second"]
    joined = tpcompiler.parallelize({**parts, "both": export(both, (x,))}, 2, {})
    assert [each.manifest().family for each in joined.values()] == ["first"] * 3
    assert {row.name: row.stored_in for row in joined["both"].manifest().tensors} == {
        "one.weight": "first",
        "one.bias": "first",
        "two.weight": "second",
        "two.bias": "second",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft", "vision"])
def test_a_report_names_the_wrong_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one rank has another bias."""
    right = ConvertedProgram.rank_program

    def wrong(self: ConvertedProgram, rank: int, weights: Any = None) -> ExportedProgram:
        made = right(self, rank, weights)
        if self.name == name and rank == 1:
            made.state_dict["up.bias"] = nn.Parameter(made.state_dict["up.bias"] + 1)
        return made

    monkeypatch.setattr(ConvertedProgram, "rank_program", wrong)
    report = tpcompiler.parallelize(exported(), 2, PLAN).verify(CALLS)
    assert not report.ok
    assert {each.name.partition("(")[2].partition(")")[0] for each in report.outputs if not each.ok} == {name}
    assert report.first_diverging is not None
    assert report.first_diverging.endswith(f"in {name}")


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("degree", [1, 2])
def test_copies_run_in_real_processes(degree: int, tmp_path: Path) -> None:
    converted(4, degree).save(tmp_path / "out")
    report = tpcompiler.open(tmp_path / "out").check()
    assert report.ok, str(report)
    calls = [("vision", PIXELS), ("prefill", IDS, PIXELS), *(("draft", IDS[:, :1]), ("decode", IDS[:, 1:2])) * 2]
    fresh = dict(zip(("vision", "target", "draft"), (Vision(), Language(32), Language(24)), strict=True))
    for own, model in zip(fresh.values(), models(), strict=True):
        own.load_state_dict(model.state_dict())
    of = {"prefill": "target", "decode": "target"}
    with torch.no_grad():
        expected = [fresh[of.get(name, name)](*args) for name, *args in calls]
    for own in called([calls] * 4, tmp_path):
        for got, want in zip(own, expected, strict=True):
            assert got.keys() == want.keys()
            for key in want:
                torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-4 * float(want[key].abs().max()))


def test_a_degree_that_cannot_be_is_refused() -> None:
    with pytest.raises(MeshError, match="the degree of 'draft' is 3, which does not divide the 4 ranks"):
        tpcompiler.parallelize(exported(), 4, PLAN, degrees={"draft": 3})
    with pytest.raises(PlanError, match="degrees names 'drafts', and the programs are vision, prefill, decode, draft"):
        tpcompiler.parallelize(exported(), 4, PLAN, degrees={"drafts": 1})


@pytest.mark.parametrize("degrees", [{"decode": 1}, {"prefill": 1}])
def test_a_buffer_that_programs_of_other_ranks_have_too_is_refused(degrees: dict[str, int]) -> None:
    """The cache that prefill writes would not be decode's; a draft's own cache of the same zeros is another one."""
    programs = {name: exported()[name] for name in ("prefill", "decode", "draft")}
    with pytest.raises(UnsupportedError, match=r"'cache' is a buffer that '(prefill|decode)' writes on tp=[12]"):
        tpcompiler.parallelize(programs, 2, PLAN, degrees={**degrees, "draft": 1})
    made = tpcompiler.parallelize(programs, 2, PLAN, degrees=dict.fromkeys(programs, 1))
    assert made.verify([("prefill", (IDS, PIXELS)), ("decode", (IDS[:, :1],))]).ok


@pytest.mark.parametrize("degrees", [{"decode": 1}, {"draft": 1}])
def test_an_artifact_of_such_programs_is_refused(degrees: dict[str, int]) -> None:
    """Nothing else sees it. The draft's cache of the same name is the draft's."""
    programs = {name: exported()[name] for name in ("prefill", "decode", "draft")}
    with patch.object(model_families, "_refuse_state_apart"):
        made = tpcompiler.parallelize(programs, 2, PLAN, degrees=degrees)
        calls = [("prefill", (IDS, PIXELS)), ("decode", (IDS[:, :1],))]
        if "draft" in degrees:
            assert made.check().ok
            assert made.verify(calls).ok
        else:
            text = "'cache' is a buffer that 'prefill' writes on tp=2, and 'decode' has its own on tp=1"
            assert text in str(made.check())
            with pytest.raises(ArtifactError, match=text):
                made.verify(calls)


@pytest.mark.slow
def test_a_parameter_that_is_trained_over_other_ranks_is_refused() -> None:
    """After a step the reader would have the old weights."""
    layers = {"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)}
    model, x = Call(lambda self, x: self.down(self.up(x)).mean(), **layers), torch.randn(4, 8)
    train, evaluate = tpcompiler.export_training(model, (x,)), export(model, (x,))
    plan = {"up": "colwise", "down": "rowwise"}
    for name in ("eval", "train"):
        with pytest.raises(UnsupportedError, match=r"'up.weight' is a parameter that 'train' trains on tp=[12]"):
            tpcompiler.parallelize({"train": train, "eval": evaluate}, 2, plan, degrees={name: 1})
    with pytest.raises(UnsupportedError, match=r"is a parameter that .(train|other). trains"):
        tpcompiler.parallelize({"train": train, "other": train}, 2, plan, degrees={"other": 1})
    made = tpcompiler.parallelize({"train": train, "eval": evaluate}, 2, plan)
    assert made.verify([("train", (x,)), ("eval", (x,))]).ok


@pytest.mark.slow
def test_a_parameter_that_a_program_with_another_buffer_trains_is_refused() -> None:
    """A mask of another length makes no other model; other weights do, with the same biases."""

    def model(length: int) -> Any:
        torch.manual_seed(0)
        forward = lambda self, x: (self.down(self.up(x)) * self.mask[: len(x), None]).mean()  # noqa: E731
        return Call(forward, up=nn.Linear(8, 8), down=nn.Linear(8, 8), mask=torch.ones(length))

    x, plan = torch.randn(4, 8), {"up": "colwise", "down": "rowwise"}
    train, longer, other = tpcompiler.export_training(model(16), (x,)), model(64), model(16)
    with pytest.raises(UnsupportedError, match=r"'up.weight' is a parameter that 'train' trains on tp=2"):
        tpcompiler.parallelize({"train": train, "eval": export(longer, (x,))}, 2, plan, degrees={"eval": 1})
    with torch.no_grad():
        other.up.weight.mul_(2)
        other.down.weight.mul_(2)
    made = tpcompiler.parallelize({"train": train, "other": export(other, (x,))}, 2, plan, degrees={"other": 1})
    assert made.verify([("train", (x,)), ("other", (x,))]).ok


def test_a_parameter_under_another_name_is_refused() -> None:
    model, x = Call(lambda self, x: self.up(x).square().mean(), up=nn.Linear(8, 8)), torch.randn(4, 8)
    inner = export(Call(lambda self, x: self.inner(x), inner=model), (x,))
    with pytest.raises(UnsupportedError, match=r"'up.weight', which 'train' changes, is 'inner.up.weight' in 'eval'"):
        tpcompiler.parallelize({"train": tpcompiler.export_training(model, (x,)), "eval": inner}, 2, {})


def test_an_input_from_an_earlier_call_that_does_not_fit_is_refused() -> None:
    calls = [*CALLS[:3], ("decode", lambda made: (made["draft"]["logits"],))]
    with pytest.raises(InputsError, match=r"'ids' is torch\.float32"):
        converted(2, 1).verify(calls)
