"""Call a rank's program on an inputs file, or generate tokens with a set of programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tpcompiler._torch import tree_flatten
from tpcompiler.errors import InputsError, reason
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.inputs import arrange_inputs, read_tensors
from tpcompiler.runtime.records import Record


def run_file(
    module: Any, manifest: Manifest, path: str | os.PathLike[str], shares: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Call a loaded program on an inputs file; return its tensor outputs by the manifest's names.

    Args:
        shares: the rank's shares of the file's tensors, if inputs are cut.

    Raises:
        InputsError: the inputs file does not fit, or the program rejects its sizes.
    """
    result = call_on(module, read_tensors(path) if shares is None else shares, str(path))
    tensors = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
    return {row.name: tensor for row, tensor in zip(manifest.outputs, tensors, strict=True)}


def call_on(module: Any, given: Mapping[str, torch.Tensor], where: str) -> Any:
    """Call a loaded program on inputs by name; `where` names their origin in errors.

    Raises:
        InputsError: inputs do not fit, or the program rejects their sizes.
    """
    args, kwargs = arrange_inputs(given, module.exported_program, where)
    try:
        with torch.no_grad():
            return module(*args, **kwargs)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:  # from a guard or an op
        line = reason(error)
        raise InputsError(f"{where}: the program does not run: {line}", help="check the sizes and values") from error


class ReturnedTensor(Record, frozen=True):
    """A tensor that the program returned."""

    name: str  # of the output
    shape: list[int]  # of the whole
    dtype: str  # as torch names it
    mean: float | str | None  # text of complex numbers, null without elements
    largest: float | None  # the largest magnitude, null without elements


def summarize(tensors: Mapping[str, torch.Tensor]) -> list[ReturnedTensor]:
    rows = []
    for name, tensor in tensors.items():
        numbers = tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
        mean, largest = (numbers.mean().item(), numbers.abs().amax().item()) if numbers.numel() else (None, None)
        shown = f"{mean:.6g}" if isinstance(mean, complex) else mean
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append(ReturnedTensor(name, list(tensor.shape), dtype, shown, largest))
    return rows


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
    """Yield the next token of every row, `count` times: after the encoder, if there is one, and the prompt.

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
