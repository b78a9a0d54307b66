"""Write docs/json.md and docs/json-schema.json from the types of the answers: python -m tools.json_page"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tpcompiler.api.diagnose import Diagnosis
from tpcompiler.artifact.summary import ArtifactSummary, ConvertedArtifact, ConvertedPrograms, ModelSummary
from tpcompiler.cli.answers import (
    CutWeights,
    ExportedFiles,
    FoundPlan,
    GeneratedTokens,
    ReshardedArtifact,
    Returned,
    WrittenFile,
    WrittenPackage,
)
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.sound.check import CheckReport
from tpcompiler.report.costs import CostTable
from tpcompiler.report.difference import ArtifactDifference
from tpcompiler.report.explanation import Explanation
from tpcompiler.report.handover import HandoverTable
from tpcompiler.report.table import RankProgram
from tpcompiler.runtime.records import Record

DOCS = Path(__file__).parents[1] / "docs"
PAGE, SCHEMA = DOCS / "json.md", DOCS / "json-schema.json"
INTRODUCTION = """# The command line's JSON

With `--json` a command prints one JSON object to standard output, and nothing else there. Errors stay text on standard
error, and exit codes are the same. No bar is shown. This page is rendered from [a JSON schema](json-schema.json), which
`python -m tools.json_page` writes from the types in the code; a test runs every command and reads its answer as that
type.

Types: `text`, `integer`, `number`, `boolean`, `null`; `list of X`; `map of X`, an object whose keys are names; and the
objects of the [last section](#objects). A field with `?` may be absent. A `number` that is not finite is a text, such
as `"inf"`. Sizes that are dynamic are texts, such as `"2*s0"`. Bytes and counts are integers; seconds are numbers. Wire
bytes are what a rank sends in one call.
"""
ANSWERS: dict[str, tuple[Any, ...]] = {  # by command; several where it depends on what is given
    "export": (ExportedFiles,),
    "inspect": (ModelSummary, ArtifactSummary, RankProgram),
    "plan": (Diagnosis, FoundPlan),
    "calibrate": (WrittenFile,),
    "convert": (ConvertedArtifact, ConvertedPrograms),
    "cut": (CutWeights,),
    "verify": (VerifyReport,),
    "check": (CheckReport,),
    "explain": (CostTable, Explanation),
    "diff": (ArtifactDifference,),
    "reshard": (ReshardedArtifact, WrittenFile),
    "package": (WrittenPackage,),
    "handover": (HandoverTable,),
    "run": (Returned, GeneratedTokens),
}
NAMES = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "null": "null"}
Schema = dict[str, Any]


def read_schema() -> tuple[dict[str, list[str]], dict[str, Schema]]:
    """Return the names of each command's answers, and the schema of each object."""
    kinds = [kind for answers in ANSWERS.values() for kind in answers]
    _, found = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for kind in _kinds(Record):
        if (described := found.get(kind.__name__)) is None:
            continue
        described["description"] = (kind.__doc__ or "").partition("\n")[0]
        documented = attributes(kind)
        for field, schema in described["properties"].items():
            schema["description"] = documented[field]
    return {command: [kind.__name__ for kind in answers] for command, answers in ANSWERS.items()}, found


def _kinds(kind: type[Record]) -> Iterator[type[Record]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def attributes(kind: type) -> dict[str, str]:
    """Return the comment on each field, of a class and of those that it extends."""
    found: dict[str, str] = {}
    for base in kind.__mro__[::-1]:
        above: list[str] = []
        for line in inspect.getsource(base).splitlines() if base.__module__.startswith("tpcompiler") else ():
            if comment := re.match(r"    # (.*)", line):
                above.append(comment[1])
                continue
            if field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                found[field[1]] = " ".join(above) or field[2] or ""
            above = []
    return found


def type_text(schema: Schema) -> str:
    """Say a type in the page's words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_text, schema["anyOf"])))
    if "enum" in schema:
        return "text"
    if schema.get("type") == "array":
        return f"list of {_plural(schema.get('items', {}), schema.get('prefixItems', []))}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"map of {type_text(inner) if isinstance(inner, dict) and inner else 'any'}"
    return NAMES.get(str(schema.get("type")), "any")


def _plural(items: Any, several: list[Schema]) -> str:
    return " or ".join(dict.fromkeys(map(type_text, several))) if several else type_text(items or {})


def page() -> str:
    commands, objects = read_schema()
    answers = {name for names in commands.values() for name in names}
    lines = [INTRODUCTION]
    for command, names in commands.items():
        lines.append(f"## {command}\n")
        for name in names:
            lines += [f"{objects[name]['description']}\n", *_fields(objects[name])]
    lines.append("## Objects\n")
    for name in sorted(objects.keys() - answers | {"VerifyReport", "ArtifactSummary"}):
        lines += [f"### {name}\n", f"{objects[name]['description']}\n", *_fields(objects[name])]
    return "\n".join(lines).rstrip() + "\n"


def _fields(described: Schema) -> Iterator[str]:
    yield "| field | type | meaning |\n|---|---|---|"
    required = described.get("required", ())
    for name, schema in described["properties"].items():
        kind = type_text(schema) if name in required else type_text(schema).removesuffix(" or null")
        yield f"| `{name}{'' if name in required else '?'}` | {kind} | {schema['description']} |"
    yield ""


def schema_text() -> str:
    commands, objects = read_schema()
    answers = {
        command: {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]} for command, names in commands.items()
    }
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": answers, "$defs": objects}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
