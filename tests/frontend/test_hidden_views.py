"""Ops that give back memory that they take, though their schemas do not say so."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.long import some
from tests.op_db.database import op_db
from tpcompiler import _torch
from tpcompiler._torch import OpOverload, calls_others, tree_flatten
from tpcompiler.frontend.written_back import UNDECLARED, VIEWS


class Watch(TorchDispatchMode):
    """Collect the ops whose results lie in what they take, unsaid."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing: set[Any] = set()
        self.called: set[Any] = set()

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory = {value.untyped_storage()._cdata for value in _dense((args, kwargs or {})) if value.numel()}
        made = op(*args, **(kwargs or {}))
        self.called.add(op)
        said = any(returned.alias_info is not None for returned in op._schema.returns)
        if not said and any(value.untyped_storage()._cdata in memory for value in _dense(made)):
            self.sharing.add(op)
        return made


def _dense(values: Any) -> list[torch.Tensor]:
    tensors = (value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))
    return [value for value in tensors if value.layout is torch.strided and value.device.type == "cpu"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_other_kernel_hides_that_it_shares_memory() -> None:
    """One in four of torch's ops, and all of them by `make trust`."""
    watch = Watch()
    with watch:
        torch.unsafe_split(torch.ones(4), 2)  # as the control
    for op in some(op_db, 4):
        if torch.float32 not in op.dtypes:
            continue
        with contextlib.suppress(Exception):  # samples that it does not take under such a mode
            for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 3):
                with torch.no_grad(), watch:
                    op(sample.input, *sample.args, **sample.kwargs)
    assert len(watch.called) > 150
    assert _torch.aten.unsafe_split.Tensor in watch.sharing
    assert watch.sharing <= UNDECLARED


@pytest.mark.parametrize("op", VIEWS, ids=str)
def test_what_stands_for_a_hidden_view_is_one(op: OpOverload) -> None:
    """The same numbers, in the same memory, and a schema that says so."""
    x = torch.randn(4, 6)
    rest: dict[OpOverload, tuple[Any, ...]] = {
        _torch.aten._unsafe_view.default: ([24],),
        _torch.aten.unsafe_split.Tensor: (2, 1),
        _torch.aten.unsafe_split_with_sizes.default: ([2, 4], 1),
        _torch.aten.unsafe_chunk.default: (2, 1),
        _torch.aten.lift.default: (),
    }
    one, two = (_dense(each(x, *rest[op])) for each in (op, VIEWS[op]))
    assert len(one) == len(two)
    assert all(a.data_ptr() == b.data_ptr() and torch.equal(a, b) for a, b in zip(one, two, strict=True))
    stands = VIEWS[op]
    assert calls_others(stands) or any(returned.alias_info is not None for returned in stands._schema.returns)
