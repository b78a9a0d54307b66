"""Inputs files, and a call on one."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import astuple
from safetensors.torch import load, save_file
from torch import nn
from torch.export import Dim, ExportedProgram

from tests.runtime.models import export_mlp, mlp_inputs
from tests.runtime.test_artifact import manifest as plain_manifest
from tpcompiler._torch import TorchDispatchMode
from tpcompiler.cli.boundary import cut_inputs
from tpcompiler.errors import InputsError
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.inputs import arrange_inputs, check_values, write_tensors
from tpcompiler.runtime.records import BoundaryRecord
from tpcompiler.runtime.run import run_file, summarize


class Mixed(nn.Module):
    """Tensors by position, in a list and by keyword; a constant between them."""

    def forward(self, a: torch.Tensor, flag: bool, rest: list[torch.Tensor], *, last: torch.Tensor) -> torch.Tensor:
        return (a + rest[0] if flag else a) - rest[1] * last


@pytest.fixture(scope="module")
def mixed() -> ExportedProgram:
    rows = Dim("rows", min=2, max=8)
    shapes: dict[str, Any] = {"a": {0: rows}, "flag": None, "rest": [{0: rows}, None], "last": None}
    arguments = (torch.ones(3, 2), True, [torch.ones(3, 2), torch.ones(2)])
    return torch.export.export(Mixed(), arguments, {"last": torch.ones(1)}, dynamic_shapes=shapes)


def test_constants_are_filled_in_and_names_sorted_out(mixed: ExportedProgram) -> None:
    given = {"last": torch.tensor([5.0]), "rest_1": torch.ones(2), "a": torch.ones(4, 2), "rest_0": torch.ones(4, 2)}
    args, kwargs = arrange_inputs(given, mixed, "here")
    assert args[1] is True
    assert [args[0], *args[2]] == [given["a"], given["rest_0"], given["rest_1"]]
    assert kwargs == {"last": given["last"]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"b": torch.ones(1)}, "here: the program has no input 'b'\n  help: its inputs are a, rest_0, rest_1, last"),
        ({"last": None}, "here: input 'last' is missing\n  help: its inputs are a, rest_0, rest_1, last"),
        (
            {"rest_1": torch.ones(2, 2)},
            "here: input 'rest_1' is torch.float32 [2, 2], the program takes torch.float32 [2]\n"
            "  help: give a tensor of that dtype and shape",
        ),
        (
            {"last": torch.ones(1, dtype=torch.float64)},
            "here: input 'last' is torch.float64 [1], the program takes torch.float32 [1]\n"
            "  help: give a tensor of that dtype and shape",
        ),
    ],
)
def test_what_does_not_fit(mixed: ExportedProgram, change: dict[str, Any], expected: str) -> None:
    good = {"a": torch.ones(4, 2), "rest_0": torch.ones(4, 2), "rest_1": torch.ones(2), "last": torch.ones(1)}
    given = {name: value for name, value in {**good, **change}.items() if value is not None}
    with pytest.raises(InputsError) as raised:
        arrange_inputs(given, mixed, "here")
    assert str(raised.value) == expected


def manifest(inputs: dict[str, str], outputs: dict[str, str]) -> Manifest:
    rows = [
        [BoundaryRecord(name=name, shape=[], dtype="f32", sharding=text) for name, text in rows.items()]
        for rows in (inputs, outputs)
    ]
    return plain_manifest(inputs=rows[0], outputs=rows[1])


def test_run_file_names_the_tensor_outputs(tmp_path: Path) -> None:
    program = export_mlp()
    module = program.module()
    module.exported_program = program  # type: ignore[assignment]
    save_file(mlp_inputs(), tmp_path / "in")
    named = run_file(module, manifest({}, {"hidden": "R", "logits": "R"}), tmp_path / "in")
    expected = program.module()(*mlp_inputs().values())
    assert list(named) == ["hidden", "logits"]
    assert all(torch.equal(named[name], expected[name]) for name in named)


def test_run_file_says_what_an_op_refuses(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Embedding(16, 4), (torch.arange(3),))
    module = program.module()
    module.exported_program = program  # type: ignore[assignment]
    save_file({"input": torch.full((3,), 99)}, tmp_path / "in")
    with pytest.raises(InputsError, match="the program does not run: index out of range in self"):
        run_file(module, manifest({}, {"output": "R"}), tmp_path / "in")


def boundary(sharding: str, shape: list[int | str]) -> Manifest:
    rows = [BoundaryRecord(name="x", sharding=sharding, shape=shape, dtype="f32")]
    return plain_manifest(mesh={"dp": 2, "tp": 2}, groups={}, inputs=rows)


def test_inputs_that_are_cut_are_whole_in_the_file() -> None:
    x = torch.arange(12.0).view(4, 3)
    shares = [cut_inputs({"x": x}, boundary("[S(0), R]", [4, 3]), rank, "in")["x"] for rank in range(4)]
    assert [share.tolist() for share in shares] == [x[:2].tolist()] * 2 + [x[2:].tolist()] * 2
    assert cut_inputs({"x": x}, boundary("[R, R]", [4, 3]), 1, "in")["x"] is x
    with pytest.raises(
        InputsError, match=r"^in: input 'x' is \[2, 3\], and the whole is \[4, 3\]\n  help: give the whole"
    ):
        cut_inputs({"x": x[:2]}, boundary("[S(0), R]", [4, 3]), 0, "in")
    with pytest.raises(
        InputsError, match=r"dim 0 of input 'x' is 3, which 2 ranks share\n  help: give a multiple of 2"
    ):
        cut_inputs({"x": x[:3]}, boundary("[S(0), R]", ["s0", 3]), 0, "in")


def test_summarize() -> None:
    tensors = {
        "f": torch.tensor([[1.0, -4.0]]),
        "i": torch.tensor([1, 2, 6]),
        "b": torch.tensor(True),
        "e": torch.ones(0, 3),
        "h": torch.tensor([2.5], dtype=torch.bfloat16),
        "c": torch.tensor([1 + 2j]),
    }
    assert [*map(astuple, summarize(tensors))] == [
        ("f", [1, 2], "float32", -1.5, 4.0),
        ("i", [3], "int64", 3.0, 6.0),
        ("b", [], "bool", 1.0, 1.0),
        ("e", [0, 3], "float32", None, None),
        ("h", [1], "bfloat16", 2.5, 2.5),
        ("c", [1], "complex64", "1+2j", pytest.approx(abs(1 + 2j))),
    ]


def test_an_index_elsewhere_than_on_the_cpu_is_asserted_and_not_read() -> None:
    called: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    rows = [BoundaryRecord(name="ids", shape=[3], dtype="i64", sharding="R", values=[0, 6])]
    with Noted():  # a value of a tensor on the meta device cannot be read
        check_values({"ids": torch.empty(3, dtype=torch.int64, device="meta")}, rows)
    assert "aten._assert_async.msg" in called
    with pytest.raises(InputsError, match="input 'ids' has the value 7, and may have 0 to 6"):
        check_values({"ids": torch.tensor([1, 7])}, rows)


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    """safetensors puts a new file in the place of what it is given."""
    os.mkfifo(tmp_path / "out")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "out").read_bytes()), daemon=True)
    reader.start()
    write_tensors(tmp_path / "out", {"x": torch.ones(3)})
    reader.join(60)
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode)
    assert torch.equal(load(read[0])["x"], torch.ones(3))
