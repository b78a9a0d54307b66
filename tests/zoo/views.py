"""`python -m tests.zoo.views [NAME ...]`: every model's artifact in every format that is drawn or printed, read back."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tpcompiler
from tests.runtime.commands import call
from tests.zoo.each import judge_each
from tests.zoo.index import CASES
from tpcompiler.runtime.artifact import Manifest, read_manifest
from tpcompiler.terminal.printed import format_bytes

WORLD = 2
SVG = "{http://www.w3.org/2000/svg}"
PNG = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>.*</html>\s*$', re.DOTALL)


def views_of(directory: Path) -> dict[str, bytes]:
    """An artifact in every format, and compared with itself, as the command line writes them beside it.

    Raises:
        ValueError: it does not, or says something besides.
    """
    show, found = ("inspect", directory, "-o"), dict[str, bytes]()
    tensor = ("inspect", directory, "--tensor", read_manifest(directory).tensors[0].name, "-o")
    formats = {**dict.fromkeys(("txt", "dot", "svg", "png", "html"), show), "tensor.txt": tensor, "tensor.svg": tensor}
    for name, words in {**formats, "diff.html": ("diff", directory, directory, "--html")}.items():
        file = directory.with_name(f"{directory.name}.{name}")
        result = call(*words, file)
        if (result.exit_code, result.stderr) != (0, f"wrote {file}\n"):
            raise ValueError(f"{name}: exit code {result.exit_code}: {result.stderr.strip() or result.exception!r}")
        found[name] = file.read_bytes()
    return found


def faults_of(found: Mapping[str, bytes], manifest: Manifest) -> Iterator[str]:
    """What cannot be read of these views, or is not what the manifest says, or another view."""
    records = manifest.collectives
    try:
        texts = {name: content.decode() for name, content in found.items() if name != "png"}
        svgs = {name: ElementTree.fromstring(texts[name]) for name in ("svg", "tensor.svg")}
        pages = {name: _data(texts[name]) for name in ("html", "diff.html")}
    except (ValueError, TypeError, ElementTree.ParseError) as error:
        yield f"{type(error).__name__}: {error}"
        return
    wire = sum(record.wire_bytes for record in records)
    sent = [item for item in pages["html"]["items"] if item["kind"] == "collective"]
    carried = re.findall(r" [\d.]+ [kMG]?B over ", texts["txt"])
    if f"; {format_bytes(wire)} on the wire\n" not in texts["txt"] or len(carried) != len(sent):
        yield "txt: other collectives or bytes than the manifest's"
    if texts["dot"].count("shape=hexagon") != len(sent) or texts["dot"][-2:] != "}\n":
        yield "dot: other collectives than the page's, or no end"
    ranks = [
        rank for line in re.findall(r"^ranks? (.*): ", texts["tensor.txt"], re.MULTILINE) for rank in line.split(", ")
    ]
    if sorted(map(int, ranks)) != list(range(manifest.world_size)):
        yield "tensor.txt: not of every rank"
    if not (found["png"].startswith(PNG) and found["png"].endswith(PNG_END)):
        yield "png: not whole"
    for name, data in pages.items():
        if [row["node"] for row in data["records"]] != [record.node for record in records] or data["wire"] != wire:
            yield f"{name}: other collectives than the manifest's"
        if sorted(_drawn(data["members"])) != list(range(len(data["items"]))):
            yield f"{name}: an item that is not drawn once"
    names = {item["name"] for item in pages["html"]["items"]}
    drawn = {node.findtext(f"{SVG}title") for node in svgs["svg"].iter(f"{SVG}g") if node.get("class") == "node"}
    if names != drawn:
        yield f"svg: other nodes than the page's: {sorted(names ^ drawn)[:4]}"
    if any(root.tag != f"{SVG}svg" for root in svgs.values()):
        yield "svg: no picture"
    other = pages["diff.html"]
    if other["gone"] or any(item["differs"] for item in other["items"]) or not other["difference"]["equal"]:
        yield "diff.html: it differs from itself"


def _data(page: str) -> Any:
    (data,) = DATA.findall(page)
    return json.loads(data)


def _drawn(members: Sequence[Any]) -> Iterator[int]:
    for member in members:
        yield from [member] if isinstance(member, int) else _drawn(member["members"])


def _judge(name: str) -> tuple[str, bool]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        tpcompiler.parallelize(case.export(bool(case.dims)), WORLD, case.asked()).save(out)
        wrong = list(faults_of(views_of(out), read_manifest(out)))
    return "; ".join(wrong) or "right", not wrong


def main(names: Sequence[str]) -> int:
    """1 where a view is missing, cannot be read, or is not of the artifact."""
    return judge_each(_judge, names, " in every format", "with faults")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
