"""Rules for ops of the user's own: what is refused, and the whole way of a program that has such an op."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import tpcompiler
from tests.runtime.commands import call, right
from tpcompiler.errors import RuleError
from tpcompiler.rules.registry import _RULES, _VARIANTS

library = torch.library.Library("toy_rules", "DEF")
library.define("gate(Tensor x, Tensor gate, *, float scale=1.0) -> Tensor")
library.define("norm(Tensor x, Tensor? weight=None) -> Tensor")
library.define("fill_(Tensor(a!) x) -> ()")
library.define("spread(Tensor x, SymInt[] size) -> Tensor")
library.define("parts(Tensor x) -> Tensor[]")
library.define("twice(Tensor x) -> Tensor", tags=torch.Tag.pointwise)


@torch.library.impl(library, "gate", "CompositeExplicitAutograd")
def gate(x: torch.Tensor, gate: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return x * torch.sigmoid(gate) * scale


@torch.library.impl(library, "norm", "CompositeImplicitAutograd")
def norm(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    normed = x / x.norm(dim=-1, keepdim=True)
    return normed if weight is None else normed * weight


@torch.library.impl(library, "spread", "CompositeExplicitAutograd")
def spread(x: torch.Tensor, size: list[int]) -> torch.Tensor:
    return x.unsqueeze(-1).expand(size).clone()


@torch.library.impl(library, "twice", "CompositeExplicitAutograd")
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


toy = torch.ops.toy_rules


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = [(known, dict(known)) for known in (_RULES, _VARIANTS)]
    yield
    for known, entries in before:
        known.clear()
        known.update(entries)


def register(op: object, rule: object, **options: object) -> None:
    tpcompiler.register_rule(op, rule, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "rule", "options", "said"),
    [
        (
            "toy_rules::none",
            "a -> a",
            {},
            "'toy_rules::none' is not an op of torch\n  help: give an op, or a name such as",
        ),
        ("toy_rules", "a -> a", {}, "'toy_rules' is not an op of torch"),
        (torch.pdist, "a b -> c", {}, "is not an op of torch\n  help: give the op that an exported program has for"),
        ("toy_rules::gate.out", "a -> a", {}, "'toy_rules::gate.out' is not an op of torch"),
        ("toy_rules::fill_", "a ->", {}, "toy_rules.fill_.default changes its operands in place"),
        ("aten::linear", "b k, n k -> b n", {}, "aten.linear.default has a rule already"),
        (toy.gate, "a, a", {}, "the rule of toy_rules.gate.default is malformed: rule 'a, a' needs one '->'"),
        (toy.gate, "a?, a -> a", {}, "malformed: 'a?' in the rule 'a?' is not a factor"),
        (toy.gate, "a -> a", {}, "malformed: 'a -> a' has 1 operands, the op 2"),
        (toy.gate, "a, a -> a, a", {}, "malformed: 'a, a -> a, a' has 2 outputs, the op 1"),
        (toy.norm, "a, b, c -> a", {}, "malformed: 'a, b, c -> a' has 3 operands, the op 1 to 2"),
        (toy.gate, "a a, a a -> a a", {}, "malformed: 'a a, a a -> a a' has 'a' twice in one term"),
        (toy.gate, "a, a -> a", {"shards": "all"}, "malformed: shards='all'\n  help: write one of any, nonempty, even"),
        (toy.gate, "a, a -> a", {"reduce": "mean"}, "malformed: reduce='mean'"),
        (toy.gate, "a, a -> a", {"linear": [[2]]}, "malformed: linear= names operand 2 of 2"),
        (
            toy.gate,
            "a, a -> a",
            {"sizes": {"size": "a"}},
            "malformed: sizes= names 'size'\n  help: use its arguments: x, gate, scale",
        ),
        (toy.gate, "a, a -> a", {"local": {"b": gate}}, "malformed: local= names 'b'"),
    ],
)
def test_what_is_refused(op: object, rule: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(RuleError) as error:
        register(op, rule, **options)
    assert said in str(error.value)


def test_the_terms_of_a_list_are_not_counted() -> None:
    register(toy.parts, "a b -> a, a, a")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(toy.gate(self.up(x), self.gate(x), scale=0.5))


PLAN = {"up": "colwise", "gate": "colwise", "down": "rowwise"}


def gated() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(Gated(), (torch.randn(4, 8),))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["b h, b h -> b h", lambda node: "b h, b h -> b h"], ids=["text", "function"])
def test_with_a_rule_the_program_has_one_collective(rule: object) -> None:
    register(toy.gate, rule)
    program = tpcompiler.parallelize(gated(), 2, PLAN)
    assert [c.kind for c in program.collectives()] == ["all_reduce"]
    assert program.verify((torch.randn(4, 8),)).ok


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b s h, b s h -> b s h", "has terms of [3, 3, 3] dims, the tensors have [2, 2, 2]"),
        ("b h, h b -> b h", "gives 'h' the size 12, and a tensor has 4 there"),
    ],
)
def test_a_text_that_does_not_fit_the_tensors(text: str, said: str) -> None:
    register(toy.gate, text)
    with pytest.raises(RuleError, match=r"the rule of toy_rules\.gate\.default at 'gate'") as error:
        tpcompiler.parallelize(gated(), 2, PLAN)
    assert said in str(error.value)


class One(nn.Module):
    def __init__(self, op: object, *args: object) -> None:
        super().__init__()
        self.op, self.args = op, args

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, *self.args)  # type: ignore[operator,no-any-return]


def targets(module: nn.Module, shape: tuple[int, ...], placement: str) -> list[str]:
    """The ops of rank 0's program when the input and the output are cut so."""
    exported = torch.export.export(module, (torch.randn(shape),))
    program = tpcompiler.parallelize(exported, 2, {}, inputs=[placement], outputs=[placement])
    assert program.verify((torch.randn(shape),)).ok
    return [str(node.target) for node in program.rank_program(0).graph.nodes if node.op == "call_function"]


