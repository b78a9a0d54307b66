"""Recurrent layers: samples are independent. In simpler ops, step by step, a gate's features can be sharded too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn.functional import linear

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import op_rule, op_variant

Tensor = torch.Tensor
State = tuple[Tensor, ...]  # [samples, features] each; the first is also the layer's output
GATES = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}


@op_rule(*GATES, shards="nonempty")
def recurrent(node: fx.Node) -> RuleText | None:
    """ "t! b i!, l! b s!, (g! h!) j!, (g! h!) -> t! b (w! h!), l! b s!": a weight's rows are gates of features.

    If the features are projected ("h! r!"), the gates have as many features as before the projection ("g! r!").
    """
    if any(value.ndim != 3 for value in edit.outputs(node)):
        return None  # torch 2.11 records LSTM states with one dim too many
    arguments, gates = edit.arguments(node), GATES[node.target]
    features = edit.outputs(node)[1].shape[-1]
    rows = [edit.shape(weight)[0] for weight in arguments.params]
    inner = "h" if rows[0] == gates * features else "r"
    weights = [
        " ".join((f"(g! {inner}!)" if size == rows[0] else "h!", f"j{at}!")[: edit.ndim(weight)])
        for at, (weight, size) in enumerate(zip(arguments.params, rows, strict=True))
    ]
    steps = "b t!" if arguments.batch_first else "t! b"
    states = [f"l! b s{at}!" for at in range(len(edit.outputs(node)) - 1)]
    text = f"{', '.join([f'{steps} i!', *states, *weights])} -> {', '.join([f'{steps} (w! h!)', *states])}"
    return RuleText(text, factors={"g": gates, "h": features})


def _lstm(step: Tensor, again: Tensor, state: State) -> State:
    i, f, g, o = (step + again).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(step: Tensor, again: Tensor, state: State) -> State:
    (r, z, n), (more_r, more_z, more_n) = step.chunk(3, -1), again.chunk(3, -1)
    new = (n + (r + more_r).sigmoid() * more_n).tanh()
    return (new + (z + more_z).sigmoid() * (state[0] - new),)


def _tanh(step: Tensor, again: Tensor, state: State) -> State:
    return ((step + again).tanh(),)


def _relu(step: Tensor, again: Tensor, state: State) -> State:
    return ((step + again).relu(),)


def unroll(
    cell: Callable[[Tensor, Tensor, State], State],
    x: Tensor,
    states: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Run all steps of all layers: one product for all steps of the input, and one product of the state per step.

    Args:
        cell: a function from the input's and the previous state's contributions to the gates, and the previous state,
            to the next state.
    """
    states = [states] if isinstance(states, Tensor) else states
    x = x.transpose(0, 1) if batch_first else x
    if isinstance(x.shape[0], torch.SymInt) or (dropout and train and layers > 1):
        return NotImplemented
    ways = 1 + bidirectional
    count = len(weights) // (layers * ways)
    last: list[State] = []
    for _ in range(layers):
        outputs: list[Tensor] = []
        for is_reverse in range(ways):
            at = len(last)
            first, second, *more = weights[at * count : (at + 1) * count]
            biases, project = (more[:2], more[2:]) if has_biases else ([None, None], more)
            steps, state = linear(x, first, biases[0]).unbind(0), tuple(each[at] for each in states)
            step_outputs: list[Tensor] = []
            for step in reversed(steps) if is_reverse else steps:
                state = cell(step, linear(state[0], second, biases[1]), state)
                state = (linear(state[0], project[0]), *state[1:]) if project else state
                step_outputs.append(state[0])
            outputs.append(torch.stack(step_outputs[::-1] if is_reverse else step_outputs))
            last.append(state)
        x = torch.cat(outputs, -1)
    return (x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*last, strict=True)))


for _op, _cell in zip(GATES, (_lstm, _gru, _tanh, _relu), strict=True):
    op_variant(_op)(partial(unroll, _cell))
