"""Export a model without its weights, from a Hugging Face directory or a user's factory."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import traceback
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.export import ExportedProgram

from tpcompiler._torch import quiet_torch, record_own_backwards, tree_map
from tpcompiler.errors import ArtifactError, ProgramError, reason
from tpcompiler.frontend.dynamic_sizes import Sizes
from tpcompiler.frontend.example_inputs import (
    Example,
    add_labels,
    build_example,
    configs_of,
    copy_repeated,
    takes_only,
)
from tpcompiler.frontend.prefill_decode import build_steps
from tpcompiler.frontend.refused import refuse_own_backwards
from tpcompiler.runtime.hub import FACTORY, refuse_missing_config
from tpcompiler.runtime.model_file import import_modules
from tpcompiler.runtime.opened import read_object
from tpcompiler.runtime.weightless import weightless

MOST_TOKENS, MOST_SAMPLES = 8192, 1 << 20
REFUSED = " cannot be exported: "


class Export(NamedTuple):
    """A program, and a description of its dynamic sizes."""

    program: ExportedProgram
    sizes: str


def export_without_weights(
    source: str | os.PathLike[str],
    *,
    batch: int = 2,
    length: int = 16,
    dtype: str | None = None,
    static: bool = False,
    training: bool = False,
) -> Export:
    """Export a model whose parameters have no values; memory holds only its graph and its small buffers.

    Args:
        source: a Hugging Face directory, of which config.json is read and no weights, or `module:factory`: a function
            without arguments that returns (model, args), optionally followed by kwargs and dynamic shapes.
        batch: rows of the example, at least 2 if the batch is dynamic.
        length: tokens of the example, at least 2 if their number is dynamic; for sound, the steps.
        dtype: of the parameters, such as "bfloat16"; by default the config's, or float32.
        static: make all sizes fixed numbers, as in the example; a factory's own shapes take precedence.
        training: in training mode, with gradients (`frontend.training` adds the backward). A Hugging Face model takes
            labels too.

    Raises:
        ArtifactError: no config.json, a model that transformers does not have, a module that cannot be imported.
        ProgramError: torch.export cannot export it, or it takes inputs of an unknown kind; it computes no loss.
    """
    text = os.fspath(source)
    with weightless(), torch.set_grad_enabled(training), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ":" in text and not os.path.exists(text):
            model, args, kwargs, shapes = _from_factory(text)
            return Export(_exported(text, model.train(training), kwargs, shapes, args), "")
        return _export_directory(Path(text), batch, length, dtype, static, training)


def export_prefill_and_decode(
    source: str | os.PathLike[str], *, batch: int = 1, length: int = 16, max_length: int = 512, dtype: str | None = None
) -> dict[str, Export]:
    """Export the programs that a Hugging Face model generates with, over one state, without parameter values.

    `prefill` takes a prompt and `decode` one token, as `input_ids` and `cache_position`; both return logits. The state
    is buffers that they write: keys and values, and the states of convolutions and recurrences. A model with an encoder
    has a first program, `encoder`, whose output `prefill` takes as `encoder_hidden_states`.

    Args:
        source: a Hugging Face directory, of which config.json is read and no weights.
        batch: rows of all programs, fixed like the state's.
        length: tokens of the example of `prefill`, at least 2.
        max_length: tokens that the caches have room for.
        dtype: as in `export_without_weights`.

    Raises:
        ArtifactError: as `export_without_weights`; or a model that does not generate.
        ProgramError: torch.export cannot export it.
    """
    path = Path(source)
    with weightless(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any
        model, name = _model_of(path, dtype)
        if not model.can_generate():
            raise ArtifactError(
                f"{path} is a {name}, which generates no text", help="export it without --prefill-decode"
            )
        try:
            steps = build_steps(model.eval(), batch, min(max(length, 2), max_length - 1), max_length)
        except Exception as error:  # any error that a model raises on an example
            raise error if isinstance(error, ProgramError) else _not_exported(str(path), error) from error
        least = 1 if "encoder" in steps else 2
        limits = {"length": (least, max_length), "source": (1, max_length)}
        return {each: _export_dynamic(str(path), step.eval(), step.example, limits) for each, step in steps.items()}


def _exported(
    text: str,
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    shapes: Any = None,
    args: Any = (),
) -> ExportedProgram:
    args, kwargs = copy_repeated((tuple(args), dict(kwargs)))
    kwargs = tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, kwargs)
    try:  # on copies, because torch marks the examples of dynamic inputs
        with (
            record_own_backwards(model) as own_backwards,
            quiet_torch(),
            contextlib.redirect_stderr(io.StringIO()),  # torch prints a graph that it could not finish
        ):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # any error that a model raises
        raise _not_exported(text, error) from error
    if torch.is_grad_enabled():
        refuse_own_backwards(own_backwards)
    return program


def _not_exported(text: str, error: Exception) -> ProgramError:
    """Return an error that names the line of the model that cannot be exported, instead of torch's message."""
    of_torch, line = type(error).__module__.startswith("torch."), _line_of_model(error)
    own = error
    while of_torch and isinstance(own.__cause__, Exception):  # errors that torch wrapped
        own = own.__cause__
    reason = f"torch.export cannot trace {line}" if of_torch and line else f"{_line(own)}{line and f', in {line}'}"
    return ProgramError(
        f"{text}{REFUSED}{reason}",
        help="change the model there, or export it with a function that returns (model, args, kwargs): module:factory",
    )


