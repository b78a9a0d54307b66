"""Rows of the table: ranks that torchrun starts. Its own text stands above the message, and a line of `=` below."""

from __future__ import annotations

import torch

from tests.bad_input.row import Row, content
from tests.bad_input.rows_files import inputs

RUN = "torchrun --nproc-per-node 2 -m tpcompiler.cli run out --inputs in.safetensors"

LAUNCHES = [
    Row(
        "another number of processes than of ranks",
        RUN.replace("2", "3"),
        "the artifact is for 2 ranks, this world has 3",
        "start it with torchrun --nproc-per-node 2, or convert for 3",
    ),
    Row(
        "no inputs file",
        RUN.replace("in.", "none."),
        "inputs file none.safetensors does not exist",
        "give the path of a safetensors file",
    ),
    Row(
        "an input that is missing",
        RUN,
        "in.safetensors: input 'shift' is missing",
        "its inputs are x, shift",
        spoil=inputs(shift=None),
    ),
    Row(
        "an input of another dtype",
        RUN,
        "in.safetensors: input 'x' is torch.float64 [3, 8], the program takes torch.float32 [3, 8]",
        "give a tensor of that dtype and shape",
        spoil=inputs(x=torch.ones(3, 8, dtype=torch.float64)),
    ),
    Row(
        "an input of another size",
        RUN,
        "in.safetensors: input 'x' is torch.float32 [2, 8], the program takes torch.float32 [3, 8]",
        "give a tensor of that dtype and shape",
        spoil=inputs(x=torch.ones(2, 8)),
    ),
    Row(
        "one rank alone fails",
        RUN,
        "out/rank_1.pt2 has SHA-256 <hash>.., the manifest says <hash>..",
        "copy the artifact again, or convert the model again",
        spoil=content("out/rank_1.pt2", b"PK"),
    ),
]
