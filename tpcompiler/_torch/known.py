"""Tensors with values that a trace can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


class KnownTensor(torch.Tensor):
    """A tensor with values that an export can read: ops on known tensors are computed, not traced.

    So code may read numbers from it (`tolist`), such as image sizes that determine how a tensor is split. An op that
    also takes another tensor is traced, with the known one as a constant.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = (tuple(args), dict(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
            plain, keywords = tree_map_only(KnownTensor, lambda value: value.as_subclass(torch.Tensor), arguments)
            if all(isinstance(tensor, cls) for tensor in tensors):
                result = func(*plain, **keywords)
                return tree_map_only(torch.Tensor, lambda value: value.as_subclass(cls), result)
        return func(*plain, **keywords)
