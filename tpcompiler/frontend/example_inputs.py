"""Example inputs for a Hugging Face model, built from its config and the signature of its forward."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tpcompiler._torch import KnownTensor, mode_of_parameters, tree_map
from tpcompiler.errors import ProgramError

IMAGE, WINDOW = 224, 16  # pixels of a side, and frames or samples per token, if the config has no number
FLAGS = {"use_cache": False, "return_dict": True}


@dataclass
class Example:
    """The inputs of one call by name, and the names of dims that may have other sizes in the next call.

    `flags` and `known` become constants of the program. `known` are tensors, such as the grid of an image's patches, by
    whose values a model splits others.
    """

    dtype: torch.dtype = torch.float32
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: dict[str, dict[int, str]] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    known: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, value: torch.Tensor, *sizes: str) -> None:
        """Add an input, with the names of its first sizes; floats become the model's dtype."""
        self.inputs[name] = value.to(self.dtype) if value.is_floating_point() else value
        self.sizes[name] = dict(enumerate(sizes))

    def arguments(self) -> dict[str, Any]:
        """Return all keyword arguments of forward."""
        return {**self.inputs, **self.flags, **self.known}

    def only(self, names: Iterable[str]) -> Example:
        """Return the example without other inputs, flags and known tensors."""
        chosen = list(names)
        inputs = {name: self.inputs[name] for name in chosen}
        return Example(self.dtype, inputs, {name: self.sizes[name] for name in chosen})

    def fix(self, size: str) -> None:
        """Make every dim of this name a fixed number."""
        self.sizes = {
            name: {dim: each for dim, each in dims.items() if each != size} for name, dims in self.sizes.items()
        }

    def faked(self) -> dict[str, Any]:
        """Return the inputs as fake tensors, on which a model only computes shapes."""
        with mode_of_parameters():
            return {name: value.clone() for name, value in self.inputs.items()}


def copy_repeated(values: Any) -> Any:
    """Return nested values in which no tensor stands twice: torch.export takes both for one input, the last."""
    taken: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) not in taken:
            taken.add(id(value))
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(own, values)


