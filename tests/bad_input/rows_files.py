"""Rows of the table: files that are none of what is asked for, models, and inputs."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.bad_input.row import Row, Spoil, content, entries, state, state_of, text, zipped
from tests.runtime.models import mlp_inputs

EXPORT = "export the model and write it with torch.export.save(exported_program, path)"
DOWNLOAD = "download a model of the Hugging Face hub first: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
OF_TORCH = "copy the file again, or export the model again with this version of torch"
CONVERT = "tpcompiler convert model.pt2 --tp 2 --plan plan.yaml"
VERIFY = "tpcompiler verify out --against model.pt2 --inputs in.safetensors"

FILES = [
    Row(
        "a model that does not exist",
        "tpcompiler inspect none.pt2",
        "none.pt2 does not exist",
        f"give the path of a .pt2 file; to make one, {EXPORT}",
    ),
    Row(
        "the same, to be converted",
        "tpcompiler convert none.pt2 --tp 2 --plan plan.yaml -o new",
        "none.pt2 does not exist",
        f"give the path of a .pt2 file; to make one, {EXPORT}",
    ),
    Row(
        "the id of a model of the Hugging Face hub",
        "tpcompiler inspect Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-0.6B does not exist",
        f"{DOWNLOAD}; then tpcompiler export Qwen3-0.6B -o model.pt2",
    ),
    Row(
        "the same, to be exported",
        "tpcompiler export Qwen/Qwen3-0.6B -o new.pt2",
        "Qwen/Qwen3-0.6B does not exist",
        f"{DOWNLOAD}; give Qwen3-0.6B",
    ),
    Row(
        "such an id without an owner",
        "tpcompiler export gpt2 -o new.pt2",
        "gpt2 does not exist",
        "download a model of the Hugging Face hub first: hf download gpt2 --local-dir gpt2; give gpt2",
    ),
    Row(
        "the same, as a checkpoint",
        "tpcompiler cut uncut --checkpoint Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-0.6B does not exist",
        f"{DOWNLOAD}; give Qwen3-0.6B",
    ),
    Row(
        "the same, as a plan",
        "tpcompiler convert model.pt2 --tp 2 --plan Qwen/Qwen3-0.6B/config.json -o new",
        "plan file Qwen/Qwen3-0.6B/config.json does not exist",
        f"{DOWNLOAD}; its Qwen3-0.6B/config.json is a plan",
    ),
    Row("a directory", "tpcompiler convert . --tp 2 --plan plan.yaml -o new", ". is a directory", "give a .pt2 file"),
    Row(
        "an artifact where a model belongs",
        "tpcompiler convert out --tp 2 --plan plan.yaml -o new",
        "out is a directory that tpcompiler wrote",
        "give the .pt2 file of the single-device model",
    ),
    Row(
        "a text file, in a folder whose name looks like markup",
        "tpcompiler inspect [/b].pt2",
        "[/b].pt2 is a text file, not a .pt2",
        EXPORT,
        spoil=lambda patch: (Path("[").mkdir(), Path("[/b].pt2").write_text("a model, honestly\n")),
    ),
    Row(
        "a file of no bytes",
        "tpcompiler inspect given.pt2",
        "given.pt2 is empty",
        f"it is not a .pt2: {EXPORT}",
        spoil=content("given.pt2", b""),
    ),
    Row(
        "a pipe",
        "tpcompiler inspect pipe",
        "pipe cannot be read: it is a pipe or a device",
        "check the path and the permissions",
        spoil=lambda patch: os.mkfifo("pipe"),
    ),
    Row(
        "noise",
        "tpcompiler inspect given.pt2",
        "given.pt2 is not a .pt2 (no zip archive)",
        EXPORT,
        spoil=content("given.pt2", bytes(range(255, 100, -1))),
    ),
    Row(
        "a Git LFS pointer",
        "tpcompiler inspect given.pt2",
        "given.pt2 is a Git LFS pointer, not the file itself",
        "get the file with git lfs pull",
        spoil=text("given.pt2", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ),
    Row(
        "a pickle",
        "tpcompiler inspect given.pt2",
        "given.pt2 is a Python pickle, not a .pt2",
        EXPORT,
        spoil=content("given.pt2", pickle.dumps({"weights": [1.0]})),
    ),
    Row(
        "weights that `torch.save` wrote",
        "tpcompiler inspect given.pt2",
        "given.pt2 is a pickle of something else (torch.save of weights or a module), not a .pt2",
        EXPORT,
        spoil=lambda patch: torch.save({"weight": torch.ones(3)}, "given.pt2"),
    ),
    Row(
        "weights as safetensors",
        "tpcompiler inspect given.pt2",
        "given.pt2 is a safetensors file: weights without a program, not a .pt2",
        EXPORT,
        spoil=lambda patch: save_file({"weight": torch.ones(3)}, "given.pt2"),
    ),
    Row(
        "another zip archive",
        "tpcompiler inspect given.pt2",
        "given.pt2 is a zip archive of something else, not a .pt2",
        EXPORT,
        spoil=zipped("given.pt2", "folder/readme.txt"),
    ),
    Row(
        "TorchScript",
        "tpcompiler inspect given.pt2",
        "given.pt2 is a TorchScript archive (torch.jit.save), not a .pt2",
        EXPORT,
        spoil=zipped("given.pt2", "model/data.pkl", "model/constants.pkl", "model/code/__torch__.py"),
    ),
    Row(
        "an AOTInductor package",
        "tpcompiler inspect given.pt2",
        "given.pt2 is an AOTInductor package: compiled code, not a .pt2 with a graph",
        EXPORT,
        spoil=zipped("given.pt2", "model/archive_format", "model/data/aotinductor/model/model.so"),
    ),
    Row(
        "an archive with programs of other names",
        "tpcompiler inspect given.pt2",
        "given.pt2 holds exported programs named decoder, encoder, and none named 'model'",
        "write a file with one program by torch.export.save(exported_program, path)",
        spoil=zipped("given.pt2", "model/models/encoder.json", "model/models/decoder.json"),
    ),
    Row(
        "a model file that is cut off",
        "tpcompiler inspect model.pt2",
        "model.pt2 is a damaged or truncated .pt2 (a zip archive without its end)",
        "copy the file again, or export again",
        spoil=lambda patch: Path("model.pt2").write_bytes(Path("model.pt2").read_bytes()[:5000]),
    ),
    Row(
        "a name that is too long",
        f"tpcompiler inspect {'a' * 300}",
        f"{'a' * 300} cannot be read: File name too long",
        "check the path and the permissions",
    ),
    Row(
        "a picture in a folder that does not exist",
        "tpcompiler inspect out -o none/out.dot",
        "cannot write none/out.dot: No such file or directory",
        "choose another file",
    ),
    Row(
        "a picture in the place of a directory",
        "tpcompiler inspect out -o out",
        "cannot write out: Is a directory",
        "choose another file",
    ),
]

MODELS = [
    Row(
        "a file of a later torch",
        "tpcompiler inspect model.pt2",
        "model.pt2 cannot be read by torch <torch>: its format is version 7, and this torch reads 0",
        OF_TORCH,
        spoil=entries("model.pt2", lambda name, found: b"7" if name.endswith("archive_version") else found),
    ),
    Row(
        "a file that lacks an entry",
        "tpcompiler inspect model.pt2",
        "model.pt2 cannot be read by torch <torch>: it has no entry data/weights/weight_1",
        OF_TORCH,
        spoil=entries("model.pt2", lambda name, found: None if name.endswith("weight_1") else found),
    ),
    Row(
        "an op that nobody has registered",
        "tpcompiler inspect model.pt2",
        "model.pt2 calls the op mylib.relu.default, which this torch <torch> does not have",
        "pass --import MODULE with the module that registers the op, or export with this version of torch",
        spoil=entries("model.pt2", lambda name, found: found.replace(b"aten.relu.default", b"mylib.relu.default")),
    ),
    Row(
        "a module that is not installed",
        "tpcompiler inspect model.pt2 --import no_such_module",
        "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'",
        "give the dotted name of a module that python can import here",
    ),
    Row(
        "a module that breaks",
        "tpcompiler inspect model.pt2 --import breaks_at_once",
        "cannot import breaks_at_once: ValueError: not today",
        "give the dotted name of a module that python can import here",
        spoil=text("breaks_at_once.py", "raise ValueError('not today')\n"),
    ),
    Row(
        "a weight of another shape than the graph's",
        f"{CONVERT} -o new",
        "parameter 'head.bias' is f32[5], the graph was exported with f32[4]",
        "put in the weights of the model that was exported, or export again",
        spoil=state("model.pt2", state_of({"head.bias": torch.ones(5)})),
    ),
    Row(
        "a weight of another dtype than the graph's",
        f"{CONVERT} -o new",
        "parameter 'head.bias' is f16[4], the graph was exported with f32[4]",
        "put in the weights of the model that was exported, or export again",
        spoil=state("model.pt2", state_of({"head.bias": torch.ones(4, dtype=torch.float16)})),
    ),
    Row(
        "another model than the one that was converted",
        "tpcompiler verify out --against other.pt2",
        "out was made from another program: the two differ in 'layers.0.up.weight'",
        "give the program that it was converted from",
    ),
]


def inputs(**tensors: torch.Tensor | None) -> Spoil:
    """Good inputs, with others in their places, or without them."""
    good = {name: value for name, value in {**mlp_inputs(), **tensors}.items() if value is not None}
    return lambda patch: save_file(good, "in.safetensors")


def without_examples(patch: pytest.MonkeyPatch) -> None:
    program = torch.export.load("model.pt2")
    program.example_inputs = None
    torch.export.save(program, "model.pt2")


INPUTS = [
    Row(
        "no such file",
        "tpcompiler verify out --against model.pt2 --inputs none.safetensors",
        "inputs file none.safetensors does not exist",
        "give the path of a safetensors file",
    ),
    Row(
        "a directory",
        "tpcompiler verify out --against model.pt2 --inputs out",
        "inputs file out is a directory",
        "give the path of a safetensors file",
    ),
    Row(
        "no bytes",
        VERIFY,
        "in.safetensors is not a safetensors file: Error while deserializing header: header too small",
        "write it with safetensors.torch.save_file({name: tensor}, path)",
        spoil=content("in.safetensors", b""),
    ),
    Row(
        "what `torch.save` wrote",
        VERIFY,
        "in.safetensors is not a safetensors file: Error while deserializing header: header too large",
        "write it with safetensors.torch.save_file({name: tensor}, path)",
        spoil=lambda patch: torch.save(mlp_inputs(), "in.safetensors"),
    ),
    Row(
        "a dtype that torch does not have",
        VERIFY,
        "in.safetensors has tensors of dtype 'F4', which torch does not read",
        "write them in another dtype",
        spoil=content(
            "in.safetensors",
            struct.pack("<Q", 56) + b'{"x":{"dtype":"F4","shape":[4,4],"data_offsets":[0,8]}} ' + bytes(8),
        ),
    ),
    Row(
        "an input that is missing",
        VERIFY,
        "in.safetensors: input 'shift' is missing",
        "its inputs are x, shift",
        spoil=inputs(shift=None),
    ),
    Row(
        "an input too many",
        VERIFY,
        "in.safetensors: the program has no input 'y'",
        "its inputs are x, shift",
        spoil=inputs(y=torch.ones(1)),
    ),
    Row(
        "another shape",
        VERIFY,
        "in.safetensors: input 'x' is torch.float32 [2, 8], the program takes torch.float32 [3, 8]",
        "give a tensor of that dtype and shape",
        spoil=inputs(x=torch.ones(2, 8)),
    ),
    Row(
        "another dtype",
        VERIFY,
        "in.safetensors: input 'x' is torch.float64 [3, 8], the program takes torch.float32 [3, 8]",
        "give a tensor of that dtype and shape",
        spoil=inputs(x=torch.ones(3, 8, dtype=torch.float64)),
    ),
    Row(
        "NaN alone",
        VERIFY,
        "the single-device program gives no finite number in 36 ('hidden', 'logits'): there is nothing to compare",
        "look for NaN and infinity in the inputs and the weights",
        spoil=inputs(x=torch.full((3, 8), float("nan"))),
    ),
    Row(
        "a model without example inputs, and none given",
        "tpcompiler verify out --against model.pt2",
        "model.pt2 was saved without example inputs",
        "give inputs with --inputs FILE",
        spoil=without_examples,
    ),
]
