"""One plan for several programs: an entry must match in one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.passes.stages import Call
from tests.zoo.case import randomise
from tpcompiler.errors import PlanError
from tpcompiler.plan.plan import Plan, join_plans, share_plan
from tpcompiler.runtime.artifact import read_manifest

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

IDS, X = torch.arange(6).view(2, 3), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
CALLS = [("encode", (IDS, X)), ("decode", (IDS, X))]
PLAN = {
    "table": "embedding_rowwise",
    "encoder.up": "colwise",
    "encoder.down": "rowwise",
    "decoder.up": "colwise",
    "decoder.down": "rowwise",
}


def side() -> nn.Module:
    return Call(lambda self, x: x + self.down(torch.relu(self.up(x))), up=nn.Linear(8, 12), down=nn.Linear(12, 8))


def model(*, holds_all: bool) -> dict[str, ExportedProgram]:
    """An encoder and a decoder over one table; each program holds both sides, or only its own."""
    table, encoder, decoder = (randomise(part, n) for n, part in enumerate((nn.Embedding(12, 8), side(), side())))
    sides = {"encoder": encoder, "decoder": decoder}
    encode = Call(lambda self, ids, x: self.encoder(self.table(ids)), table=table, **sides)
    decode = Call(lambda self, ids, x: self.decoder(self.table(ids) + x), table=table, **sides)
    if not holds_all:
        del encode.decoder, decode.encoder
    return {"encode": export(encode, (IDS, X)), "decode": export(decode, (IDS, X))}


def placed(programs: tpcompiler.ParallelProgram) -> dict[str, object]:
    rows = (row for program in programs.values() for row in program.manifest().tensors)
    return {row.name: row.sharding for row in rows if row.name.endswith("weight")}


CUT = {
    "table.weight": "S(0)",
    "encoder.up.weight": "S(0)",
    "encoder.down.weight": "S(1)",
    "decoder.up.weight": "S(0)",
    "decoder.down.weight": "S(1)",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("holds_all", [False, True])
def test_an_entry_is_for_the_programs_that_use_what_it_names(holds_all: bool, tmp_path: Path) -> None:
    programs = tpcompiler.parallelize(model(holds_all=holds_all), 2, PLAN)
    assert programs.verify(CALLS).ok
    assert placed(programs) == CUT
    for program in programs.values():
        assert [c.kind for c in program.collectives()] == ["all_reduce"] * 2
    assert programs["encode"].manifest().plan == {n: PLAN[n] for n in ("table", "encoder.up", "encoder.down")}
    programs.save(tmp_path / "out")
    tpcompiler.open(tmp_path / "out").reshard(4, tmp_path / "four")  # by the entries of both programs
    four = {name: read_manifest(tmp_path / "four" / name) for name in programs}
    cut = {row.name: row.sharding for each in four.values() for row in each.tensors}
    assert {name: cut[name] for name in CUT} == CUT


@pytest.mark.slow
def test_the_search_fills_in_what_is_not_named_in_any() -> None:
    programs = model(holds_all=False)
    found = tpcompiler.find_plan(programs, 2, {"decoder.up": "colwise"}).to_data()
    assert found["decoder.up"] == "colwise"
    assert {"encoder.up", "table", "decoder.down"} <= found.keys()
    assert tpcompiler.parallelize(programs, 2, found).verify(CALLS).ok


@pytest.mark.parametrize("holds_all", [False, True])
def test_an_entry_that_matches_in_none(holds_all: bool) -> None:
    """Negative control; the help offers names of all programs."""
    with pytest.raises(PlanError) as error:
        tpcompiler.parallelize(model(holds_all=holds_all), 2, {**PLAN, "decoder.upp": "colwise"})
    assert error.value.message == "plan entry 'decoder.upp' matches nothing"
    assert "'decoder.up'" in str(error.value.help)


def test_a_plan_of_another_model() -> None:
    with pytest.raises(PlanError) as error:
        tpcompiler.parallelize(model(holds_all=True), 2, {"lm.up": "colwise", "lm.down": "rowwise", "**": "auto"})
    assert error.value.message.startswith("none of the plan's 2 entries matches: this program has '")
    assert error.value.help == 'give a plan of this model, or "auto", which finds one'


def test_what_no_program_uses() -> None:
    programs = model(holds_all=True)
    with pytest.raises(PlanError, match="no op of the program uses it"):
        tpcompiler.parallelize({"encode": programs["encode"]}, 2, PLAN)


@pytest.mark.sample(1)
@pytest.mark.parametrize("typo", [False, True])
def test_a_plan_of_ones_own_with_names_that_need_a_prefix(typo: bool) -> None:
    """The prefix is found, and what fits none is an error as it is without a prefix."""
    exported = export(randomise(Call(lambda self, x: self.model(x), model=side())), (X,))
    plan = {"up": "colwise", "down": "rowwise", **({"upp": "colwise"} if typo else {})}
    if not typo:
        assert tpcompiler.parallelize(exported, 2, plan).verify((X,)).ok
        return
    with pytest.raises(PlanError, match="plan entry 'upp' matches nothing"):
        tpcompiler.parallelize(exported, 2, plan)


def plans(entries: Mapping[str, object], *names: list[str]) -> list[Plan]:
    config = {"model_type": "llama", "base_model_tp_plan": entries}
    return [Plan.of(config).fitted(each) for each in names]


def test_entries_of_a_config_are_noted_where_no_program_has_them() -> None:
    one, two = ["model.a", "model.b"], ["model.b", "model.c"]
    entries = {"a": "colwise", "b": "colwise", "c": "rowwise", "d": "colwise"}
    shared = share_plan(plans(entries, one, two), [one, two], [one, two])
    assert [[entry.pattern for entry in plan.entries] for plan in shared] == [
        ["model.a", "model.b"],
        ["model.b", "model.c"],
    ]
    assert [plan.notes for plan in shared] == [("'d' matches nothing",)] * 2
    assert list(join_plans(shared).to_data()) == ["model.a", "model.b", "model.c"]


@pytest.mark.slow
def test_a_pattern_leaves_out_layers_that_no_op_uses() -> None:
    """A vision tower whose features are those before the last layer."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    exported = export(randomise(Call(lambda self, x: self.layers[1](self.layers[0](x)), layers=layers)), (X,))
    program = tpcompiler.parallelize(exported, 2, {"layers.*": "colwise_gather_output"})
    assert program.verify().ok
    assert len(program.collectives()) == 2
    with pytest.raises(PlanError, match=r"'layers.2': no op of the program uses it"):
        tpcompiler.parallelize(exported, 2, {"layers.2": "colwise_gather_output"})
