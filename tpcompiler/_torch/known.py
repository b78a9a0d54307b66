"""Tensors whose values a trace knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


class KnownTensor(torch.Tensor):
    """A tensor whose values stay known in an export: ops on known tensors are computed, not traced.

    Code may so read numbers from it (`tolist`), as it does where the sizes of images say how a tensor is split. An op
    that takes another tensor too is traced, with the known one as a constant.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
            plain, named = tree_map_only(KnownTensor, lambda value: value.as_subclass(torch.Tensor), given)
            if all(isinstance(tensor, cls) for tensor in tensors):
                made = func(*plain, **named)
                return tree_map_only(torch.Tensor, lambda value: value.as_subclass(cls), made)
        return func(*plain, **named)
