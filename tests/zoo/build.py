"""Building models of transformers from their configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.zoo.case import randomise


def transformer(family: str, head: str, sizes: Mapping[str, Any], **different: Any) -> Callable[[], torch.nn.Module]:
    """What builds the model of this family and head from its configuration, with random weights."""

    def build() -> torch.nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**sizes, **different})
        return randomise(getattr(transformers, f"{family}{head}")(config))

    return build
