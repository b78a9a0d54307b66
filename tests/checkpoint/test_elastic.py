"""Another number of ranks, or one program again, from an artifact alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tpcompiler
from tests.checkpoint.models import PLAN, exported, hollow, model, write_checkpoint
from tests.runtime.commands import refused, right
from tests.runtime.poisons import entries_of, zipped
from tests.training.test_steps import Grouped
from tests.zoo.elastic import bits, there_and_back
from tests.zoo.index import CASES
from tpcompiler import ArtifactError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import cut, join_first, read_sharding
from tpcompiler.runtime.artifact import MANIFEST, MODEL, read_manifest, sha256, weights_file
from tpcompiler.runtime.program_files import open_program
from tpcompiler.runtime.rank_file import read_program, read_rank

PROGRAM = "models/model.json"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("elastic") / "two"
    tpcompiler.parallelize(exported(), 2, PLAN).save(out, layout="shared")
    return out


@pytest.mark.slow
def test_a_model_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Packed and uneven cuts; `make trust` takes the whole zoo that way."""
    said, wrong = there_and_back(CASES["gpt2"], tmp_path, "shared")
    assert not wrong, said
    assert "2 -> 3 uneven -> 1" in said


@pytest.mark.slow
def test_a_changed_weight_is_carried_along(tmp_path: Path) -> None:
    """Negative control: the weights are the ranks', and not some that were kept elsewhere."""
    tpcompiler.parallelize(hollow(), 2, PLAN).save(tmp_path / "two")
    changed = {"layers.0.up.bias": model().layers[0].up.bias.detach() + 1}
    tpcompiler.open(tmp_path / "two").cut(write_checkpoint(tmp_path / "c", **changed))
    tpcompiler.open(tmp_path / "two").reshard(3, tmp_path / "three")
    tpcompiler.open(tmp_path / "three").merge(tmp_path / "model.pt2")
    old, new = bits(exported()), bits(torch.export.load(tmp_path / "model.pt2"))
    assert {name for name in old if old[name] != new[name]} == {"layers.0.up.bias"}


@pytest.mark.slow
def test_several_programs_and_placements_at_the_boundary(tmp_path: Path) -> None:
    programs = {"one": exported(), "two": exported()}
    tpcompiler.parallelize(programs, 2, PLAN, outputs={"one": ["S(2)"]}).save(tmp_path / "out")
    tpcompiler.open(tmp_path / "out").reshard(3, tmp_path / "three")
    one, two = (read_manifest(tmp_path / "three" / name) for name in ("one", "two"))
    assert (one.outputs[0].sharding, two.outputs[0].sharding) == ("S(2)", "R")
    assert all(row.stored_in is not None for row in two.tensors)
    assert tpcompiler.open(tmp_path / "three").check(exported()).ok
    tpcompiler.open(tmp_path / "three" / "two").merge(tmp_path / "model.pt2")
    assert bits(torch.export.load(tmp_path / "model.pt2")) == bits(exported())


@pytest.mark.parametrize("placement", ["P(sum)", "P(avg)", "P(product)", "P(max)"])
def test_pending_shares_give_back_the_bits(placement: str) -> None:
    """A sum of zeros and -0 is 0, and the mean of three equals is rounded."""
    mesh, value = Mesh.of(3), torch.tensor([-0.0, 0.1, float("nan"), 1e-45])
    sharding = read_sharding(placement, mesh, 1)
    whole = join_first(lambda rank: cut(value, sharding, mesh, rank), sharding, mesh, value.shape)
    assert whole.view(torch.int32).tolist() == value.view(torch.int32).tolist()


def damage(out: Path, rank: int, name: str, layout: str) -> None:
    """Add one to what a rank holds of a tensor, and mend the hash."""
    path = out / (f"rank_{rank}.pt2" if layout == "ranks" else f"rank_{rank}.safetensors")
    if layout == "ranks":
        program, before = torch.export.load(path), entries_of(path)
        held = program.state_dict if name in program.state_dict else program.constants
        same = [each for each in held if held[each].data_ptr() == held[name].data_ptr()]
        held.update(dict.fromkeys(same, torch.nn.Parameter(held[name].detach() + 1)))
        torch.export.save(program, path)
        content = {**entries_of(path), PROGRAM: before[PROGRAM]}  # torch does not read the offsets of views back
        zipped(path, [(f"{path.stem}/{entry}", data) for entry, data in content.items()])
    else:
        held = load_file(path)
        save_file({**held, name: held[name] + 1}, path)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["files"][path.name] = sha256(path)
    (out / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["ranks", "shared"])
