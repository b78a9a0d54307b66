"""Which tensors of a checkpoint a program takes, and what is said of one that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.models import write_checkpoint
from tpcompiler import ArtifactError
from tpcompiler.checkpoint.conversion import recipes_of
from tpcompiler.checkpoint.files import INDEX, Checkpoint
from tpcompiler.checkpoint.sources import find_sources
from tpcompiler.runtime.weightless import lazy_zeros
from tpcompiler.runtime.weights import TensorEntry

F32 = torch.float32


def directory(
    tmp_path: Path, tensors: dict[str, torch.Tensor], model_type: str = "", *, architecture: str = ""
) -> Checkpoint:
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": model_type, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "there"),
    [
        (["a.up", "a.down"], ["a.up", "a.down"]),
        (["model.a.up", "model.a.down"], ["a.up", "a.down"]),
        (["a.up", "a.down"], ["model.a.up", "model.a.down"]),
        (["model.model.a.up", "model.head"], ["model.a.up", "head"]),
        (["inner.model.a.up", "inner.head"], ["model.a.up", "head"]),
    ],
)
def test_a_prefix_more_or_less(names: list[str], there: list[str], tmp_path: Path) -> None:
    checkpoint = directory(tmp_path, {name: torch.full((2,), float(i)) for i, name in enumerate(there)})
    found = find_sources([TensorEntry(name, F32, (2,)) for name in names], checkpoint)
    assert [found[name].names() for name in names] == [[name] for name in there]
    assert [float(found[name].make(checkpoint.read)[0]) for name in names] == [0, 1]


@pytest.mark.parametrize(
    ("names", "there"),
    [(["model.a.up", "head"], ["a.up", "head"]), (["a.up", "head"], ["model.a.up", "head"])],
)
def test_a_base_models_prefix_is_declared(names: list[str], there: list[str], tmp_path: Path) -> None:
    """`head` is outside of it. Without the declaration `a.up` may be another tensor."""
    pytest.importorskip("transformers")
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(there)}
    leaves = [TensorEntry(name, F32, (2,)) for name in names]
    found = find_sources(leaves, directory(tmp_path, tensors, "llama", architecture="LlamaForCausalLM"))
    assert [found[name].names() for name in names] == [[name] for name in there]
    with pytest.raises(ArtifactError, match=rf"it has no '{names[0]}' \(it has '{there[0]}'\)"):
        find_sources(leaves, directory(tmp_path, tensors))


@pytest.mark.parametrize("architecture", ["", "LlamaForCausalLM"])
@pytest.mark.parametrize(
    ("names", "there"),
    [
        (["model.a.up", "model.b.up"], ["a.up", "model.b.up"]),
        (["model.a.up"], ["a.up", "model.b.up"]),
        (["model.a.up", "a.up"], ["a.up"]),
        (["a.up", "b.up"], ["model.a.up", "b.up", "model.b.up"]),
        (["up"], ["a.up", "b.up"]),
        (["x.y.up"], ["y.up", "up"]),
    ],
)
def test_a_tensor_is_not_filled_from_another(
    names: list[str], there: list[str], architecture: str, tmp_path: Path
) -> None:
    checkpoint = directory(tmp_path, {name: torch.ones(2) for name in there}, architecture=architecture)
    with pytest.raises(ArtifactError, match=r"it has no '[a-z.]+' \(it has '[a-z.]*up'\)"):
        find_sources([TensorEntry(name, F32, (2,)) for name in names], checkpoint, partial=True)


def test_the_names_of_a_tied_tensor_have_one_value(tmp_path: Path) -> None:
    """NaN is a value, and so are the two zeros."""
    ones, odd = torch.ones(2), torch.tensor([float("nan"), 0.0])
    leaves = [TensorEntry("head", F32, (2,), ("model.embed",))]
    for kept, other, fits in ((odd, odd.clone(), True), (ones, ones + 1, False), (odd, odd * -1, False)):
        checkpoint = directory(tmp_path, {"head": kept, "model.embed": other})
        if fits:
            assert find_sources(leaves, checkpoint)["head"].names() == ["head"]
            continue
        with pytest.raises(
            ArtifactError, match=r"'head' and 'model\.embed' have different values, and the program ties"
        ):
            find_sources(leaves, checkpoint, partial=True)
    checkpoint = directory(tmp_path, {"head": ones, "model.embed": torch.ones(1)})
    with pytest.raises(ArtifactError, match=r"'model.embed' is \[1\], the program takes \[2\]"):
        find_sources(leaves, checkpoint)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("0.w1"), "are numbered 1, 2, not 0 to 1"),
        (lambda held: held.pop("1.w3"), "are numbered 0, 2, not 0 to 1"),
        (lambda held: held.pop("2.w3"), "the parts of 'model.layers.0.mlp.experts.gate_up_proj' differ in shape"),
        (lambda held: held.update({"0.w1": torch.ones(2, 4)}), "gate_up_proj' differ in shape"),
    ],
)
def test_experts_that_are_missing(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    held = {f"{expert}.{name}": torch.ones(3, 4) for expert in range(3) for name in ("w1", "w3")}
    change(held)
    inside = "model.layers.0.block_sparse_moe.experts."
    checkpoint = directory(tmp_path, {f"{inside}{name}.weight": value for name, value in held.items()}, "mixtral")
    count = sum(name.endswith("w1") for name in held)
    with pytest.raises(ArtifactError, match=said):
        find_sources([TensorEntry("model.layers.0.mlp.experts.gate_up_proj", F32, (count, 6, 4))], checkpoint)


def test_two_tensors_under_one_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    inside = "model.layers.0.{}.gate.weight"
    checkpoint = directory(tmp_path, {inside.format(n): torch.ones(2) for n in ("mlp", "block_sparse_moe")}, "mixtral")
    with pytest.raises(ArtifactError, match=r"are both 'model\.layers\.0\.mlp\.gate\.weight'"):
        find_sources([TensorEntry("other", F32, (2,))], checkpoint)


def test_a_tied_tensor_has_one_of_its_names(tmp_path: Path) -> None:
    checkpoint = directory(tmp_path, {"model.embed": torch.ones(2)})
    assert find_sources([TensorEntry("head", F32, (2,), ("model.embed",))], checkpoint)["head"].names() == [
        "model.embed"
    ]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    both = directory(tmp_path, {"model.embed": torch.ones(2), "head": torch.ones(2)})
    assert find_sources([TensorEntry("head", F32, (2,), ("model.embed",))], both)["head"].names() == ["head"]


def test_all_that_is_wrong_at_once(tmp_path: Path) -> None:
    tensors = {"up.weigth": torch.ones(2), "down": torch.ones(3), "half": torch.ones(2).half(), "more": torch.ones(1)}
    leaves = [
        TensorEntry("up.weight", F32, (2,)),
        TensorEntry("down", F32, (2,)),
        TensorEntry("half", F32, (2,)),
    ]
    with pytest.raises(ArtifactError) as error:
        find_sources(leaves, directory(tmp_path, tensors))
    assert str(error.value) == (
        f"{tmp_path} does not fit the program: it has no 'up.weight' (it has 'up.weigth'); "
        "'down' is [3], the program takes [2]; 'half' is of torch.float16, the program takes torch.float32; "
        "it has 'more', which the program does not take; it has 'up.weigth', which the program does not take\n"
        "  help: give the checkpoint of the same model"
    )


def test_more_than_the_program_takes(tmp_path: Path) -> None:
    checkpoint = directory(tmp_path, {"up": torch.ones(2), "more": torch.ones(1)})
    with pytest.raises(ArtifactError, match=r"it has 'more', which the program does not take\n  help: .*partial=True"):
        find_sources([TensorEntry("up", F32, (2,))], checkpoint)
    assert list(find_sources([TensorEntry("up", F32, (2,))], checkpoint, partial=True)) == ["up"]


def test_experts_are_stacked_as_transformers_says(tmp_path: Path) -> None:
    """In the order of their numbers, 10 after 9; gate and up in one matrix."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    count = 11
    tensors = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": torch.randn(shape)
        for expert in range(count)
        for name, shape in (("w1", (3, 4)), ("w2", (4, 3)), ("w3", (3, 4)))
    } | {"model.layers.0.block_sparse_moe.gate.weight": torch.randn(count, 4)}
    checkpoint = directory(tmp_path, tensors, "mixtral")
    inside = "model.layers.0.mlp."
    leaves = [
        TensorEntry(f"{inside}experts.gate_up_proj", F32, (count, 6, 4)),
        TensorEntry(f"{inside}experts.down_proj", F32, (count, 4, 3)),
        TensorEntry(f"{inside}gate.weight", F32, (count, 4)),
    ]
    found = find_sources(leaves, checkpoint)
    one = {
        name: found[leaf.name].make(checkpoint.read)
        for name, leaf in zip(("both", "down", "gate"), leaves, strict=True)
    }
    for expert in range(count):
        w1, w2, w3 = (
            tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.{w}.weight"] for w in ("w1", "w2", "w3")
        )
        assert torch.equal(one["both"][expert], torch.cat([w1, w3]))
        assert torch.equal(one["down"][expert], w2)
    assert torch.equal(one["gate"], tensors["model.layers.0.block_sparse_moe.gate.weight"])
    assert recipes_of({"model_type": "llama"}, ["a"])["a"].names() == ["a"]


