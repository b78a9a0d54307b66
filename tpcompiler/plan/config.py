"""The plan in a Hugging Face config, in the names of the base model.

It is `base_model_tp_plan`, or the expert-parallel plan if there is no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tpcompiler.errors import PlanError

FIELD, OF_EXPERTS = "base_model_tp_plan", "base_model_ep_plan"
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")  # nested configs


def is_config(data: object) -> bool:
    """Return True for the data of a Hugging Face `config.json`, or for a config object."""
    return isinstance(data.get("model_type"), str) if isinstance(data, Mapping) else hasattr(data, FIELD)


def config_plan(config: Any, name: str) -> dict[str, str]:
    """Return the plan of a config, or of its nested configs: written in it, or transformers' plan for the type.

    Raises:
        PlanError: there is no plan, it is no mapping, or transformers is not installed.
    """
    if not isinstance(config, Mapping):
        config = {**config.to_dict(), FIELD: getattr(config, FIELD) or getattr(config, OF_EXPERTS, None)}
    types = [str(config["model_type"])]
    plan = _plan_in_config(config, name) or _plan_of_type(types[0])
    for part in (config.get(key) for key in PARTS):
        if isinstance(part, Mapping) and isinstance(part.get("model_type"), str) and not plan:
            types.append(part["model_type"])
            plan |= _plan_in_config(part, name) or _plan_of_type(types[-1])
    if not plan:
        raise PlanError(
            f"{name} brings no plan: transformers has none for {' or '.join(map(repr, types))}",
            help="begin with the plan that `tpcompiler inspect MODEL.pt2` proposes",
        )
    return plan


def _plan_in_config(config: Mapping[str, Any], name: str) -> dict[str, str]:
    plan = config.get(FIELD) or {}
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"{name} has a {FIELD} that is {type(plan).__name__}, where names of layers have styles",
            help='write it as {"layers.*.mlp.up_proj": "colwise"}, or leave it out',
        )
    return dict(plan)


def _plan_of_type(model_type: str) -> dict[str, str]:
    try:
        configs = importlib.import_module("transformers").CONFIG_MAPPING
    except ImportError as error:
        raise PlanError(
            f"the plan for {model_type!r} is in transformers, which is not installed",
            help='install transformers, or write the plan as a file, such as "layers.*.mlp.up_proj": colwise',
        ) from error
    if model_type not in configs:
        return {}
    config_class = configs[model_type]
    return dict(getattr(config_class, FIELD, None) or getattr(config_class, OF_EXPERTS, None) or {})