@pytest.mark.slow
def test_an_op_that_torch_would_decompose_stays_whole() -> None:
    assert "toy_rules.norm.default" not in targets(One(toy.norm), (4, 6), "S(0)")
    register(toy.norm, "b h! -> b h!")
    assert targets(One(toy.norm), (4, 6), "S(0)") == ["toy_rules.norm.default"]


@pytest.mark.slow
def test_size_arguments_are_the_ranks_own() -> None:
    @torch.library.register_fake("toy_rules::spread", lib=library)
    def _(x: torch.Tensor, size: list[int]) -> torch.Tensor:
        return x.new_empty(size)

    register(toy.spread, "b h -> b h n", sizes={"size": "b h n"}, shards="any")
    exported = torch.export.export(One(toy.spread, [5, 6, 3]), (torch.randn(5, 6),))
    program = tpcompiler.parallelize(exported, 2, {}, inputs=["S(0)"], outputs=["S(0)"])
    assert program.verify((torch.randn(5, 6),)).ok
    (node,) = (n for n in program.rank_program(1).graph.nodes if n.target is toy.spread.default)
    assert node.args[1] == [2, 6, 3]


@pytest.mark.slow
def test_a_pending_sum_passes_through_a_linear_op_only() -> None:
    def rule(node: fx.Node) -> tpcompiler.RuleText:
        return tpcompiler.RuleText("b h -> b h", linear=((0,),))

    register(toy.twice, rule)
    exported = torch.export.export(One(toy.twice), (torch.randn(4, 6),))
    program = tpcompiler.parallelize(exported, 2, {}, inputs=["P(sum)"], outputs=["P(sum)"])
    assert program.verify((torch.randn(4, 6),)).ok
    assert not program.collectives()


MODULE = """
import torch, tpcompiler

@torch.library.custom_op("toycli::gate", mutates_args=())
def gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)

@gate.register_fake
def _(x, gate):
    return torch.empty_like(x)

tpcompiler.register_rule(gate, "b h, b h -> b h", shards="any")
"""


def test_the_command_line_imports_ops_and_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process the ops are known already; that the other commands import is the matter of their own tests."""
    (tmp_path / "toy_rules.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import toy_rules  # type: ignore[import-not-found]

    class Model(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(toy_rules.gate(self.up(x), self.gate(x)))  # type: ignore[no-any-return]

    model, plan, out = (tmp_path / name for name in ("model.pt2", "plan.yaml", "out"))
    torch.export.save(torch.export.export(Model(), (torch.randn(4, 8),)), model)
    plan.write_text("up: colwise\ngate: colwise\ndown: rowwise\n")
    for target in [target for target in _RULES if str(target).startswith("toycli")]:
        del _RULES[target]
    del sys.modules["toy_rules"]  # as in a process that has not seen it
    said = right("convert", model, "--tp", 2, "--plan", plan, "-o", out, "--import", "toy_rules")
    assert "all_reduce" in said
    assert "all_gather" not in said
    assert call("verify", out, "--against", model, "--import", "toy_rules").exit_code == 0
    assert " gate " in right("inspect", out, "--rank", 0, "--import", "toy_rules")


def test_a_variant_of_ones_own() -> None:
    """The norm of a line that is cut: one number a line, in place of all of it."""
    exported = torch.export.export(nn.Sequential(nn.Linear(8, 12), One(toy.norm.default)), (torch.randn(5, 8),))
    register(toy.norm, "b h! -> b h!", shards="any", variant=lambda x: x / x.square().sum(-1, True).sqrt())
    program = tpcompiler.parallelize(exported, 2, {"0": "colwise"}, outputs=["S(1)"])
    assert [(c.kind, c.payload_bytes) for c in program.collectives()] == [("all_reduce", 5 * 4)]
    assert program.verify((torch.randn(5, 8),)).ok


def test_the_rules_of_ops_of_transformers() -> None:
    pytest.importorskip("transformers.integrations.moe")
    rows, experts, ends = torch.randn(9, 6).double(), torch.randn(3, 6, 8).double(), torch.tensor([2, 2, 9])
    calls = {
        "transformers::grouped_mm_fallback": (rows, experts, ends),
        "transformers::grouped_mm_fallback_backward": (rows, experts, ends, torch.randn(9, 8).double()),
    }
    for name, arguments in calls.items():
        report = tpcompiler.check_rule(name, [arguments])
        # a backward is linear in one more operand each, which is whole because the forward has used it
        assert all("backward" in name and "P(sum)" in each.split("->")[0] for each in report.missing), report.missing
        assert any("k cut" in ran for ran in report.ran)
        assert any("n cut" in ran for ran in report.ran)
