"""Plan files: what is read, and the words of every refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from tpcompiler.errors import PlanError, TpCompilerError
from tpcompiler.ir.placements import parse_placement
from tpcompiler.plan.plan import Plan, PlanEntry
from tpcompiler.plan.styles import Style
from tpcompiler.yaml_file import MAX_BYTES

R, S0 = Replicate(), Shard(0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.yaml"


def refusal(file: Path | str) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.of(file)
    return str(caught.value)


def test_yaml(file: Path) -> None:
    file.write_bytes(
        b"\xef\xbb\xbf# Llama\n"
        b'"*.up": colwise\n'
        b"down: rowwise  # reduced\n"
        b'"**.weight": {dp: R, tp: S(0)}\n'
        b'"qkv.weight": S(0, parts 16 8 8)  # as the report prints it\n'
        b"attn:\n"
        b"  inputs: [R, null]\n"
    )
    plan = Plan.of(file)
    assert plan.entries == (
        PlanEntry("*.up", Style("colwise", cut="out"), where=""),
        PlanEntry("down", Style("rowwise", cut="in"), where=""),
        PlanEntry("**.weight", Style("placement", placement={"dp": R, "tp": S0}), where=""),
        PlanEntry("qkv.weight", Style("placement", placement=parse_placement("S(0, parts 16 8 8)")), where=""),
        PlanEntry("attn", Style("prepare_input", inputs=(R, None)), where=""),
    )
    assert [entry.where for entry in plan.entries] == [
        f'{file.name} line 2 ("*.up": "colwise")',
        f'{file.name} line 3 ("down": "rowwise")',
        f"{file.name} line 4 (\"**.weight\": {{'dp': 'R', 'tp': 'S(0)'}})",
        f'{file.name} line 5 ("qkv.weight": "S(0, parts 16 8 8)")',
        f"{file.name} line 6 (\"attn\": {{'inputs': ['R', None]}})",
    ]


def test_json_with_tabs(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{\n\t"*.up": "colwise",\n\t"down": {"tp":"S(0)"}\n}')
    assert [entry.where for entry in Plan.of(file).entries] == [
        f'{file.name} line 2 ("*.up": "colwise")',
        f"{file.name} line 3 (\"down\": {{'tp': 'S(0)'}})",
    ]


def test_a_style_error_names_its_line(file: Path) -> None:
    file.write_text('up: colwise\n"*.down": {tp: S(one)}\n')
    assert refusal(file) == (
        "'S(one)' is not a placement\n"
        "  help: write R, S(dim) such as S(0) or S(-1), or P(op) with op one of sum, avg, product, max, min\n"
        f"  asked by: {file.name} line 2 (\"*.down\": {{'tp': 'S(one)'}})"
    )


PATH = "give the path of a YAML or JSON file"


def test_unreadable_names() -> None:
    said, help = refusal("a\0b").splitlines()
    assert re.match(r"plan file 'a\\x00b' cannot be read: .*embedded null", said)  # Python's words, which change
    assert help == f"  help: {PATH}"
    name = "x" * 300
    assert refusal(name) == f"plan file {name!r} cannot be read: File name too long\n  help: {PATH}"


def test_a_file_of_the_largest_size_is_read(file: Path) -> None:
    entry = b"up: colwise\n"
    file.write_bytes(entry + b"#" * (MAX_BYTES - len(entry)))
    assert len(Plan.of(file).entries) == 1
    with file.open("ab") as more:
        more.write(b"#")
    assert refusal(file) == (
        f"plan file {file} is larger than 1048576 bytes\n  help: write one entry for all layers alike, with '*'"
    )


ALIAS = (
    "YAML anchors and aliases (& and *) are not allowed\n"
    '  help: quote a name that begins with *, such as "*.up": colwise'
)
SYNTAX = "\n  help: correct the quotes, brackets and indentation"
KEY = 'a key is not text\n  help: quote the key, such as "0" or "on"'


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (b"", "", "is empty"),
        (b"# nothing yet\n", "", "is empty"),
        (b"{}", "", "is empty"),
        (b"# a list\n- up\n", "line 2: ", "the plan is not a mapping"),
        (b"colwise", "line 1: ", "the plan is not a mapping"),
        (b"up: R\n\xff: R", "line 2: ", "not UTF-8 text\n  help: save the file as UTF-8"),
        (b"up: R\n*.down: R", "line 2: ", ALIAS),
        (b"**.down: R", "line 1: ", ALIAS),
        (b"up: &style colwise\ngate: *style", "line 1: ", ALIAS),
        (b"up: R\n& gate: R", "line 2: ", ALIAS),
        (b"0: colwise", "line 1: ", KEY),
        (b"up: R\non: R", "line 2: ", KEY),
        (b"up: {tp: R,\n  1: R}", "line 2: ", KEY),
        (b"? [up]\n: R", "line 1: ", KEY),
        (b"<<: {up: R}", "line 1: ", KEY),
        (b"up: R\ndown: R\nup: S(0)", "line 3: ", "'up' is written already in line 1\n  help: remove one of the two"),
        (b"up: {tp: R, tp: R}", "line 1: ", "'tp' is written already in line 1\n  help: remove one of the two"),
        (
            b"up: [",
            "line 1: ",
            "not YAML: while parsing a flow node, expected the node content, but found '<stream end>'" + SYNTAX,
        ),
        (b"up: R\nup: a: b", "line 2: ", "not YAML: mapping values are not allowed here" + SYNTAX),
        (
            b"up: R\n---\ndown: R",
            "line 2: ",
            "not YAML: expected a single document in the stream, but found another document" + SYNTAX,
        ),
        (b"up: R\n\x07", "line 2: ", "not YAML: character '\\x07' is not allowed" + SYNTAX),
        (b'up: "\\U00110000"', ": ", "not YAML: chr() arg not in range(0x110000)" + SYNTAX),
        (b"[" * 10_000, "line 1: ", "not YAML: it is nested too deeply" + SYNTAX),
        ((b"\n" + b"[" * 250 + b"]" * 250 + b",") * 2_000, "line 2: ", "not YAML: it is nested too deeply" + SYNTAX),
        (b"up: [" + b"1," * 400_000 + b"]", "line 1: ", "not YAML: it has more than 100000 values" + SYNTAX),
    ],
)
def test_refused(file: Path, content: bytes, place: str, words: str) -> None:
    helps = {
        "is empty": 'write at least one entry, such as "*.up": colwise',
        "the plan is not a mapping": 'write one "name": style on each line, such as "*.up": colwise',
    }
    file.write_bytes(content)
    words += f"\n  help: {helps[words]}" if words in helps else ""
    separator = "" if place == ": " else " "
    assert refusal(file) == f"plan file {file}{separator}{place}{words}"


def test_tags_run_nothing(file: Path) -> None:
    file.write_text("up: !!python/object/apply:os.system [R]")
    assert refusal(file) == (
        "['R'] is not a style\n"
        "  help: use one of colwise, colwise_gather_output, rowwise, rowwise_split_input, embedding_rowwise, "
        "packed_colwise, packed_rowwise, replicate, sequence_parallel, gather, moe_tp_experts, grouped_gemm, dispatch_experts, attend_in_turns, shard_at_rest, or a placement such as S(0) or R\n"
        f"  asked by: {file.name} line 1 (\"up\": ['R'])"
    )


@given(st.binary() | st.text("ab*&!%?|>{}[]:-,#'\"\\ \n\tRS()01~<=", max_size=40).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@example(b"%YAML " + b"9" * 5000 + b".1\n---\nup: R")
@example(b'up: "\\ud800"')
@example(b'up: "\\UFFFFFFFF"')
def test_any_bytes_are_read_or_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    try:
        plan = Plan.of(file)
    except TpCompilerError:
        return
    assert Plan.of(plan.to_data()) == plan