def _line_of_model(error: BaseException | None) -> str:
    """Return the innermost line of the model's code in the traceback of an error or its cause."""
    others, text = (Path(torch.__file__).parent, Path(__file__).parents[1]), ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            file = Path(frame.filename)
            is_python = file.is_relative_to(Path(os.__file__).parent) and "site-packages" not in file.parts
            if file.is_absolute() and not is_python and not any(file.is_relative_to(folder) for folder in others):
                text = f"{file.parent.name}/{file.name}:{frame.lineno}: {frame.line}"
        error = error.__cause__ or error.__context__
    return text


def _from_factory(text: str) -> tuple[torch.nn.Module, Any, Any, Any]:
    name, _, attribute = text.partition(":")
    import_modules([name])
    factory = getattr(importlib.import_module(name), attribute, None)
    if not callable(factory):
        raise ArtifactError(f"{name} has no function {attribute!r}", help=FACTORY)
    try:
        results = factory()
    except Exception as error:  # the user's own error
        raise ProgramError(f"{text} raised {_line(error)}", help=FACTORY) from error
    if not isinstance(results, tuple) or not 2 <= len(results) <= 4 or not isinstance(results[0], torch.nn.Module):
        raise ArtifactError(f"{text} returned a {type(results).__name__} that is not (model, args)", help=FACTORY)
    model, args, *rest = results
    kwargs, shapes = (*rest, None, None)[:2]
    return model, args, kwargs or {}, shapes


def _export_directory(path: Path, batch: int, length: int, dtype: str | None, static: bool, training: bool) -> Export:
    model: Any = _model_of(path, dtype)[0].train(training)
    for module in model.modules():
        for config in configs_of(module.config) if hasattr(module, "config") else ():
            config.use_cache = False
    try:
        example = build_example(model, batch, length)
        if training:
            add_labels(example, model)
    except Exception as error:  # any error that a model raises while computing its features
        raise error if isinstance(error, ProgramError) else _not_exported(str(path), error) from error
    forward = model.forward

    def call(**inputs: torch.Tensor) -> Any:
        return _tensors_of(forward(**replace(example, inputs=inputs).arguments()))

    model.forward = takes_only(call, example.inputs)  # no caches, and only the tensors of the results
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = min(positions, MOST_TOKENS) if isinstance(positions, int) and positions > 1 else MOST_TOKENS
    limits = {"length": (2, most), "target": (2, most), "samples": (2, MOST_SAMPLES)}
    return _export_dynamic(str(path), model, example, limits, static=static)


