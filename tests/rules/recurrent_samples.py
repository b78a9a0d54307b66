"""Calls of recurrent layers."""

from __future__ import annotations

import torch

from tests.rules.sample import call, t

aten = torch.ops.aten

FLAGS = (0.0, False)  # dropout, training


def weights(gates: int, inputs: int, features: int, biases: bool = True) -> list[torch.Tensor]:
    rows = gates * features
    return [t(rows, inputs), t(rows, features), *([t(rows), t(rows)] if biases else [])]


RECURRENT = [
    call(
        aten.lstm.input,
        t(3, 4, 5),
        [t(1, 4, 3), t(1, 4, 3)],
        weights(4, 5, 3),
        True,
        1,
        *FLAGS,
        False,
        False,
        text="t! b i!, l! b s0!, l! b s1!, (g! h!) j0!, (g! h!) j1!, (g! h!), (g! h!) "
        "-> t! b (w! h!), l! b s0!, l! b s1!",
    ),
    call(
        aten.lstm.input,
        t(4, 3, 5),
        [t(1, 4, 2), t(1, 4, 3)],
        [t(12, 5), t(12, 2), t(2, 3)],
        False,
        1,
        *FLAGS,
        False,
        True,
        text="b t! i!, l! b s0!, l! b s1!, (g! r!) j0!, (g! r!) j1!, h! j2! -> b t! (w! h!), l! b s0!, l! b s1!",
    ),
    call(
        aten.gru.input,
        t(3, 4, 5),
        t(2, 4, 3),
        [*weights(3, 5, 3, False), *weights(3, 5, 3, False)],
        False,
        1,
        *FLAGS,
        True,
        False,
        text="t! b i!, l! b s0!, (g! h!) j0!, (g! h!) j1!, (g! h!) j2!, (g! h!) j3! -> t! b (w! h!), l! b s0!",
    ),
    call(
        aten.rnn_tanh.input,
        t(4, 3, 5),
        t(1, 4, 3),
        weights(1, 5, 3),
        True,
        1,
        *FLAGS,
        False,
        True,
        text="b t! i!, l! b s0!, (g! h!) j0!, (g! h!) j1!, (g! h!), (g! h!) -> b t! (w! h!), l! b s0!",
    ),
    call(
        aten.rnn_relu.input,
        t(3, 4, 5),
        t(1, 4, 3),
        weights(1, 5, 3, False),
        False,
        1,
        *FLAGS,
        False,
        False,
        text="t! b i!, l! b s0!, (g! h!) j0!, (g! h!) j1! -> t! b (w! h!), l! b s0!",
    ),
]
