"""Rows of the table: the tensors in an artifact's files."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from tests.bad_input.row import Row, entries, loaded, manifest, state, state_of
from tests.runtime.models import PLAN, export_mlp
from tpcompiler import parallelize
from tpcompiler.errors import ArtifactError

AGAIN = "copy the artifact again, or convert the model again"
OF_TORCH = "copy the file again, or export the model again with this version of torch"
VERIFY = "tpcompiler verify out --against model.pt2"
BIAS = "layers.0.up.bias"


def without_an_entry(name: str, found: bytes) -> bytes | None:
    return None if name.endswith("weights/weight_1") else found


def without_a_name(name: str, found: bytes) -> bytes:
    if not name.endswith("model_weights_config.json"):
        return found
    data = json.loads(found)
    data["config"].pop(BIAS)
    return json.dumps(data).encode()


def one_more(held: dict[str, Any]) -> None:
    held["more"] = torch.ones(3)


def changed(held: dict[str, Any]) -> None:
    with torch.no_grad():
        held[BIAS][0] += 1


def not_finite(patch: pytest.MonkeyPatch) -> None:
    """A model of NaN, and what it is converted to."""
    program = export_mlp()
    with torch.no_grad():
        for value in program.state_dict.values():
            value.fill_(float("nan"))
    torch.export.save(program, "model.pt2")
    shutil.rmtree("out")
    parallelize(program, 2, PLAN).save("out")


SHORT, LONG = state_of({BIAS: torch.ones(1)}), state_of({BIAS: torch.ones(8, dtype=torch.float64)})

# In all of these the manifest has the hash of the file as it is.
WEIGHTS = [
    Row(
        "a weight has no content",
        "tpcompiler check out",
        "the tensors of out/rank_1.pt2 cannot be read: it has no entry data/weights/weight_1",
        AGAIN,
        spoil=entries("out/rank_1.pt2", without_an_entry),
    ),
    Row(
        "the same, to be loaded",
        lambda _: loaded("one"),
        "the tensors of one/rank_0.pt2 cannot be read: it has no entry data/weights/weight_1",
        AGAIN,
        spoil=entries("one/rank_0.pt2", without_an_entry),
        code=ArtifactError,
    ),
    Row(
        "a weight is missing",
        "tpcompiler check out",
        "out/rank_1.pt2 has no tensor 'layers.0.up.bias', which its program takes",
        AGAIN,
        spoil=entries("out/rank_1.pt2", without_a_name),
    ),
    Row(
        "a weight is missing, to be loaded",
        lambda _: loaded("one"),
        "one/rank_0.pt2 has no tensor 'layers.0.up.bias', which its program takes",
        AGAIN,
        spoil=entries("one/rank_0.pt2", without_a_name),
        code=ArtifactError,
    ),
    Row(
        "a weight too many, to be loaded",
        lambda _: loaded("one"),
        "one/rank_0.pt2 holds the tensor 'more', which its program does not take",
        AGAIN,
        spoil=state("one/rank_0.pt2", one_more),
        code=ArtifactError,
    ),
    Row(
        "a weight of another shape",
        "tpcompiler check out",
        "out/rank_1.pt2: 'layers.0.up.bias' is torch.float32 [1], its program takes torch.float32 [8]",
        AGAIN,
        spoil=state("out/rank_1.pt2", SHORT),
    ),
    Row(
        "another shape, to be loaded: torch would spread it over all features",
        lambda _: loaded("one"),
        "one/rank_0.pt2: 'layers.0.up.bias' is torch.float32 [1], its program takes torch.float32 [16]",
        AGAIN,
        spoil=state("one/rank_0.pt2", SHORT),
        code=ArtifactError,
    ),
    Row(
        "a weight of another dtype",
        "tpcompiler check out",
        "out/rank_1.pt2: 'layers.0.up.bias' is torch.float64 [8], its program takes torch.float32 [8]",
        AGAIN,
        spoil=state("out/rank_1.pt2", LONG),
    ),
    Row(
        "another dtype, to be loaded",
        lambda _: loaded("one"),
        "one/rank_0.pt2: 'layers.0.up.bias' is torch.float64 [16], its program takes torch.float32 [16]",
        AGAIN,
        spoil=state("one/rank_0.pt2", state_of({BIAS: torch.ones(16, dtype=torch.float64)})),
        code=ArtifactError,
    ),
    Row(
        "a number that was changed",
        "tpcompiler check out --against model.pt2",
        "NOT SOUND: 2 ranks, 1 graphs, 2 regions, 10 ops, 2 collectives\n  'layers.0.up.bias': the ranks' shares do not make the original's tensor",
        spoil=state("out/rank_1.pt2", changed),
        code=1,
    ),
    Row(
        "another model, to be checked",
        "tpcompiler check out --against other.pt2",
        "NOT SOUND: 2 ranks, 1 graphs, 2 regions, 10 ops, 2 collectives\n  the ranks take args.0, args.1, and the original args.0\n  the original has no tensor 'head.bias': it is another model",
        code=1,
    ),
    Row(
        "a tensor that the manifest names and no file has",
        lambda _: loaded("one"),
        "one/program.pt2 has no tensor 'more', and the manifest names it",
        AGAIN,
        spoil=manifest(lambda data: data["tensors"].append({**data["tensors"][0], "name": "more"}), "one"),
        code=ArtifactError,
    ),
    Row(
        "a manifest without the outputs",
        "tpcompiler inspect out --rank 0",
        "out/program.pt2: its program returns hidden, logits, the manifest says nothing",
        AGAIN,
        spoil=manifest(lambda data: data["outputs"].clear()),
    ),
    Row(
        "a manifest that calls an input otherwise, to be loaded",
        lambda _: loaded("one"),
        "one/program.pt2: its program takes x, shift, the manifest says y, shift",
        AGAIN,
        spoil=manifest(lambda data: data["inputs"][0].update(name="y"), "one"),
        code=ArtifactError,
    ),
    Row(
        "a model of NaN, where every output is NaN on both sides",
        VERIFY,
        "the single-device program gives no finite number in 36 ('hidden', 'logits'): there is nothing to compare",
        "look for NaN and infinity in the inputs and the weights",
        spoil=not_finite,
    ),
]