def takes_only(call: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Return a forward whose signature has only these keyword arguments, by which torch.export names inputs."""

    def forward(**inputs: Any) -> Any:
        return call(**inputs)

    keyword = inspect.Parameter.KEYWORD_ONLY
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in names])  # type: ignore[attr-defined]
    return forward


def build_example(model: Any, batch: int, length: int) -> Example:
    """Return inputs for every modality that the model's forward takes and its config describes.

    Raises:
        ProgramError: forward requires an input of another kind.
    """
    parameters = inspect.signature(model.forward).parameters
    sounds = list(_sounds(model, set(parameters), batch, length)) or [Example(model.dtype)]
    images = "images" if hasattr(model, "get_text_features") else "batch"  # two towers only meet at the end
    for example in sounds:
        example.flags.update({name: value for name, value in FLAGS.items() if name in parameters})
        _add_images(example, set(parameters), model.config, batch, images)
        _add_text(example, set(parameters), model, batch, length)
        if len(sounds) == 1 or _runs(model, example):
            break
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if (required or (name == model.main_input_name and not example.inputs)) and name not in example.arguments():
            raise ProgramError(
                f"{type(model).__name__} takes {name!r}, for which tpcompiler has no example input",
                help="export it with a function that returns (model, args, kwargs): tpcompiler export module:factory",
            )
    return example


def add_labels(example: Example, model: Any) -> None:
    """Add labels with which the model computes its loss: one for each token, or one for each sample.

    Raises:
        ProgramError: it computes no loss of either.
    """
    ids = next((each for each in ("decoder_input_ids", "input_ids") if each in example.inputs), None)
    samples = next(iter(example.inputs), "")
    if "labels" in inspect.signature(model.forward).parameters:
        for like, dims in ((ids, 2), (samples, 1)):
            if like:
                labels = torch.zeros(example.inputs[like].shape[:dims], dtype=torch.int64)
                arguments = {**example.arguments(), "labels": labels}
                with contextlib.suppress(Exception):  # any error that a model raises for labels of another shape
                    loss = getattr(model(**arguments), "loss", None)
                    if isinstance(loss, torch.Tensor) and not loss.ndim:
                        example.add("labels", labels, *list(example.sizes[like].values())[:dims])
                        return
    raise ProgramError(
        f"{type(model).__name__} computes no loss of labels for tokens or for samples",
        help="export it with its loss: tpcompiler.export_training(model, args, loss=..., targets=...)",
    )


def _runs(model: Any, example: Example) -> bool:
    try:
        model(**example.arguments())
    except Exception:  # any error that a model raises for inputs of another layout
        return False
    return True


def configs_of(config: Any) -> Iterator[Any]:
    """Yield a config, then the configs of its parts, outermost first."""
    waiting = [config]
    while waiting:
        yield (one := waiting.pop(0))
        waiting.extend(part for part in vars(one).values() if hasattr(part, "model_type") and hasattr(part, "to_dict"))


def _find(config: Any, *names: str) -> Any:
    """Return the first of these fields that the config or one of its parts has."""
    values = (getattr(one, name, None) for one in configs_of(config) for name in names)
    return next((value for value in values if value is not None), None)


def _add_text(example: Example, takes: set[str], model: Any, batch: int, length: int) -> None:
    """Add token ids, including placeholders of images and sound if the model replaces them by features."""
    config = model.config
    if "input_ids" in takes:
        ids = _ids(config, _vocabulary(config), batch, length)
        kinds = torch.zeros_like(ids)
        for kind, modality in enumerate(("image", "audio"), 1):
            count = _count_features(model, example, modality)
            row = torch.full((batch, count // batch), _token(config, modality) or 0)
            ids = torch.cat([ids[:, :1], row, ids[:, 1:]], 1)
            kinds = torch.cat([kinds[:, :1], torch.full_like(row, kind), kinds[:, 1:]], 1)
        example.add("input_ids", ids, "batch", "length")
        if "attention_mask" in takes and (config.is_encoder_decoder or not model.can_generate()):
            example.add("attention_mask", torch.ones_like(ids), "batch", "length")
        if "mm_token_type_ids" in takes:
            example.known["mm_token_type_ids"] = kinds.as_subclass(KnownTensor)
        if "position_ids" in takes and (place := getattr(model.base_model, "get_rope_index", None)):
            example.known["position_ids"] = _call(place, example)[0].as_subclass(KnownTensor)
    if "decoder_input_ids" in takes and config.is_encoder_decoder:
        vocabulary = _vocabulary(config.get_text_config(decoder=True))
        example.add("decoder_input_ids", _ids(config, vocabulary, batch, length), "batch", "target")


def _vocabulary(config: Any) -> int:
    sizes = [size for one in configs_of(config) if isinstance(size := getattr(one, "vocab_size", None), int)]
    return min(sizes, default=2)


def _ids(config: Any, vocabulary: int, batch: int, length: int) -> torch.Tensor:
    """Return ids that differ from place to place, none of which marks padding, an image or an end."""
    fields = [field for one in configs_of(config) for field in vars(one).items()]
    marks = {mark for name, mark in fields if name.endswith(("_token_id", "_token_index")) and isinstance(mark, int)}
    ordinary = [number for number in range(min(vocabulary, 1 << 15)) if number not in marks] or [0]
    drawn = torch.randint(len(ordinary), (batch, length), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ordinary)[drawn]


def _token(config: Any, modality: str) -> int | None:
    """Return the id of the placeholder for a feature of this modality."""
    token_id = _find(config, f"{modality}_token_id", f"{modality}_token_index")
    return token_id if isinstance(token_id, int) else None


def _count_features(model: Any, example: Example, modality: str) -> int:
    """Count the features that replace this modality's placeholders, by computing them (their shapes)."""
    make: Callable[..., Any] | None = getattr(model, f"get_{modality}_features", None)
    if make is None or not example.inputs or _token(model.config, modality) is None:
        return 0
    try:
        features = _call(make, example)
    except (ValueError, IndexError):  # some models take several images per text
        if modality != "image":
            raise
        example.inputs["pixel_values"] = example.inputs["pixel_values"].unsqueeze(1)
        features = _call(make, example)
    features = features.pooler_output if hasattr(features, "pooler_output") else features
    rows = [features] if isinstance(features, torch.Tensor) else list(features)
    return sum(row.numel() // row.shape[-1] for row in rows)


def _call(function: Callable[..., Any], example: Example) -> Any:
    """Call a method of the model with the arguments of forward that it accepts."""
    takes = inspect.signature(function).parameters
    return function(**{name: value for name, value in example.arguments().items() if name in takes})


def _add_images(example: Example, takes: set[str], config: Any, batch: int, images: str) -> None:
    name = next((each for each in ("pixel_values", "pixel_values_videos") if each in takes), None)
    patch, channels = _find(config, "patch_size"), _find(config, "num_channels", "in_channels", "in_chans") or 3
    if name is None or (example.inputs and "vision_config" not in vars(config)):
        return
    if "image_grid_thw" in takes and isinstance(patch, int):
        side = 2 * (_find(config, "spatial_merge_size") or 1)
        width = channels * (_find(config, "temporal_patch_size") or 1) * patch * patch
        example.add(name, _noise(batch * side * side, width))
        example.known["image_grid_thw"] = torch.tensor([[1, side, side]] * batch).as_subclass(KnownTensor)
        return
    frames = _find(config, "num_frames", "frames_per_clip")
    shape = (channels, *_pair(_find(config, "image_size") or IMAGE))
    example.add(name, _noise(batch, frames, *shape) if frames else _noise(batch, *shape), images)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return (int(size[-2]), int(size[-1])) if isinstance(size, Sequence) else (int(size), int(size))


def _sounds(model: Any, takes: set[str], batch: int, length: int) -> Iterator[Example]:
    """Yield samples, or frames of a spectrum, in each layout that models use; the model accepts one of them."""
    config = model.config
    names = [name for name in ("input_features", "input_values") if name in takes]
    if not names or ("input_ids" in takes and model.main_input_name not in names and _token(config, "audio") is None):
        return
    bins = _find(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    if bins is not None:
        source = _find(config, "max_source_positions")
        frames = 2 * source if source else _find(config, "max_length") or WINDOW * length
        for layout in [(bins, frames), (frames, bins), (1, frames, bins)]:
            made = Example(model.dtype)
            made.add(names[0], _noise(batch, *layout), "batch")
            yield made
    else:
        samples = length * math.prod(_find(config, "conv_stride", "upsampling_ratios") or [WINDOW])
        for layout in [(samples,), (_find(config, "audio_channels") or 1, samples)]:
            made = Example(model.dtype)
            made.add(names[-1], _noise(batch, *layout), *["batch", "samples"][: 3 - len(layout)])
            yield made


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
