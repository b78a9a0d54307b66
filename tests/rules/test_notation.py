"""What a rule's text means, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tpcompiler.errors import RuleError
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option, Refusal, follow, shardings
from tpcompiler.rules.notation import Pattern, Rule, extents, parse

AXES = {"dp": 2, "tp": 2}


def rule(text: str, *shapes: tuple[int, ...], **known: int) -> Rule:
    pattern = parse(text)
    return Rule(pattern, extents(pattern, shapes, known, "a test"), "any", "sum", {}, (), {}, "any", False, {})


def plain(inputs: Any, outputs: Any, addends: frozenset[int], whole: frozenset[str]) -> Pattern:
    """A pattern of which no output alone sums over anything."""
    return Pattern(inputs, outputs, addends, whole, (frozenset(),) * len(outputs))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (
            "b k, n k -> b n",
            plain(((("b",), ("k",)), (("n",), ("k",))), ((("b",), ("n",)),), frozenset(), frozenset()),
        ),
        ("k, +n -> n", plain(((("k",),), (("n",),)), ((("n",),),), frozenset({1}), frozenset())),
        ("+ , + n -> n", plain(((), (("n",),)), ((("n",),),), frozenset({0, 1}), frozenset())),
        ("d0 d1! -> d0 d1!", plain(((("d0",), ("d1",)),), ((("d0",), ("d1",)),), frozenset(), frozenset({"d1"}))),
        ("a! -> a", plain(((("a",),),), ((("a",),),), frozenset(), frozenset({"a"}))),
        ("b (k g) s -> b", plain(((("b",), ("k", "g"), ("s",)),), ((("b",),),), frozenset(), frozenset())),
        ("( a  1 b! ) -> a b", plain(((("a", "b"),),), ((("a",), ("b",)),), frozenset(), frozenset({"b"}))),
        ("a 1 -> 1 a", plain(((("a",), ()),), (((), ("a",)),), frozenset(), frozenset())),
        ("->", plain(((),), ((),), frozenset(), frozenset())),
        (", -> a", plain(((), ()), ((("a",),),), frozenset(), frozenset({"a"}))),
        (
            "q d, k d -> q d, k d {q k}",
            Pattern(
                ((("q",), ("d",)), (("k",), ("d",))),
                ((("q",), ("d",)), (("k",), ("d",))),
                frozenset(),
                frozenset(),
                (frozenset(), frozenset({"q", "k"})),
            ),
        ),
        ("a -> a, a, ", plain(((("a",),),), ((("a",),), (("a",),), ()), frozenset(), frozenset())),
    ],
)
def test_parse(text: str, pattern: Pattern) -> None:
    assert parse(text) == pattern


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "rule 'a b' needs one '->'\n  help: write operands -> outputs"),
        ("a -> b -> c", "rule 'a -> b -> c' needs one '->'\n  help: write operands -> outputs"),
        ("a-b -> a", "'a-b' in the rule 'a-b ' is not a factor\n  help: use names, 1, ! and ( )"),
        ("2 -> a", "'2' in the rule '2' is not a factor\n  help: use names, 1, ! and ( )"),
        ("(a b -> a", "'(a' in the rule '(a b' is not a factor\n  help: use names, 1, ! and ( )"),
        ("((a b) c) -> a", "'(a' in the rule '((a b) c)' is not a factor\n  help: use names, 1, ! and ( )"),
        ("a -> +a", "'+a' in the rule ' +a' is not a factor\n  help: use names, 1, ! and ( )"),
        ("!a -> a", "'!a' in the rule '!a' is not a factor\n  help: use names, 1, ! and ( )"),
    ],
)
def test_not_a_rule(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse(text)
    assert _words(str(error.value)) == _words(message)


def _words(text: str) -> str:
    return text.replace(" '", "'").replace("' ", "'")


@pytest.mark.parametrize(
    ("text", "shapes", "known", "sizes"),
    [
        ("b k, n k -> b n", [(2, 3), (5, 3), (2, 5)], {}, {"b": 2, "k": 3, "n": 5}),
        ("(k g), k -> (k g)", [(8,), (2,), (8,)], {}, {"k": 2, "g": 4}),
        ("(a b) -> a b", [(6,), (2, 3)], {}, {"a": 2, "b": 3}),
        ("(a b c) -> (a b c)", [(24,), (24,)], {"a": 2, "c": 4}, {"a": 2, "b": 3, "c": 4}),
        ("(a b) -> (b a)", [(6,), (6,)], {"a": 3}, {"a": 3, "b": 2}),
        ("a 1 -> a n", [(4, 1), (4, 7)], {}, {"a": 4, "n": 7}),
        ("->", [(), ()], {}, {}),
    ],
)
def test_sizes_of_factors(text: str, shapes: list[Any], known: dict[str, int], sizes: dict[str, int]) -> None:
    assert extents(parse(text), shapes, known, "a test") == sizes


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        (
            "b k -> b",
            [(2, 3, 4), (2,)],
            "the rule of an op has terms of [2, 1] dims, the tensors have [3, 1]\n"
            "  help: give every tensor operand and output one term with one entry per dim",
        ),
        (
            "b, k -> b",
            [(2,), (2,)],
            "the rule of an op has terms of [1, 1, 1] dims, the tensors have [1, 1]\n"
            "  help: give every tensor operand and output one term with one entry per dim",
        ),
        (
            "(a b) -> (a b)",
            [(6,), (6,)],
            "the rule of an op leaves the sizes of ['a', 'b'] open\n  help: give them as factors=",
        ),
    ],
)
def test_a_rule_that_does_not_fit(text: str, shapes: list[Any], message: str) -> None:
    with pytest.raises(RuleError) as error:
        extents(parse(text), shapes, {}, "an op")
    assert str(error.value) == message


def test_factors_on_the_left_only_are_reduced() -> None:
    written = rule("b (k g), +1, t! -> b (t n)", (2, 12), (1,), (3,), (2, 15), k=4)
    assert written.reduced == {"k", "g"}
    assert written.factors == ("b", "k", "g", "t", "n")
    assert written.pattern.whole == {"t", "n"}, "a factor that is made cannot be cut either"


def test_a_dim_of_less_than_one_unit_is_not_cut() -> None:
    """Such as 32 pixels, of windows that another op cuts 64 at a time."""
    written, mesh = rule("a -> a", (32,), (32,)), Mesh.of(2)
    (term,) = written.pattern.inputs
    found = follow(written, term, Sharding((DimSharding.by("tp", unit=64),)), mesh)
    assert found == Refusal("in its dim of 32, 32 elements have no units of 64")
    assert isinstance(follow(written, term, Sharding((DimSharding.by("tp", unit=32),)), mesh), Option)


@pytest.mark.parametrize("whole", ["", "!"])
@pytest.mark.parametrize(("outer", "inner"), itertools.product(range(2, 6), (2, 3)))
def test_a_cut_of_the_outer_factor_is_read_back(outer: int, inner: int, whole: str) -> None:
    """Over two axes, of which the second may find one element left, or none."""
    written, mesh = rule(f"(a b{whole}) -> a b", (outer * inner,), (outer, inner), a=outer, b=inner), Mesh.of(AXES)
    (term,) = written.pattern.inputs
    made = shardings(written, Option({"a": DimSharding.by("dp", "tp")}), mesh)
    assert not isinstance(made, Refusal)
    found = follow(written, term, made[0][0], mesh)
    assert isinstance(found, Option), found
    again = shardings(written, found, mesh)
    assert not isinstance(again, Refusal)
    for before, after, shape in (
        (made[0][0], again[0][0], (outer * inner,)),
        (made[1][0], again[1][0], (outer, inner)),
    ):
        places = map(mesh.coordinate, range(mesh.world_size))
        assert all(before.local_shape(shape, mesh, at) == after.local_shape(shape, mesh, at) for at in places)
