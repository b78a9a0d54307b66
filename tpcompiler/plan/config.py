"""The plan that a Hugging Face config brings, in the names of the base model.

It is `base_model_tp_plan`, or the one for expert parallelism where there is no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tpcompiler.errors import PlanError

FIELD, OF_EXPERTS = "base_model_tp_plan", "base_model_ep_plan"
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")  # configs of their own, in a config


def is_config(data: object) -> bool:
    """Whether this is what Hugging Face writes as `config.json`, or a config itself."""
    return isinstance(data.get("model_type"), str) if isinstance(data, Mapping) else hasattr(data, FIELD)


def config_plan(config: Any, name: str) -> dict[str, str]:
    """The plan of a config, or of those of its parts: written in it, or else what transformers has for the type.

    Raises:
        PlanError: there is none, it is no mapping, or transformers is not installed.
    """
    if not isinstance(config, Mapping):
        config = {**config.to_dict(), FIELD: getattr(config, FIELD) or getattr(config, OF_EXPERTS, None)}
    types = [str(config["model_type"])]
    found = _written(config, name) or _known(types[0])
    for part in (config.get(key) for key in PARTS):
        if isinstance(part, Mapping) and isinstance(part.get("model_type"), str) and not found:
            types.append(part["model_type"])
            found |= _written(part, name) or _known(types[-1])
    if not found:
        raise PlanError(
            f"{name} brings no plan: transformers has none for {' or '.join(map(repr, types))}",
            help="begin with the plan that `tpcompiler inspect MODEL.pt2` proposes",
        )
    return found


def _written(config: Mapping[str, Any], name: str) -> dict[str, str]:
    plan = config.get(FIELD) or {}
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"{name} has a {FIELD} that is {type(plan).__name__}, where names of layers have styles",
            help='write it as {"layers.*.mlp.up_proj": "colwise"}, or leave it out',
        )
    return dict(plan)


def _known(model_type: str) -> dict[str, str]:
    try:
        configs = importlib.import_module("transformers").CONFIG_MAPPING
    except ImportError as error:
        raise PlanError(
            f"the plan for {model_type!r} is in transformers, which is not installed",
            help='install transformers, or write the plan as a file, such as "layers.*.mlp.up_proj": colwise',
        ) from error
    if model_type not in configs:
        return {}
    found = configs[model_type]
    return dict(getattr(found, FIELD, None) or getattr(found, OF_EXPERTS, None) or {})
