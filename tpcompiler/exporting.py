"""Export a model without its weights, from a Hugging Face directory or a factory of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from tpcompiler._torch import FakeTensorMode
from tpcompiler.errors import ArtifactError, ProgramError
from tpcompiler.runtime.model_file import import_modules
from tpcompiler.runtime.opened import read_text
from tpcompiler.runtime.target import reason
from tpcompiler.runtime.weightless import lazy_zeros, weightless

MOST_BATCH, MOST_TOKENS = 1024, 8192
FACTORY = "write module:factory, of a function that returns (model, args), (model, args, kwargs) or these and shapes"


def export_without_weights(
    source: str | os.PathLike[str],
    *,
    batch: int = 2,
    length: int = 16,
    dtype: str | None = None,
    static: bool = False,
) -> ExportedProgram:
    """Export a model whose parameters have no values; memory holds its graph and its small buffers only.

    Args:
        source: a Hugging Face directory, of which config.json is read and no weights, or `module:factory`: a function
            without arguments that returns (model, args), with kwargs, and dynamic shapes, behind them if there are any.
        batch: of the example's rows, at least 2 where the batch is dynamic.
        length: of its tokens, at least 2 where that is dynamic.
        dtype: of the parameters, such as "bfloat16"; by default the config's, or float32.
        static: make batch and length fixed numbers, as in the example; of a factory, what it says counts.

    Raises:
        ArtifactError: no config.json, a model that transformers does not have, a module that cannot be imported.
        ProgramError: torch.export cannot export it.
    """
    text = os.fspath(source)
    with weightless(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ":" in text and not os.path.exists(text):
            model, args, kwargs, shapes = _from_factory(text)
        else:
            model, args, kwargs, shapes = _from_directory(Path(text), batch, length, dtype, static)
        return _exported(text, model, args, kwargs, shapes)


def export_prefill_and_decode(
    source: str | os.PathLike[str], *, batch: int = 1, length: int = 16, max_length: int = 512, dtype: str | None = None
) -> dict[str, ExportedProgram]:
    """Export a Hugging Face decoder twice over one static cache of keys and values, its parameters without values.

    Both programs take `input_ids` and `cache_position` and return logits; the cache is buffers that they write.
    `prefill` takes 2 to `max_length` tokens, `decode` one. transformers' own wrapper for export makes them.

    Args:
        source: a Hugging Face directory, of which config.json is read and no weights.
        batch: the rows of both programs, fixed, as the cache's are.
        length: tokens of the example of `prefill`, at least 2.
        max_length: tokens that the cache has room for.
        dtype: as of `export_without_weights`.

    Raises:
        ArtifactError: as `export_without_weights`; no decoder.
        ProgramError: torch.export cannot export it.
    """
    with weightless(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, name = _model_of(Path(source), dtype)
        if "CausalLM" not in name:
            raise ArtifactError(
                f"{os.fspath(source)} is a {name}, which generates no text", help="export it without --prefill-decode"
            )
        length = min(max(length, 2), max_length - 1)
        module = _with_cache(model.eval(), batch, max_length)
        tokens = Dim("length", min=2, max=max_length)
        made = {}
        for program, count, dims in (("prefill", length, tokens), ("decode", 1, None)):
            inputs = {"input_ids": torch.ones(batch, count, dtype=torch.int64), "cache_position": torch.arange(count)}
            shapes = {"input_ids": {1: dims}, "cache_position": {0: dims}} if dims is not None else None
            made[program] = _exported(os.fspath(source), module, (), inputs, shapes, strict=True)
    return made


def _with_cache(model: Any, batch: int, max_length: int) -> torch.nn.Module:
    """transformers' wrapper with a static cache, whose zeros take no memory before they are written."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    wrapper: Any = TorchExportableModuleWithStaticCache

    class Positioned(wrapper):  # type: ignore[misc]
        """Looks positions up, so that one that the cache has no room for is refused as what it is: an input."""

        def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(max_length).index_select(0, cache_position)
            logits: torch.Tensor = super().forward(input_ids=input_ids, cache_position=positions)
            return logits

    model.generation_config.cache_implementation, model.generation_config.use_cache = "static", True
    model.config.use_cache = True
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = Positioned(model, batch, max_length, torch.device("cpu"))
    for index, layer in enumerate(module.static_cache.layers):
        for kind, attribute in (("key_cache", "keys"), ("value_cache", "values"), ("cumulative_length",) * 2):
            zeros = lazy_zeros(getattr(layer, attribute))
            setattr(layer, attribute, zeros)
            setattr(module, f"{kind}_{index}", zeros)
    return module


