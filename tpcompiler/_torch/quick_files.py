"""Faster parts of torch's reader and writer of programs."""

from __future__ import annotations

import contextlib
import functools
import threading
import typing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_LOCK = threading.RLock()


@contextlib.contextmanager
def quick_files(text: bytes = b"") -> Iterator[None]:
    """Speed up reading and writing of programs in this block, and read programs that torch writes and does not read.

    With `text`, graphs are not written: this is their JSON.

    Of the time of a load, torch spends a sixth on the type hints of each node's class, a sixth on looking for the class
    of each number and text and, with dynamic sizes, half on parsing each of them and on an op for each value. Half of a
    save's time is a copy of the program in a canonical form, which is discarded.

    Threads take turns: what one replaced, another would put back for good.
    """
    from torch._export.serde import schema, serialize
    from torch.export.pt2_archive import _package

    reader = serialize.GraphModuleDeserializer
    hints = functools.cache(functools.partial(typing.get_type_hints, globalns=vars(schema)))
    hinting = SimpleNamespace(**vars(typing) | {"get_type_hints": lambda kind, globalns=None: hints(kind)})
    quick: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (serialize, "typing", lambda typing: hinting),
        (serialize, "canonicalize", lambda copy: lambda program, constants=None: program),
        (serialize, "_dict_to_dataclass", _reading_plain_data),
        (reader, "deserialize_outputs", _reading_no_outputs),
        (reader, "deserialize_sym_int", _reading_sizes_once),
        (reader, "deserialize_tensor_meta", _reading_layouts),
    ]
    quick += [(_package, "serialize", functools.partial(_writing_text, text))] if text else []
    with _LOCK, contextlib.ExitStack() as patches:
        for owner, name, make in quick:
            if name in vars(owner):  # these names are torch's own
                patches.enter_context(patch.object(owner, name, make(vars(owner)[name])))
        yield


def _writing_text(text: bytes, write: Callable[..., Any]) -> Callable[..., Any]:
    from torch._export.serde import serialize

    def write_examples(program: Any, *_: Any, **__: Any) -> Any:
        examples = serialize.serialize_torch_artifact(program.example_inputs)
        return serialize.SerializedArtifact(text, b"", b"", examples)

    return write_examples


def _reading_plain_data(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_data(kind: Any, data: Any) -> Any:
        return data if kind in (str, int, bool) else read(kind, data)  # an infinite float is a text

    return read_data


def _reading_no_outputs(read: Callable[..., Any]) -> Callable[..., Any]:
    """Give a value to a call of a graph that returns nothing, such as a `no_grad` block that only writes a buffer.

    torch gives it none, and its verifier wants one.
    """

    def read_outputs(self: Any, node: Any, made: torch.fx.Node) -> None:
        read(self, node, made)
        if not node.outputs and isinstance(made.target, HigherOrderOperator):
            made.meta["val"] = ()

    return read_outputs


def _reading_sizes_once(read: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[ShapeEnv, str, Any], Any] = {}

    def read_size(self: Any, size: Any) -> Any:
        if size.type != "as_expr":
            return read(self, size)
        hint = size.value.hint
        name = self.shape_env, size.value.expr_str, hint and (hint.type, hint.value)
        if name not in known:
            known[name] = read(self, size)
        return known[name]

    return read_size


def _reading_layouts(read: Callable[..., Any]) -> Callable[..., Any]:
    """Make a value from its layout, without the mode that calls ops on values without memory."""
    from torch._export.serde import serialize

    def read_value(self: Any, value: Any) -> Any:
        device = serialize.deserialize_device(value.device)
        if device.type == "meta" or value.requires_grad:
            return read(self, value)
        shape, strides = (tuple(map(self.deserialize_sym_int, each)) for each in (value.sizes, value.strides))
        dtype = vars(serialize)["_SERIALIZE_TO_TORCH_DTYPE"][value.dtype]
        # Sizes such as differences may be negative: torch notes that these are not.
        plain = all(size.node.expr.is_nonnegative for size in shape if isinstance(size, torch.SymInt))
        with self.shape_env.suppress_guards() if plain else contextlib.nullcontext():
            layout = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(self.fake_tensor_mode, layout, device)

    return read_value
