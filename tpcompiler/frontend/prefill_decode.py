"""Programs of a generating model over one state: prefill and decode, after an encoder if it has one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from tpcompiler._torch import mode_of_parameters
from tpcompiler.errors import ProgramError
from tpcompiler.frontend.example_inputs import Example, build_example, takes_only
from tpcompiler.runtime.weightless import lazy_zeros

CACHES = ("past_key_values", "cache_params")  # forward's parameters for a cache
COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
WINDOWS = {"sliding_attention": "full_attention", "chunked_attention": "full_attention", "hybrid_sliding": "hybrid"}
NAMES = {
    "keys": "key_cache",
    "values": "value_cache",
    "conv_states": "conv_state",
    "recurrent_states": "recurrent_state",
}
LENGTH, CROSS, MASK = "cumulative_length", "cross_", "source_mask"


class Slot(NamedTuple):
    """The place where transformers' code finds a tensor of its cache."""

    holder: MutableMapping[Any, Any]
    key: Any


class State:
    """A cache of transformers whose tensors are buffers of the programs: keys and values, convolutions, recurrences.

    Args:
        model: without weights; it runs once on fake tensors, which gives its cache the shapes.
        example: the inputs of that run.
        room: the number of tokens that fit the cache.
        source: the number of an encoder's vectors that fit it, or 0.
    """

    def __init__(self, model: Any, example: Example, room: int, source: int) -> None:
        from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache

        parameters = inspect.signature(model.forward).parameters
        self._parameter = next((name for name in CACHES if name in parameters), None)
        if self._parameter is None:
            raise ProgramError(
                f"{type(model).__name__} keeps its state in no cache: its forward takes neither {' nor '.join(CACHES)}",
                help="export it without --prefill-decode, or in Python with its state as buffers",
            )
        self.room, self.source = room, source
        cache = StaticCache(config=_config_of(model), max_cache_len=room)
        self._layers: list[Any] = cache.layers
        self._cross = [_CrossLayer() for _ in self._layers if source]
        self._cache: Any = cache
        if source:
            self._cache = EncoderDecoderCache(cache, Cache(layers=[]))
            self._cache.cross_attention_cache.layers = self._cross
        self.enter(prefill=True)
        inputs = example.faked()
        if source:
            vectors = inputs.pop("encoder_hidden_states")
            self.width = vectors.shape[-1]
            inputs |= {"decoder_input_ids": inputs.pop("input_ids"), "encoder_outputs": (vectors,)}
        with mode_of_parameters():
            model(**inputs, **self.arguments())
        self.slots = dict(self._find_slots())
        self.buffers = {name: lazy_zeros(self._shaped(slot)) for name, slot in self.slots.items()}
        if source and (mask := inputs.get("attention_mask")) is not None:
            self.buffers[MASK] = torch.zeros(len(mask), source, dtype=mask.dtype)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of forward that make the model use this state."""
        return {str(self._parameter): self._cache, "use_cache": True}

    def enter(self, *, prefill: bool) -> None:
        """Set the flags by which the model chooses between its code for a prompt and for one more token."""
        for layer in self._layers:
            for index in getattr(layer, "has_previous_state", ()):
                layer.has_previous_state[index] = not prefill
        if self._cross:
            self._cache.is_updated = dict.fromkeys(range(len(self._cross)), not prefill)

    def _find_slots(self) -> Iterator[tuple[str, Slot]]:
        for prefix, layers in (("", self._layers), (CROSS, self._cross)):
            for index, layer in enumerate(layers):
                held: dict[str, Any] = vars(layer)
                for key, value in held.items():
                    name = f"{prefix}{NAMES.get(key, key)}_{index}"
                    if isinstance(value, torch.Tensor) and not (key == LENGTH and held.get("keys") is None):
                        yield name, Slot(held, key)
                    for number, each in value.items() if isinstance(value, dict) else ():
                        if isinstance(each, torch.Tensor):
                            yield f"{name}_{number}" if number else name, Slot(value, number)

    def _shaped(self, slot: Slot) -> torch.Tensor:
        """Return a tensor of a buffer's shape, with room for more of the encoder's vectors than the example has."""
        value: torch.Tensor = slot.holder[slot.key]
        if any(slot.holder is vars(layer) for layer in self._cross):
            return value.new_empty(*value.shape[:2], self.source, *value.shape[3:])
        return value


class _CrossLayer:
    """Keys and values of the encoder's vectors: a prompt computes them, and the tokens after it read them."""

    is_sliding = False

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = keys, values
        return keys, values


def _config_of(model: Any) -> Any:
    """Return the config of the generating part, with the number of its layers, and windows as masks only.

    In transformers, the code of a cache as short as a window depends on the number of its tokens.
    """
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and WINDOWS.keys() & set(kinds):
        config.layer_types = [WINDOWS.get(kind, kind) for kind in kinds]
    for name in ("sliding_window", "attention_chunk_size"):
        if kinds is None and getattr(config, name, None) is not None:
            setattr(config, name, None)
    if kinds is None and config.is_encoder_decoder:
        config.num_hidden_layers = max(getattr(config, name, None) or 0 for name in COUNTS)
    return config