def test_a_tensor_without_elements_is_read(tmp_path: Path) -> None:
    source = directory(tmp_path, {"a": torch.zeros(0, 4), "b": torch.arange(3.0)})
    assert (source.read("a").shape, source.read("b").tolist()) == ((0, 4), [0, 1, 2])
    (file,) = source.files
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=r"cannot be read: .*\n  help: copy the file again"):
        source.read("b")
    assert lazy_zeros(torch.empty(0, 4)).shape == (0, 4)


def test_a_checkpoint_is_what_it_says(tmp_path: Path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "c"))
    assert len(source.files) == 3
    assert source.tensors["table.weight"].shape == (21, 8)
    assert source.fingerprint() == Checkpoint(tmp_path / "c").fingerprint()
    one = Checkpoint(source.files[0])
    assert set(one.tensors) < set(source.tensors)


def _index(path: Path, value: object) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": value}))


MOVED = ((1, "layers.0.up"), (2, "layers.1.down"), (3, "table"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: shutil.rmtree(c), "does not exist"),
        (lambda c: [p.unlink() for p in c.iterdir()], "has no safetensors files"),
        (
            lambda c: ([p.unlink() for p in c.iterdir()], (c / "x.bin").touch()),
            "no safetensors files, but x.bin, a pickle",
        ),
        (lambda c: next(c.glob("*1-of*")).unlink(), "lacks 1 of its 3 files, such as model-00001-of-00003.safetensors"),
        (lambda c: _index(c, {"a": "../outside.safetensors"}), "is damaged: it names no files next to it"),
        (lambda c: _index(c, {}), "is damaged: it names no files next to it"),
        (lambda c: (c / INDEX).write_text("{"), "cannot be read"),
        (
            lambda c: _index(c, {f"{n}.bias": f"model-0000{i}-of-00003.safetensors" for i, n in MOVED}),
            "'layers.0.up.bias' is in model-00003-of-00003.safetensors, model.safetensors.index.json says model-00001",
        ),
        (lambda c: next(c.glob("*1-of*")).write_bytes(b"x" * 20), "model-00001-of-00003.safetensors cannot be read"),
        (
            lambda c: shutil.copy(c / "model-00001-of-00003.safetensors", c / "model-00002-of-00003.safetensors"),
            "is in both model-00001-of-00003.safetensors and model-00002-of-00003.safetensors",
        ),
    ],
)
def test_a_damaged_checkpoint(change: object, said: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c")
    change(tmp_path / "c")  # type: ignore[operator]
    with pytest.raises(ArtifactError, match=said):
        Checkpoint(tmp_path / "c")
