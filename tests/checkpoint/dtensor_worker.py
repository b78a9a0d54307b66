"""One rank: an artifact's weights as DTensors, through torch.distributed.checkpoint, changed, and back."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import tpcompiler
from tpcompiler import ArtifactError

folder = Path(sys.argv[1])
mesh = init_device_mesh("cpu", (2,))
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    state = tpcompiler.open(folder / "out").state_dict(mesh)
said = [str(each.message) for each in heard if "DTensor cannot express" in str(each.message)]
assert state["head.weight"] is state["table.weight"]
wholes = {name: value.full_tensor() for name, value in state.items()}

dcp.save(dict(state), checkpoint_id=folder / "dcp")
empty = {name: torch.zeros_like(value) for name, value in state.items()}
dcp.load(empty, checkpoint_id=folder / "dcp")
read = {name: value.full_tensor() for name, value in empty.items()}
assert all(torch.equal(read[name], wholes[name]) for name in wholes)

changed = {}
for name, value in state.items():
    assert isinstance(value, DTensor)
    changed[name] = value if name == "layers.0.up.weight" else value + 1
changed["layers.1.down.weight"] = changed["layers.1.down.weight"].full_tensor()  # a whole tensor does as well
del changed["head.weight"]
for wrong, words in (({"none": wholes["table.weight"]}, "no weight"), ({"table.weight": torch.zeros(3)}, "is torch")):
    with pytest.raises(ArtifactError, match=words):
        tpcompiler.open(folder / "out").load_state_dict(wrong)
rank, table, bias = dist.get_rank(), "table.weight", "layers.1.down.bias"
size = wholes[bias].shape
replicas = DTensor.from_local(torch.full(size, float(rank)), mesh, [Replicate()], run_check=False)
odd = torch.full(size, float("nan"))
before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
for wrong, words in (
    ({bias: replicas}, f"the content of '{bias}' is SHA-256 .* on rank ., and SHA-256"),
    ({bias: torch.full(size, float(rank))}, f"the content of '{bias}' is SHA-256 .* on rank ., and SHA-256"),
    (
        {table: state[table]} if rank else {bias: replicas},
        f"'({bias}|{table})' is (nothing|a DTensor .*) on rank ., and (nothing|a DTensor .*) on",
    ),
    (
        {bias: replicas, **({table: state[table]} if rank else {})},
        f"'{table}' is (a DTensor .* on rank 1, and nothing|nothing on rank 0, and a DTensor .*) on",
    ),
    (
        {table: wholes[table] if rank else state[table]},
        f"'{table}' is (a whole tensor on rank 1, and a DTensor|a DTensor .* on rank 0, and a whole tensor)",
    ),
    ({table: state[table], "head.weight": state[table] + 1}, "'head.weight' and 'table.weight' have different values"),
    ({table: wholes[table], "head.weight": wholes[table] + 1}, "and the artifact ties them"),
):
    with pytest.raises(ArtifactError, match=words):
        tpcompiler.open(folder / "out").load_state_dict(wrong)
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before
nan = {bias: odd, table: wholes[table], "head.weight": state[table]}
tpcompiler.open(folder / "out").load_state_dict(nan)  # NaN is equal
tpcompiler.open(folder / "out").load_state_dict(changed)
torch.save({"wholes": wholes, "said": said}, folder / f"{dist.get_rank()}.result")
dist.destroy_process_group()
