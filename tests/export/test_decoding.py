"""Decoders of transformers read each head of their caches as it is stored, with the same numbers on all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tpcompiler
from tests.zoo.case import randomise
from tools.hf_models import ROWS
from tpcompiler.frontend.exporting import _export_dynamic
from tpcompiler.frontend.prefill_decode import build_steps
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.regions.group_queries import group_queries
from tpcompiler.plan.plan import Plan

NAMES = ("llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_oss", "mixtral", "glm4", "granite")
BATCH, HEADS, ROOM, FEATURES = 2, 4, 22, 8  # no other dim has as many as the cache has places


def programs(name: str) -> tuple[Any, dict[str, torch.export.ExportedProgram]]:
    """The config and the programs of a small model with random weights, of 2 heads of keys for 4 of queries."""
    torch.manual_seed(0)
    row = next(row for row in ROWS if row.model_type == name)
    config = row.config()
    model = randomise(
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), experts_implementation="batched_mm")
    )
    steps = build_steps(model.eval(), BATCH, 4, ROOM)
    limits = {"length": (2, ROOM)}
    return config, {
        each: _export_dynamic(name, step.eval(), step.example, limits).program for each, step in steps.items()
    }


def repeated(program: torch.export.ExportedProgram, keeps: bool) -> list[str]:
    """The values of the decode program that have all query heads over all places of the cache."""
    planned = apply_plan(canonicalize(program), Plan(), Mesh.of(1), None, None)
    graph = (planned if keeps else group_queries(planned)).graph
    size = BATCH * HEADS * ROOM * FEATURES
    return [
        node.name
        for node in edit.calls(graph)
        if edit.is_tensor(node)
        and ROOM in edit.shape(node)
        and edit.fake(node).untyped_storage().nbytes() >= size * edit.fake(node).element_size()
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_no_step_repeats_its_cache(name: str, tmp_path: Path) -> None:
    config, made = programs(name)
    assert not repeated(made["decode"], keeps=False)
    assert repeated(made["decode"], keeps=True)  # as transformers writes it
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    for ranks in (1, 2, 4) if name == "llama" else (4,):  # of 4 ranks two share a head
        converted = tpcompiler.parallelize(made, ranks, tmp_path / "config.json")
        for step in converted.values():
            assert step.verify().ok, f"{name} on {ranks} ranks"
