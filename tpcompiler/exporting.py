"""Export a model without its weights, from a Hugging Face directory or a factory of the user's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.export import Dim, ExportedProgram

from tpcompiler._torch import FakeTensorMode, quiet_torch, tree_map
from tpcompiler.dynamic_sizes import Sizes
from tpcompiler.errors import ArtifactError, ProgramError
from tpcompiler.example_inputs import Example, build_example, configs_of
from tpcompiler.runtime.hub import download_help
from tpcompiler.runtime.model_file import import_modules
from tpcompiler.runtime.opened import read_text
from tpcompiler.runtime.target import reason
from tpcompiler.runtime.weightless import drop_buffer_values, lazy_zeros, weightless

MOST_TOKENS, MOST_SAMPLES = 8192, 1 << 20
REFUSED = " cannot be exported: "
FACTORY = "write module:factory, of a function that returns (model, args), (model, args, kwargs) or these and shapes"


class Export(NamedTuple):
    """A program, and which of its sizes are dynamic, in words."""

    program: ExportedProgram
    sizes: str


def export_without_weights(
    source: str | os.PathLike[str],
    *,
    batch: int = 2,
    length: int = 16,
    dtype: str | None = None,
    static: bool = False,
) -> Export:
    """Export a model whose parameters have no values; memory holds its graph and its small buffers only.

    Args:
        source: a Hugging Face directory, of which config.json is read and no weights, or `module:factory`: a function
            without arguments that returns (model, args), with kwargs, and dynamic shapes, behind them if there are any.
        batch: of the example's rows, at least 2 where the batch is dynamic.
        length: of its tokens, at least 2 where that is dynamic; of sound, as many steps.
        dtype: of the parameters, such as "bfloat16"; by default the config's, or float32.
        static: make all sizes fixed numbers, as in the example; of a factory, what it says counts.

    Raises:
        ArtifactError: no config.json, a model that transformers does not have, a module that cannot be imported.
        ProgramError: torch.export cannot export it, or it takes inputs of an unknown kind.
    """
    text = os.fspath(source)
    with weightless(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ":" in text and not os.path.exists(text):
            model, args, kwargs, shapes = _from_factory(text)
            return Export(_exported(text, model, kwargs, shapes, args), "")
        return _export_directory(Path(text), batch, length, dtype, static)


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
            made[program] = _exported(os.fspath(source), module, inputs, shapes, strict=True)
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
    text: str,
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    shapes: Any = None,
    args: Any = (),
    *,
    strict: bool = False,
) -> ExportedProgram:
    kwargs = tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, dict(kwargs))
    try:  # on copies: torch marks the examples of dynamic inputs
        with quiet_torch(), contextlib.redirect_stderr(io.StringIO()):  # it prints the graph that it could not finish
            return torch.export.export(model.eval(), tuple(args), kwargs, dynamic_shapes=shapes, strict=strict)
    except Exception as error:  # whatever a model raises
        raise _not_exported(text, error) from error


def _not_exported(text: str, error: Exception) -> ProgramError:
    """Name the line of the model that cannot be exported, in place of torch's own account of it."""
    of_torch, line = type(error).__module__.startswith("torch."), _line_of_model(error)
    reason = f"torch.export cannot trace {line}" if of_torch and line else f"{_line(error)}{line and f', in {line}'}"
    return ProgramError(
        f"{text}{REFUSED}{reason}",
        help="change the model there, or export it with a function that returns (model, args, kwargs): module:factory",
    )


def _line_of_model(error: BaseException | None) -> str:
    """The innermost line of the model's code that an error or its cause went through."""
    others, found = (Path(torch.__file__).parent, Path(__file__).parent), ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            file = Path(frame.filename)
            is_python = file.is_relative_to(Path(os.__file__).parent) and "site-packages" not in file.parts
            if file.is_absolute() and not is_python and not any(file.is_relative_to(folder) for folder in others):
                found = f"{file.parent.name}/{file.name}:{frame.lineno}: {frame.line}"
        error = error.__cause__ or error.__context__
    return found


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


def _export_directory(path: Path, batch: int, length: int, dtype: str | None, static: bool) -> Export:
    model: Any = _model_of(path, dtype)[0].eval()
    for module in model.modules():
        for config in configs_of(module.config) if hasattr(module, "config") else ():
            config.use_cache = False
    try:
        example = build_example(model, batch, length)
    except Exception as error:  # whatever a model raises that computes its features
        raise error if isinstance(error, ProgramError) else _not_exported(str(path), error) from error
    model.forward = _plain_forward(model.forward, example)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = min(positions, MOST_TOKENS) if isinstance(positions, int) and positions > 1 else MOST_TOKENS
    sizes = Sizes(example, {"length": (2, most), "target": (2, most), "samples": (2, MOST_SAMPLES)})
    reason = "by --static" if static else ""
    for shapes in () if static else sizes.proposals():
        try:
            program = _exported(str(path), model, example.inputs, shapes)
        except ProgramError as error:
            reason = error.message.partition(REFUSED)[2]
            continue
        for better in sizes.refinements(program):
            with contextlib.suppress(ProgramError):
                program = _exported(str(path), model, example.inputs, better)
                break
        return Export(program, sizes.describe(program, "the model's code depends on it"))
    return Export(program := _exported(str(path), model, example.inputs), sizes.describe(program, reason))


def _plain_forward(forward: Any, example: Example) -> Any:
    """Return a forward that takes the example's inputs only, and returns tensors only: no caches, no None."""

    def call(**inputs: torch.Tensor) -> Any:
        return _tensors_of(forward(**replace(example, inputs=inputs).arguments()))

    keyword = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in example.inputs])  # type: ignore[attr-defined]
    return call


def _tensors_of(value: Any) -> Any:
    """The tensors of an output, in plain dicts and tuples; None where it has none."""
    if isinstance(value, Mapping):
        return {name: made for name, each in value.items() if (made := _tensors_of(each)) is not None} or None
    if isinstance(value, tuple | list):
        return tuple(made for each in value if (made := _tensors_of(each)) is not None) or None
    return value if isinstance(value, torch.Tensor) else None


def _model_of(path: Path, dtype: str | None) -> tuple[torch.nn.Module, str]:
    """The model of a config.json, and its class's name."""
    file = path / "config.json" if path.is_dir() else path
    directory = f"give a Hugging Face directory, or {FACTORY}"
    if not os.path.lexists(path):
        raise ArtifactError(f"{path} does not exist", help=download_help(path, "give {}", bare=True) or directory)
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
        model = build._from_config(config, dtype=found, **more)
        stored, optional = _stored_names(file.parent), getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        drop_buffer_values(
            model, lambda buffer: buffer not in stored and any(re.search(pattern, buffer) for pattern in optional)
        )
        return model, name
    except Exception as error:  # whatever transformers raises of a config that makes no sense
        raise ArtifactError(f"{file} makes no {name}: {_line(error)}", help=directory) from error


def _stored_names(directory: Path) -> set[str]:
    """The names of the tensors in a directory's safetensors files, by their headers; a damaged file has none."""
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"
