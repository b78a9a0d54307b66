"""Generate tokens with a set of programs: the encoder, if there is one, then the prompt, then one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tpcompiler.errors import InputsError
from tpcompiler.runtime.run import call_on

Pick = Callable[[torch.Tensor], torch.Tensor]  # (batch, vocabulary) -> (batch,)
DECODER = "decoder_input_ids"  # transformers' name for the tokens that a decoder starts with


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def generate(
    programs: Mapping[str, Any],
    inputs: Mapping[str, torch.Tensor],
    count: int,
    where: str = "inputs",
    pick: Pick = greedy,
) -> Iterator[torch.Tensor]:
    """Yield the next token of every row, `count` times.

    Args:
        programs: the result of `tpcompiler.load` for models from `tpcompiler export --prefill-decode`.
        inputs: keyed by transformers' names: `input_ids`, or the encoder's inputs and `decoder_input_ids`.
        count: number of tokens; the caches must have room for the prompt and these.
        where: the origin of the inputs, for errors.
        pick: chooses the token from the last logits, which are equal on all ranks.

    Raises:
        InputsError: there is no prompt, or a program rejects the inputs.
    """
    prompt = DECODER if "encoder" in programs else "input_ids"
    if prompt not in inputs:
        raise InputsError(f"{where} has no {prompt!r} to begin with", help="give a row of tokens for each text")
    ids, others = inputs[prompt], {name: value for name, value in inputs.items() if name != prompt}
    shapes = _input_shapes(programs["prefill"])
    if "encoder" in programs:
        vectors = call_on(programs["encoder"], others, where)
        others = {name: value for name, value in others.items() if name == "attention_mask" and name in shapes}
        others["encoder_hidden_states"] = vectors
    size, position = shapes["input_ids"][1], 0
    first = size if isinstance(size, int) else ids.shape[1]  # some models are exported for one prompt length only
    while count > 0:
        whole = position == 0 and ids.shape[1] >= first
        new = ids[:, :first] if whole else ids[:, :1]
        places = torch.arange(position, position + new.shape[1], device=new.device)
        step = {"input_ids": new, "cache_position": places, **(others if whole else {})}
        logits = call_on(programs["prefill" if whole else "decode"], step, where)
        ids, position = ids[:, new.shape[1] :], position + new.shape[1]
        if not ids.shape[1]:
            yield (token := pick(logits[:, -1]))
            ids, count = token[:, None], count - 1


def _input_shapes(module: Any) -> dict[str, tuple[Any, ...]]:
    program = module.exported_program
    user = set(program.graph_signature.user_inputs)
    return {node.name: tuple(node.meta["val"].shape) for node in program.graph.nodes if node.name in user}
