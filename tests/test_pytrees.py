"""Every shape of inputs and outputs that torch.export takes, through conversion, files and the judge."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

import tpcompiler
from tests.zoo.case import randomise
from tpcompiler._torch import fake_group
from tpcompiler.errors import InputsError, UnsupportedError
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.model_file import read_model


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: dict[str, torch.Tensor]


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    parts: list[torch.Tensor]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


torch.export.register_dataclass(Batch, serialized_type_name="tests.pytrees.Batch")
torch.export.register_dataclass(Result, serialized_type_name="tests.pytrees.Result")
pytree._register_namedtuple(Pair, serialized_type_name="tests.pytrees.Pair")

PLAN = {"up": "colwise", "down": "rowwise"}
X, Y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5))
W = torch.arange(8.0)


class Net(nn.Module):
    """A network of two cut layers, called by a forward of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("shift", torch.ones(8))

    def net(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def exported(forward: Callable[..., Any], args: Any = (), kwargs: Any = None, **options: Any) -> ExportedProgram:
    module = randomise(type("Own", (Net,), {"forward": forward})())
    return torch.export.export(module, pytree.tree_map(_copy, args), kwargs, **options)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def check(
    program: ExportedProgram, out: Path, *calls: tuple[tuple[Any, ...], dict[str, Any]], keep: bool = False, **more: Any
) -> tpcompiler.ParallelProgram:
    """In memory and from files every call is equal; the files keep the calling convention."""
    made = tpcompiler.parallelize(program, 2, **{"plan": PLAN, **more})
    made.save(out, keep_output_types=keep)
    written = read_model(out / "rank_0.pt2")
    for args, kwargs in calls:
        assert made.verify(args, kwargs).ok
        assert tpcompiler.open(out).verify(args, kwargs, original=program).ok
        if "inputs" not in more:  # these take whole tensors
            with fake_group("tp=2:tp", 0, 2, "cpu"):  # collectives that answer nothing: only the structure counts
                got = pytree.tree_structure(written.module()(*pytree.tree_map(_copy, args), **kwargs))
            assert got == written.call_spec.out_spec
    assert written.call_spec.in_spec == program.call_spec.in_spec
    if read_manifest(out).output_type is None:
        assert written.call_spec.out_spec == program.call_spec.out_spec
    return made


def nest(self: Any, tree: Any, row: Any) -> Any:
    return {"a": {"b": [self.net(tree["x"]["y"]), (row[0], row[1][0] * 2)]}, "c": (), "d": None}


def constants(self: Any, x: torch.Tensor, none: None, flag: bool, times: int, half: float, mode: str) -> Any:
    return (self.net(x) * times * half if flag and mode == "up" else x), none, flag, times, half


def unused(self: Any, x: torch.Tensor, y: torch.Tensor, z: Any) -> torch.Tensor:
    return self.net(x)


def same_thrice(self: Any, x: torch.Tensor) -> Any:
    y = self.net(x)
    return y, {"again": y}, y


def passed_through(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x, self.net(x), y, self.up.weight, self.down.bias, self.shift


def nothing(self: Any, x: torch.Tensor, empty: torch.Tensor) -> Any:
    return self.net(x[:0]), empty, self.net(empty)


def scalars(self: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
    return self.net(x) * scale, scale + 1, self.net(x).sum(), self.net(x) > 0, (self.net(x) * 10).to(torch.int64)


def views(self: Any, x: torch.Tensor) -> Any:
    y = self.net(x)
    return y.t(), y[:, ::2], y.transpose(0, 1).contiguous(), self.up(x)[0]


def written_back(self: Any, x: torch.Tensor) -> Any:
    x.add_(1)
    self.shift.mul_(2)
    return x, self.net(x) + self.shift


def by_name(self: Any, x: torch.Tensor, b: Any = None, *, c: torch.Tensor, d: Any) -> torch.Tensor:
    return self.net(x) + c * d["p"] - d["q"]


CASES: dict[str, tuple[Any, Any]] = {
    "nested": (nest, ({"x": {"y": X}}, [X, (Y,)])),
    "ordered": (lambda self, d: collections.OrderedDict(b=self.net(d["x"]), a=d["x"]), (collections.OrderedDict(x=X),)),
    "keys that are numbers": (lambda self, d: {0: self.net(d[1]), 1: d[1]}, ({1: X},)),
    "a list of any length": (lambda self, rows: tuple(self.net(row) for row in rows), ([X, Y],)),
    "constants": (constants, (X, None, True, 3, 2.5, "up")),
    "unused": (unused, (X, Y, None)),
    "same thrice": (same_thrice, (X,)),
    "passed through": (passed_through, (X, Y)),
    "nothing": (nothing, (X, torch.empty(0, 8))),
    "scalars": (scalars, (X, torch.tensor(3.0))),
    "views": (views, (X,)),
    "written back": (written_back, (X,)),
    "no input": (lambda self: self.net(torch.ones(2, 8)), ()),
    "one tensor twice": (lambda self, x, y: self.net(x) + y, (X, X)),
    "only constants": (lambda self, x: (None, 3, self.net(x) * 0), (X,)),
}


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_any_tree(name: str, tmp_path: Path) -> None:
    forward, args = CASES[name]
    check(exported(forward, args), tmp_path / "out", (args, {}))


@pytest.mark.slow
def test_keyword_arguments_in_any_order(tmp_path: Path) -> None:
    """Also the keys of a dict: the program finds them by name."""
    first = (X,), {"c": Y, "d": {"p": W, "q": Y}}
    second = (X,), {"d": {"q": Y, "p": W}, "c": Y}
    check(exported(by_name, *first), tmp_path / "out", first, second)
    positional = ({"p": X, "q": Y},), {}
    turned = ({"q": Y, "p": X},), {}
    program = exported(lambda self, d: self.net(d["p"]) - d["q"], positional[0])
    check(program, tmp_path / "other", positional, turned)


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [False, True])
def test_classes(keep: bool, tmp_path: Path) -> None:
    """An output class is written as a dict, unless it is to be kept; an input class stays."""

    def forward(self: Any, batch: Batch, pair: Pair) -> Any:
        return Result(self.net(batch.x), [batch.more["k"] + pair.first, Pair(pair.second, batch.x)])

    args = Batch(X, {"k": Y}), Pair(Y, X)
    made = check(exported(forward, args), tmp_path / "out", (args, {}), keep=keep)
    assert [row.name for row in made.manifest().outputs] == ["hidden", "parts.0", "parts.1.first", "parts.1.second"]
    written = read_model(tmp_path / "out" / "rank_1.pt2")
    with fake_group("tp=2:tp", 0, 2, "cpu"):
        got = written.module()(*args)
    if keep:
        assert type(got) is Result
        assert type(got.parts[1]) is Pair
    else:
        assert got.keys() == {"hidden", "parts"}
        assert got["parts"][1].keys() == {"first", "second"}
        assert read_manifest(tmp_path / "out").output_type == f"{__name__}.Result"


def test_numbers_that_are_dynamic(tmp_path: Path) -> None:
    """A size as an output, a dynamic number as an input, and what is computed from both."""

    def forward(self: Any, x: torch.Tensor, n: int) -> Any:
        return self.net(x) * n, x.shape[0], x.shape[0] + n, torch.arange(n + 8)[n:] + x[0]

    sizes = ({0: Dim("rows")}, Dim.DYNAMIC)
    program = exported(forward, (X, 3), dynamic_shapes=sizes)
    made = check(program, tmp_path / "out", ((X, 3), {}), ((torch.randn(7, 8), 5), {}))
    assert [d.name for d in made.verify((X, 6)).outputs] == ["0", "1", "2", "3"]


def test_text_as_an_output_is_not_written(tmp_path: Path) -> None:
    """torch writes such a file and cannot read it."""
    made = tpcompiler.parallelize(exported(lambda self, x: {"y": self.net(x), "mode": "fast"}, (X,)), 2, PLAN)
    assert made.verify((X,)).ok
    with pytest.raises(UnsupportedError) as raised:
        made.save(tmp_path / "out")
    assert str(raised.value) == (
        "output 'mode' is the text 'fast', which torch.export.load cannot read back\n"
        "  help: return tensors and numbers only"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_json_does_not_keep(tmp_path: Path) -> None:
    """torch reads a list instead of it, which is no key."""
    made = tpcompiler.parallelize(exported(lambda self, x: {0: self.net(x), (1, 2): x}, (X,)), 2, PLAN)
    assert made.verify((X,)).ok
    with pytest.raises(UnsupportedError, match=r"has the key \(1, 2\), which torch's file does not keep"):
        made.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


DTYPE = "give a tensor of that dtype and shape"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (
            (X,),
            {},
            "the program was called with wrong arguments: keyword argument 'c' is missing\n"
            "  help: call it as (x, n, a dict, c=...)",
        ),
        (
            (X, 3, W),
            {"c": Y},
            "the arguments have another structure than the program takes: Node type mismatch; expected <class 'dict'>, "
            "but got <class 'torch.Tensor'>.\n  help: pass what it was exported with",
        ),
        ((X, 3), {"c": Y}, "the program takes 4 inputs, got 3\n  help: pass what it was exported with: x, n, d_p, c"),
        (
            (W, 3, {"p": 1}),
            {"c": Y},
            f"input 'x' is torch.float32 [8], the program takes torch.float32 [4, 8]\n  help: {DTYPE}",
        ),
        (
            (X, 3, {"p": 2}),
            {"c": Y},
            "input 'd_p' is 2, the program was exported with 1\n"
            "  help: pass the same value, or export again: it is a constant of the program",
        ),
    ],
)
def test_arguments_that_do_not_fit(args: Any, kwargs: Any, expected: str) -> None:
    def forward(self: Any, x: torch.Tensor, n: int, d: Any, *, c: torch.Tensor) -> torch.Tensor:
        return self.net(x) * n + c * d["p"]

    given = (X, 3, {"p": 1})
    shapes = {"x": None, "n": Dim.DYNAMIC, "d": {"p": None}, "c": None}
    made = tpcompiler.parallelize(exported(forward, given, {"c": Y}, dynamic_shapes=shapes), 2, PLAN)
    with pytest.raises(InputsError) as raised:
        made.verify(args, kwargs)
    assert str(raised.value) == expected


def test_a_float_is_the_one_of_the_export() -> None:
    """Not a number is itself, and zero has a sign."""
    forward = lambda self, x, k: torch.copysign(self.net(x).nan_to_num(k), torch.full((), k))  # noqa: E731
    for value, other in ((float("nan"), 1.0), (0.0, -0.0)):
        made = tpcompiler.parallelize(exported(forward, (X, value)), 2, PLAN)
        assert made.verify((X, value)).ok
        with pytest.raises(InputsError, match=f"input 'k' is {other}, the program was exported with {value}"):
            made.verify((X, other))


def test_containers_of_pythons_own_become_dicts_by_their_keys(tmp_path: Path) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return collections.defaultdict(list, y=self.net(x), x=x), collections.deque([x]), Pair(x, x + 1)

    tpcompiler.parallelize(exported(forward, (X,)), 2, PLAN).save(tmp_path / "out")
    spec = read_model(tmp_path / "out" / "rank_0.pt2").call_spec.out_spec
    assert pytree.tree_unflatten(range(5), spec) == ({"y": 0, "x": 1}, {"0": 2}, {"first": 3, "second": 4})