@pytest.mark.parametrize(
    ("sharding", "said"),
    [
        ("P(sum)", "rank 1 holds a term of its pending sum, which is rank 0's of 'tp' alone"),
        ("R", "it is not the same on ranks 0 and 1, which share it"),
    ],
)
def test_shares_that_do_not_belong_together(sharding: str, said: str, layout: Any, tmp_path: Path) -> None:
    """A term where a rank should hold zeros, and a replica that is another, under hashes that are right."""
    out = tmp_path / "out"
    plan = PLAN if sharding == "P(sum)" else {"layers.*.*": "replicate"}
    tpcompiler.parallelize(exported(), 2, plan).save(out, layout=layout)
    manifest = read_manifest(out)
    name = next(r.name for r in manifest.tensors if r.sharding == sharding and r.kind == "parameter")
    damage(out, 1, name, layout)
    assert not tpcompiler.open(out).check().ok
    with pytest.raises(ArtifactError, match=f"'{name}' cannot be put together: {said}"):
        tpcompiler.open(out).merge(tmp_path / "model.pt2")
    with pytest.raises(ArtifactError, match=f"'{name}' cannot be put together: {said}"):
        tpcompiler.open(out).reshard(3, tmp_path / "three")
    if sharding == "P(sum)":
        with pytest.raises(ArtifactError, match=f"'{name}' is P.sum., another rank holds all of it"):
            read_rank(open_program(out), 1)
    read_rank(open_program(out), 0)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_what_is_refused(two: Path, tmp_path: Path) -> None:
    tpcompiler.parallelize(hollow(), 2, PLAN).save(tmp_path / "uncut")
    for words in (["reshard", tmp_path / "uncut", "--tp", 4], ["reshard", "--single-device", tmp_path / "uncut"]):
        assert "has no weights of rank 0" in refused(*words, "-o", tmp_path / "new")
    assert "exists already" in refused("reshard", two, "--tp", 3, "-o", tmp_path / "uncut")
    assert "does not exist" in refused("reshard", tmp_path / "none", "--tp", 3, "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (two / "model.pt2").rename(tmp_path / "kept")
    try:
        assert "model.pt2 is missing" in refused("reshard", "--single-device", two, "-o", tmp_path / "new")
        (two / "model.pt2").write_bytes((tmp_path / "kept").read_bytes()[:-1] + b"x")
        assert "has SHA-256" in refused("reshard", "--single-device", two, "-o", tmp_path / "new")
    finally:
        os.replace(tmp_path / "kept", two / "model.pt2")
    with pytest.raises(ArtifactError, match="cannot write"):
        tpcompiler.open(two).merge(tmp_path / "no" / "new.pt2")


@pytest.mark.slow
def test_verify_and_check_with_the_checkpoint(tmp_path: Path) -> None:
    """The artifact's own model, and weights that are mapped; cut or not."""
    out, checkpoint = tmp_path / "out", write_checkpoint(tmp_path / "c")
    tpcompiler.parallelize(hollow(), 2, PLAN).save(out)
    assert "has no weights of rank 0" in refused("verify", out)
    uncut = right("verify", out, "--checkpoint", checkpoint)
    tpcompiler.open(out).cut(checkpoint)
    assert "the weights are the ranks' own" in right("verify", out)
    assert "pass --against" not in right("check", out, "--checkpoint", checkpoint)
    tpcompiler.save_weightless(read_program(open_program(out), MODEL), tmp_path / "model.pt2")
    assert uncut == right("verify", out, "--against", tmp_path / "model.pt2", "--checkpoint", checkpoint)
    torch.export.save(exported(), tmp_path / "whole.pt2")
    assert "is not needed" in refused("verify", out, "--against", tmp_path / "whole.pt2", "--checkpoint", checkpoint)
    write_checkpoint(checkpoint, **{"layers.0.up.bias": model().layers[0].up.bias.detach() + 1})
    assert not tpcompiler.open(out).check(checkpoint=checkpoint).ok


@pytest.mark.slow
def test_a_part_that_ranks_share_is_another_on_one(tmp_path: Path) -> None:
    """The rows of keys and values in a packed matrix, which both ranks hold next to their queries."""
    program = tpcompiler.export_training(Grouped(), (torch.randn(2, 6, 8),))
    tpcompiler.parallelize(program, 2, {"qkv": "colwise", "out": "rowwise"}).save(tmp_path / "out", layout="shared")
    path = tmp_path / "out" / weights_file(0)
    held = load_file(path)
    held["qkv.bias"][-1] += 1
    save_file(held, path)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    manifest["files"][path.name] = sha256(path)
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    assert "'qkv.bias' is not the same on ranks that share it" in str(tpcompiler.open(tmp_path / "out").check())
    with pytest.raises(ArtifactError, match=r"'qkv.bias' cannot be put together: it is not the same on rank"):
        tpcompiler.open(tmp_path / "out").merge(tmp_path / "model.pt2")