class StepModule(torch.nn.Module):
    """One program of a set. Its forward takes the inputs of the example, by name.

    Args:
        example: its inputs, among which `cache_position` is no argument of the model.
        state: the state that it reads and writes; an encoder has none.
    """

    def __init__(self, model: Any, example: Example, state: State | None, *, prefill: bool) -> None:
        super().__init__()
        example.fix("batch")
        self.model, self.example, self._state, self._is_prefill = model, example, state, prefill
        for name, buffer in state.buffers.items() if state else ():
            self.register_buffer(name, buffer, persistent=False)
        self.forward = takes_only(self._run if state else self._encode, example.inputs)

    def _encode(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Run the encoder inside the model, so that its weights have the same names as in the other programs."""
        vectors: torch.Tensor = self.model.get_encoder()(**inputs).last_hidden_state
        return vectors

    def _run(self, cache_position: torch.Tensor, **inputs: Any) -> torch.Tensor:
        state = self._state
        assert state is not None
        # Looked up, so that a position beyond the cache is refused as a wrong input.
        positions = torch.arange(state.room).index_select(0, cache_position)
        state.enter(prefill=self._is_prefill)
        for name, slot in state.slots.items():
            slot.holder[slot.key] = buffer = self.get_buffer(name)
            if slot.key == LENGTH:
                buffer.copy_(positions[0])
            elif isinstance(slot.key, int) and not self._is_prefill:
                buffer.mul_((positions[0] > 0).to(buffer.dtype))  # a text that starts with this token has no past
        if state.source:
            inputs = self._cross(state, **inputs)
        logits: torch.Tensor = self.model(**inputs, **state.arguments()).logits
        if self._is_prefill:
            self._keep(state, cache_position)
        return logits

    def _keep(self, state: State, cache_position: torch.Tensor) -> None:
        """Write the parts of a prompt's state that the model's own code does not write."""
        for name, slot in state.slots.items():
            buffer = self.get_buffer(name)
            if isinstance(slot.key, int):
                # Such a prompt has no past: a look-up in one row refuses any position except the first.
                buffer.add_(torch.zeros(1, dtype=buffer.dtype).index_select(0, cache_position[:1]))
            elif name.startswith(CROSS):
                vectors = slot.holder[slot.key]
                buffer.index_copy_(2, torch.arange(vectors.shape[2]), vectors)

    def _cross(self, state: State, input_ids: torch.Tensor, **inputs: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a decoder that reads an encoder's vectors, and the mask of the visible ones."""
        mask = inputs.get("attention_mask")
        if self._is_prefill:
            vectors = inputs["encoder_hidden_states"]
            if mask is not None:
                self.get_buffer(MASK).zero_().index_copy_(1, torch.arange(mask.shape[1]), mask)
        else:  # the keys and values are in the cache, and the model only reads the vectors' shape
            vectors = torch.zeros((), dtype=self.model.dtype).expand(len(input_ids), state.source, state.width)
            mask = self.get_buffer(MASK) if MASK in state.buffers else None
        return {"decoder_input_ids": input_ids, "encoder_outputs": (vectors,), "attention_mask": mask}


def build_steps(model: Any, batch: int, length: int, room: int) -> dict[str, StepModule]:
    """Return the programs' modules by name, in the order of their calls.

    Args:
        batch: rows of all of them, fixed like the state's.
        length: tokens of the example of `prefill`, and of an encoder.
        room: the number of tokens that fit the caches.

    Raises:
        ProgramError: the model keeps its state in no cache, or prefill would need inputs other than text.
    """
    example = build_example(model, batch, length)
    steps: dict[str, StepModule] = {}
    source, prompt = 0, Example(example.dtype)
    if model.config.is_encoder_decoder:
        takes = inspect.signature(model.get_encoder().forward).parameters
        encoder = example.only([name for name in example.inputs if name in takes])
        steps["encoder"] = StepModule(model, encoder, None, prefill=True)
        with mode_of_parameters():
            vectors = steps["encoder"](**encoder.faked())
        is_dynamic = "length" in encoder.sizes.get(model.main_input_name, {}).values()
        source = room if is_dynamic else vectors.shape[1]
        prompt.add("input_ids", example.inputs["decoder_input_ids"], "batch", "length")
        prompt.add("encoder_hidden_states", torch.zeros(vectors.shape), *["batch", "source"][: 1 + is_dynamic])
        if "attention_mask" in encoder.inputs:
            prompt.add("attention_mask", encoder.inputs["attention_mask"], "batch", "source")
    else:
        if other := sorted(example.inputs.keys() - {"input_ids", "attention_mask"}):
            raise ProgramError(
                f"{type(model).__name__} generates from {other[0]} too, and prefill takes text only",
                help="export it without --prefill-decode",
            )
        prompt = example.only(["input_ids"])
    state = State(model, prompt, room, source)
    prompt.add("cache_position", torch.arange(length), "length")
    token = Example(example.dtype)
    token.add("input_ids", prompt.inputs["input_ids"][:, :1])
    token.add("cache_position", torch.arange(1))
    return {
        **steps,
        "prefill": StepModule(model, prompt, state, prefill=True),
        "decode": StepModule(model, token, state, prefill=False),
    }
