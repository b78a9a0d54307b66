"""Plans as plain data: from a file in YAML (and so JSON), with the line of every entry, or from a Hugging Face config.

The plan in a config is `base_model_tp_plan`, or the expert-parallel plan if there is no other, in the names of the base
model.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping
from typing import Any

import yaml

from tpcompiler.errors import PlanError
from tpcompiler.runtime.hub import download_help
from tpcompiler.yaml_file import YamlError, compose, entries, plain, read_small_text

CONFIG = "config.json"
SEARCHES = ("auto", "auto:free")  # names of plans that the search finds
FIELD, OF_EXPERTS = "base_model_tp_plan", "base_model_ep_plan"
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")  # nested configs


def read_plan_file(name: str) -> list[tuple[str, object, int]]:
    """Return the entries of the plan file at the path `name`, in order: pattern, style as plain data, line.

    Raises:
        PlanError: the file cannot be read, is not a YAML mapping of text to styles, or has no entry.
    """
    try:
        root = compose(_read_text(name))
        if root is None or (isinstance(root, yaml.MappingNode) and not root.value):
            raise YamlError("is empty", 'write at least one entry, such as "*.up": colwise')
        if not isinstance(root, yaml.MappingNode):
            raise YamlError(
                "the plan is not a mapping",
                'write one "name": style on each line, such as "*.up": colwise',
                root.start_mark.line + 1,
            )
        # 7 and true are read as text, because no style is a number or a bool
        return [(pattern, plain(value), line) for pattern, value, line in entries(root)]
    except YamlError as error:
        where = f" line {error.line}:" if error.line else ":" if str(error).startswith("not YAML") else ""
        raise PlanError(f"plan file {name}{where} {error}", help=error.help) from None


def _help(name: str) -> str:
    """Return advice for a file that does not exist: its name may be misspelt, or the id of a model."""
    if near := difflib.get_close_matches(name, SEARCHES, n=1):
        return f"did you mean {near[0]}? or give the path of a YAML or JSON file"
    then = "its {}/config.json is a plan"
    return download_help(name, then) or "give the path of a YAML or JSON file"


def _read_text(name: str) -> str:
    try:
        text = read_small_text(name)
    except YamlError:
        raise
    except FileNotFoundError:
        raise PlanError(f"plan file {name} does not exist", help=_help(name)) from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        if os.path.isdir(name):
            raise PlanError(f"plan file {name} is a directory", help="give the path of a YAML or JSON file") from None
        reason = getattr(error, "strerror", None) or error
        raise PlanError(
            f"plan file {name!r} cannot be read: {reason}", help="give the path of a YAML or JSON file"
        ) from None
    # JSON may be indented with tabs, YAML may not; a JSON string never contains a raw tab.
    return text.replace("\t", " ") if name.endswith(".json") else text


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
