"""Plans that a Hugging Face config brings: names that begin where the base model does, entries for other models too."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GptOssConfig, LlamaConfig, MixtralConfig

from tpcompiler.errors import PlanError, UnsupportedError
from tpcompiler.plan.plan import Plan

LLAMA = {
    f"layers.*.{name}": "rowwise" if name.endswith(("o_proj", "down_proj")) else "colwise"
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}


def names(prefix: str, plan: dict[str, str] = LLAMA) -> list[str]:
    return [f"{prefix}{pattern.replace('*', layer)}" for pattern in plan for layer in "01"]


def test_the_plan_of_a_config_file(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=16, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    for plan in (tmp_path, tmp_path / "config.json", str(tmp_path), config):
        found = Plan.of(plan)  # type: ignore[arg-type]
        assert found.to_data() == LLAMA
        assert found.of_config


def test_what_is_written_in_the_file_is_taken(tmp_path: Path) -> None:
    text = {"model_type": "llama", "base_model_tp_plan": {"layers.*.up": "colwise"}}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert Plan.of(tmp_path).to_data() == {"layers.*.up": "colwise"}


def test_the_plan_of_a_part(tmp_path: Path) -> None:
    text = {"model_type": "some_vision_model", "text_config": {"model_type": "llama"}, "id2label": {"0": "a"}}
    (tmp_path / "config.json").write_text(json.dumps(text, indent=2))
    assert Plan.of(tmp_path).to_data() == LLAMA


def test_a_config_without_a_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(PlanError) as raised:
        Plan.of(tmp_path)
    assert str(raised.value) == (
        "config.json brings no plan: transformers has none for 'bert'\n"
        "  help: begin with the plan that `tpcompiler inspect MODEL.pt2` proposes"
    )


@pytest.mark.parametrize("plan", [[1, 2], ["ab", "cd"], "abc"])
@pytest.mark.parametrize("part", [False, True])
def test_a_plan_that_is_no_mapping(plan: object, part: bool, tmp_path: Path) -> None:
    own = {"model_type": "none of them", "base_model_tp_plan": plan}
    text = {"model_type": "neither", "text_config": own} if part else own
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(PlanError) as raised:
        Plan.of(tmp_path)
    said = f"config.json has a base_model_tp_plan that is {type(plan).__name__}, where names of layers have styles"
    assert raised.value.message == said


@pytest.mark.parametrize("prefix", ["", "model.", "inner.model.", "model.language_model."])
def test_the_prefix_is_that_of_the_names(prefix: str) -> None:
    plan = Plan.of(LLAMA).fitted([*names(prefix), f"{prefix}norm", "lm_head"])
    assert plan.to_data() == {f"{prefix}{pattern}": style for pattern, style in LLAMA.items()}
    assert plan.assign(names(prefix)).keys() == set(names(prefix))
    assert not plan.notes


def test_a_name_with_any_beginning_is_no_whole_name() -> None:
    plan = Plan.of({**LLAMA, "**.layers.*.norm": "replicate"}).fitted([*names("model."), "model.layers.0.norm"])
    assert set(plan.to_data()) == {*(f"model.{pattern}" for pattern in LLAMA), "**.layers.*.norm"}


def test_the_prefix_that_most_entries_fit() -> None:
    """A draft model, and a vision tower with some layers of the same names."""
    few = {pattern: style for pattern, style in LLAMA.items() if "self_attn" in pattern}
    plan = Plan.of(LLAMA).fitted([*names("vision.", few), *names("text.")])
    assert set(plan.to_data()) == {f"text.{pattern}" for pattern in LLAMA}


def test_two_prefixes() -> None:
    with pytest.raises(PlanError) as raised:
        Plan.of(LLAMA).fitted([*names("one."), *names("two.")])
    assert str(raised.value) == (
        "the plan's names may be in 'one' and in 'two'\n"
        '  help: write whole names, such as "one.layers.*.self_attn.q_proj"\n'
        '  asked by: the plan ("layers.*.self_attn.q_proj": "colwise")'
    )


def test_an_entry_for_another_model_is_noted() -> None:
    more: Any = SimpleNamespace(
        base_model_tp_plan={**LLAMA, "layers.*.mlp.dense": "colwise"}, to_dict=lambda: {"model_type": "llama"}
    )
    plan = Plan.of(more).fitted(names("model."))
    assert set(plan.to_data()) == {f"model.{pattern}" for pattern in LLAMA}
    assert plan.notes == ("'layers.*.mlp.dense' matches nothing",)
    assert Plan.of(more).fitted(names("")).notes == ()


def test_a_slip_in_a_plan_of_ones_own_is_an_error() -> None:
    """No prefix is looked for where some names are whole."""
    plan = {"model.layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.up_proj": "colwise"}
    with pytest.raises(PlanError, match=r"^plan entry 'layers.\*.mlp.up_proj' matches nothing"):
        Plan.of(plan).fitted(names("model.")).assign(names("model."))


@pytest.mark.parametrize("config", [GptOssConfig(), GptOssConfig().to_dict()], ids=["config", "its data"])
def test_a_plan_for_experts_alone(config: Any) -> None:
    plan = Plan.of(config).to_data()
    assert plan["layers.*.mlp.experts.down_proj_bias"] == "grouped_gemm"
    assert len(plan) == 5


def test_styles_of_experts() -> None:
    """What a plan cuts inside of experts is taken; which rank has which expert has no style yet."""
    own = MixtralConfig().base_model_tp_plan
    assert set(Plan.of(MixtralConfig()).to_data()) == own.keys()  # type: ignore[arg-type]
    plan = {**own, "layers.*.mlp.experts": "megamoe_experts"}
    with pytest.raises(UnsupportedError) as raised:
        Plan.of(plan)
    assert str(raised.value).splitlines()[0] == ("style 'megamoe_experts' is recognised but not supported yet")