def _export_dynamic(
    text: str, model: torch.nn.Module, example: Example, limits: Mapping[str, tuple[int, int]], *, static: bool = False
) -> Export:
    """Export with as many of the example's sizes dynamic as torch.export can keep."""
    sizes = Sizes(example, limits)
    reason = "by --static" if static else ""
    for shapes in () if static else sizes.proposals():
        try:
            program = _exported(text, model, example.inputs, shapes)
        except ProgramError as error:
            reason = error.message.partition(REFUSED)[2]
            continue
        if sizes.fix_guarded(program):
            program = _exported(text, model, example.inputs, sizes.automatic())
        for better in sizes.refinements(program):
            with contextlib.suppress(ProgramError):
                program = _exported(text, model, example.inputs, better)
                break
        return Export(program, sizes.describe(program, "the model's code depends on it"))
    return Export(program := _exported(text, model, example.inputs), sizes.describe(program, reason))


def _tensors_of(value: Any) -> Any:
    """Return the tensors of an output, in plain dicts and tuples; None if it has no tensor."""
    if isinstance(value, Mapping):
        return {name: tensors for name, each in value.items() if (tensors := _tensors_of(each)) is not None} or None
    if isinstance(value, tuple | list):
        return tuple(tensors for each in value if (tensors := _tensors_of(each)) is not None) or None
    return value if isinstance(value, torch.Tensor) else None


def _model_of(path: Path, dtype: str | None) -> tuple[torch.nn.Module, str]:
    """Return the model of a config.json, and its class's name."""
    file = path / "config.json" if path.is_dir() else path
    directory = f"give a Hugging Face directory, or {FACTORY}"
    refuse_missing_config(path)
    try:
        data = read_object(file)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} cannot be read: {reason(error)}", help=directory) from error
    if "model_type" not in data:
        raise ArtifactError(f"{file} is not the config of a model: it names no model_type", help=directory)
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
        raise ArtifactError(f"{chosen!r} is not a dtype of weights", help='give one such as "bfloat16"')
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, local_files_only=True)
        # Of the implementations of experts, use the one that torch.export supports.
        experts = any(getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
        more = {"experts_implementation": "batched_mm"} if experts else {}
        model = build._from_config(config, dtype=found, **more)
        stored = _stored_names(file.parent)
        _compute_unsaved(model, stored)
        _keep_optional_buffers(model, stored)
        return model, name
    except Exception as error:  # any error of transformers for a nonsensical config
        raise ArtifactError(f"{file} makes no {name}: {_line(error)}", help=directory) from error


def _compute_unsaved(model: Any, stored: set[str]) -> None:
    """Turn parameters that transformers computes and never saves, such as sinusoids, into buffers with values."""
    for name in set(getattr(model, "_keys_to_ignore_on_save", None) or ()) - stored:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        fake = module._parameters.pop(attribute)
        value = torch.nn.Parameter(torch.empty(fake.shape, dtype=fake.dtype), requires_grad=False)
        module.register_buffer(attribute, value, persistent=False)
        model._init_weights(module)
        module.register_buffer(attribute, value.detach(), persistent=False)


def _keep_optional_buffers(model: torch.nn.Module, stored: Collection[str]) -> None:
    """Make buffers non-persistent that a checkpoint may lack, and this one lacks, so that nobody requires them."""
    ends = {name.rpartition(".")[2] for name in stored}
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for path, module in model.named_modules() if ends else ():
        for name in module._buffers.keys() - ends:
            if any(re.search(pattern, f"{path}.{name}".removeprefix(".")) for pattern in optional):
                module._non_persistent_buffers_set.add(name)


def _stored_names(directory: Path) -> set[str]:
    """Return the names of tensors in a directory's safetensors files, by their headers; a damaged file has none."""
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error)}"