def _exported(
    text: str, model: torch.nn.Module, args: Any, kwargs: Any, shapes: Any, *, strict: bool = False
) -> ExportedProgram:
    try:
        return torch.export.export(model.eval(), tuple(args), dict(kwargs), dynamic_shapes=shapes, strict=strict)
    except Exception as error:  # whatever a model raises
        raise ProgramError(
            f"{text} cannot be exported: {_line(error)}",
            help="try --static, or export it in Python: with tpcompiler.weightless(): ...",
        ) from error


def _from_factory(text: str) -> tuple[torch.nn.Module, Any, Any, Any]:
    name, _, attribute = text.partition(":")
    import_modules([name])
    factory = getattr(importlib.import_module(name), attribute, None)
    if not callable(factory):
        raise ArtifactError(f"{name} has no function {attribute!r}", help=FACTORY)
    try:
        made = factory()
    except Exception as error:  # the user's own
        raise ProgramError(f"{text} raised {_line(error)}", help=FACTORY) from error
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4 or not isinstance(made[0], torch.nn.Module):
        raise ArtifactError(f"{text} returned a {type(made).__name__} that is no (model, args)", help=FACTORY)
    model, args, *rest = made
    kwargs, shapes = (*rest, None, None)[:2]
    return model, args, kwargs or {}, shapes


def _from_directory(
    path: Path, batch: int, length: int, dtype: str | None, static: bool
) -> tuple[torch.nn.Module, Any, Any, Any]:
    model, name = _model_of(path, dtype)
    config: Any = model.config
    config.use_cache = False
    names = ["input_ids"] if "CausalLM" in name else ["input_ids", "attention_mask"]
    names += ["decoder_input_ids"] if config.is_encoder_decoder else []
    inputs = {each: torch.ones(batch, length, dtype=torch.int64) for each in names}
    positions = getattr(config, "max_position_embeddings", None)
    most = min(positions, MOST_TOKENS) if isinstance(positions, int) and positions > 1 else MOST_TOKENS
    sizes = {0: Dim("batch", min=1, max=MOST_BATCH), 1: Dim("length", min=2, max=most)}
    return model, (), inputs, None if static else dict.fromkeys(names, sizes)


def _model_of(path: Path, dtype: str | None) -> tuple[torch.nn.Module, str]:
    """The model of a config.json, and its class's name."""
    file = path / "config.json" if path.is_dir() else path
    directory = f"give a Hugging Face directory, or {FACTORY}"
    try:
        data = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{file} cannot be read: {reason(error)}", help=directory) from error
    if not isinstance(data, Mapping) or "model_type" not in data:
        raise ArtifactError(f"{file} is no config of a model: it names no model_type", help=directory)
    if importlib.util.find_spec("transformers") is None:
        raise ArtifactError(f"{file} needs transformers, which is not installed", help="pip install transformers")
    import transformers

    name = str(next(iter(listed), "")) if isinstance(listed := data.get("architectures"), list) else ""
    build: Any = getattr(transformers, name, None) if name.isidentifier() else None
    if not hasattr(build, "_from_config"):
        raise ArtifactError(
            f"{file} names the architecture {name!r}, which transformers {transformers.__version__} lacks",
            help="export it in Python: with tpcompiler.weightless(): ...",
        )
    chosen = str(dtype or data.get("dtype") or data.get("torch_dtype") or "float32")
    found = getattr(torch, chosen, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArtifactError(f"{chosen!r} is no dtype of weights", help='give one such as "bfloat16"')
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, local_files_only=True)
        # Of experts' implementations the one that torch.export takes.
        experts = any(getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
        more = {"experts_implementation": "batched_mm"} if experts else {}
        return build._from_config(config, dtype=found, **more), name
    except Exception as error:  # whatever transformers raises of a config that makes no sense
        raise ArtifactError(f"{file} makes no {name}: {_line(error)}", help=directory) from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"
