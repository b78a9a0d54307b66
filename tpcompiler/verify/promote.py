"""A program in another floating-point dtype, for the judge: more exact, or the same on all machines."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler.ir import edit


class Promoted:
    """A program with all floating-point state and dtype arguments in one dtype, as far as `simulate` reads it."""

    def __init__(self, program: Any, dtype: torch.dtype) -> None:
        self.graph_signature = program.graph_signature
        self.state_dict = {name: promoted(value, dtype) for name, value in program.state_dict.items()}
        self.constants = {name: promoted(value, dtype) for name, value in program.constants.items()}
        self.graph = edit.copy_graph(program.graph)
        for node in list(self.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                self.graph.erase_node(node)  # it states the dtype that was exported
                continue
            node.args = fx.node.map_aggregate(node.args, lambda a: _float(a, dtype))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _float(a, dtype))


def promoted(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in this dtype; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _float(argument: Any, dtype: torch.dtype) -> Any:
    return dtype if isinstance(argument, torch.dtype) and argument.is_floating_point else argument
