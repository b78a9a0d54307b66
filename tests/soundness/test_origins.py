"""Each claim names as its origin the value of the model that it stands for: nothing else is believed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import fx

from tests.long import some
from tests.trust.damage import Artifact, claim
from tests.trust.subjects import Subject, subject
from tpcompiler.ir.node_placement import Claim, read_claim

ATTENTION = "scaled_dot_product_attention"


def is_op(node: fx.Node) -> bool:
    said = claim(node)
    return "sharding" in said and "reshard" not in said and "getitem" not in str(node.target)


def is_inside(node: fx.Node) -> bool:
    said = claim(node)
    return "sharding" not in said and bool(said.get("reshard") or said.get("body"))


def names_of(of: Subject) -> list[str]:
    """The origins that the model has, in order."""
    claimed = {claim(first).get("origin") for first, *_ in of.sound.each(is_op)}
    return [node.name for node in of.model.graph.nodes if node.op == "call_function" and node.name in claimed]


def rename(artifact: Artifact, names: dict[str, str]) -> None:
    """Do so in every claim of every rank: those in regions, and those of getitems, too."""

    def put(said: Any) -> None:
        for key in ("origin", "body"):
            if key in said:
                said[key] = names.get(said[key], said[key])
        for part in said.get("parts", {}).values():
            put(part)

    for program in artifact.ranks:
        nodes = [node for node in program.graph.nodes if read_claim(node) != Claim()]
        seen = {id(claim(node)): claim(node) for node in nodes}
        for said in seen.values():
            if "parts" not in said or said["parts"]:
                put(said)


def refuses(of: Subject, damage: Callable[[Artifact], None], text: str) -> None:
    made = of.sound.copied()
    damage(made)
    found = of.check(made, with_original=False).findings
    assert len(found) == 1, found
    assert text in found[0]


def each_claim(of: Subject, where: Callable[[fx.Node], bool], key: str, value: str | None) -> Iterator[Artifact]:
    """The artifact with one claim changed, on all ranks; for one place in three."""
    for at in some(range(len(of.sound.each(where))), 3):
        made = of.sound.copied()
        for node in made.each(where)[at]:
            if value is None:
                del claim(node)[key]
            else:
                claim(node)[key] = value
        yield made


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "step"), [("rows", 3), ("cache by steps", 8)])
def test_the_name_of_another_value(name: str, step: int) -> None:
    of, tried = subject(name), 0
    names = names_of(of)
    for at, (first, *_) in some(enumerate(of.sound.each(is_op)), step):
        said = next(each for each in names if each != claim(first)["origin"])
        made = of.sound.copied()
        for node in made.each(is_op)[at]:
            claim(node)["origin"] = said
        assert of.check(made, with_original=False).findings, (first, said)
        tried += 1
    assert tried > 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["rows", "images", "cache by steps", "in turns"])
def test_a_name_that_the_model_lacks(name: str) -> None:
    """Everywhere in the artifact, as a compiler that is wrong would write it."""
    of = subject(name)
    names = names_of(of)
    assert len(names) > 3 or ATTENTION in names
    for each in some(names, 3):
        refuses(of, lambda made: rename(made, {each: "elsewhere"}), "claims to stand for 'elsewhere' of the model")  # noqa: B023


@pytest.mark.parametrize("name", ["rows", "images", "cache by steps"])
def test_two_names_exchanged(name: str) -> None:
    of = subject(name)
    names = names_of(of)
    for one, two in some(itertools.pairwise(names), 3):
        refuses(of, lambda made: rename(made, {one: two, two: one}), "claims to stand for")  # noqa: B023


def test_one_name_for_two_values_that_the_model_lacks() -> None:
    """Inside of a piece that is written in another way, names are the compiler's own: a name for each value."""
    of = subject("in turns")
    own = [claim(first)["origin"] for first, *_ in of.sound.each(is_op)]
    one, two = [each for each in own if each.startswith("exp")][:2]
    refuses(of, lambda made: rename(made, {one: two}), f"claims to stand for '{two}' of the model")
    made = of.sound.copied()
    rename(made, {one: "other"})
    assert of.check(made, with_original=False).findings == []


@pytest.mark.parametrize("name", ["rows", "images"])
def test_a_name_inside_of_a_region(name: str) -> None:
    of = subject(name)
    made = None
    for made in each_claim(of, is_inside, "origin", "elsewhere"):
        (finding,) = of.check(made, with_original=False).findings
        assert "and claims to stand for 'elsewhere'" in finding
    assert made is not None


def test_no_name() -> None:
    of = subject("images")
    for made in (*each_claim(of, is_op, "origin", None), *each_claim(of, is_inside, "origin", None)):
        assert of.check(made, with_original=False).findings


def test_a_number_of_the_rank() -> None:
    of = subject("rows")

    def damage(made: Artifact) -> None:
        for program in made.ranks:
            for node in program.graph.nodes:
                if claim(node).get("origin") == "rank_numbers":
                    claim(node)["origin"] = "linear"

    made = of.sound.copied()
    damage(made)
    first, *_ = of.check(made, with_original=False).findings  # of every rank
    assert "reads the rank's numbers, and claims to stand for 'linear'" in first


def test_a_change_of_a_value_that_the_model_lacks() -> None:
    """The change names the value as the op that makes it does."""
    of = subject("in turns")

    def damage(made: Artifact) -> None:
        for program in made.ranks:
            for node in program.graph.nodes:
                if claim(node).get("reshard") and claim(node)["origin"] == "stack":
                    claim(node)["origin"] = "other"

    refuses(of, damage, "claims to change 'other', and 'stack' stands for 'stack'")
