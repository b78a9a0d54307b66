"""torch's initializers, for parameters without values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init


@contextlib.contextmanager
def skip_fake_truncations() -> Iterator[None]:
    """Skip fake tensors in `trunc_normal_`, the only initializer that reads the values it draws."""
    draw = init._no_grad_trunc_normal_

    def skip_fakes(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, *args, **kwargs)

    with patch.object(init, "_no_grad_trunc_normal_", skip_fakes):
        yield
