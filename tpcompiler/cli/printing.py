"""Print tables for people and JSON for programs, and write pictures to files."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tpcompiler.artifact.summary import (
    ArtifactSummary,
    HeldTensor,
    ModelSummary,
    ModelTensor,
    ModelValue,
    summary_parts,
)
from tpcompiler.checkpoint.leaves import leaves_of
from tpcompiler.errors import ArtifactError, explaining, one_line
from tpcompiler.ir.names import fold_names, times
from tpcompiler.runtime.artifact import Manifest, lacks_weights
from tpcompiler.runtime.records import BoundaryRecord
from tpcompiler.runtime.run import ReturnedTensor
from tpcompiler.runtime.target import replacing
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.tables import WIDTH_OF_TEXT, Part, Table, text_of

if TYPE_CHECKING:
    from tpcompiler.api.parallel_program import ParallelProgram

FEW = 1 << 30  # bytes of weights that are read in seconds


def print_json(data: Any) -> None:
    """Print a record."""
    print(json.dumps(_finite(msgspec.to_builtins(data)), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """Write infinities as text, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def print_answer(is_json: bool, record: Any, parts: Iterable[Part], title: str = "") -> None:
    """Print a record as JSON, or its lines and tables with a title in front of the first line."""
    if is_json:
        print_json(record)
        return
    print(f"{one_line(title)}: " if title else "", end="")
    print_parts(parts)


def print_parts(parts: Iterable[Part]) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_TEXT
    print(text_of(parts, width), end="")


def model_parts(data: ModelSummary) -> Iterator[Part]:
    """Yield the lines and tables of `inspect` for a model."""
    total = sum(row.bytes for row in data.parameters if row.tied_to is None)
    yield f"{len(data.parameters)} parameters, buffers and constants, {format_bytes(total)}"
    kinds = {row.name: row.type for row in data.modules}
    rows = [(pattern, kinds[names[0]].rpartition(".")[2], times(names)) for pattern, names in fold_names(kinds)]
    yield Table("modules", ("name", "class", ""), rows)
    yield Table("parameters", ("name", "kind", "type", "bytes", ""), _folded_rows(data.parameters))
    yield from _boundary(data)
    yield from ("a starter plan (save it as plan.yaml):", "", *data.plan.splitlines())


def artifact_parts(data: ArtifactSummary) -> Iterator[Part]:
    """Yield the lines and tables of `inspect` for an artifact."""
    yield from summary_parts(data)
    headers = ("name", "kind", "type", "sharding", "bytes", "bytes on rank 0", "")
    yield Table("parameters", headers, _folded_rows(data.tensors))
    yield from _boundary(data)
    if data.output_type:
        yield from (f"the model returned {data.output_type}; the programs return a dict", "")
    yield "written by " + ", ".join(f"{name} {version}" for name, version in data.versions.items())


def outputs_table(outputs: Sequence[ReturnedTensor]) -> Table:
    """Return the table of `run`."""
    rows = [(each.name, str(each.shape), each.dtype, _number(each.mean), _number(each.largest)) for each in outputs]
    return Table("outputs", ("name", "shape", "dtype", "mean", "largest magnitude"), rows)


def _number(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def picture(
    artifact: ParallelProgram, format: str, file: Path | None, rank: int, tensor: str | None, machine: str | None
) -> tuple[str | bytes, Path | None, str]:
    """Draw a tensor or a rank's program; return the drawing, its file, and a note if it has another format.

    Without Graphviz's `dot`, svg and png of a program become dot.
    """
    if tensor is not None or format in ("text", "html", "dot"):
        kind: Any = format if tensor is None or format == "svg" else "text"
        return artifact.show(tensor, rank=rank, format=kind, machine=machine), file, ""
    import graphviz

    graph = graphviz.Source(artifact.show(rank=rank, format="dot"))
    try:
        drawn = graph.pipe(format=format, quiet=True)
        return drawn if format == "png" else drawn.decode(), file, ""
    except graphviz.ExecutableNotFound:
        target, source = ((file or Path("out")).with_suffix(suffix) for suffix in (f".{format}", ".dot"))
        note = (
            f"Graphviz's program dot is not installed, so this is its source text, not {format.upper()}\n"
            f"  help: install graphviz, then: dot -T{format} {source} -o {target}"
        )
        return str(graph.source), file and source, note
    except (graphviz.CalledProcessError, OSError) as error:  # OSError: dot ended early
        message = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise ArtifactError(
            f"Graphviz cannot draw {artifact.only.title}: {message.splitlines()[0]}",
            help="use --format dot for its source text, or --format text",
        ) from error


def write_content(file: Path, content: str | bytes) -> None:
    """Write a file. Raise ArtifactError if that fails."""
    with writing(file) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing(file: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `file` at the end. Raise ArtifactError if it cannot be written."""
    with explaining(f"cannot write {file}", "choose another file"), replacing(file) as temporary:
        yield temporary


def cost_of_verifying(manifest: Manifest) -> str:
    """Return the bytes of weights that `verify` reads and holds, as text; empty for small models."""
    leaves = leaves_of(manifest)
    counts = [math.prod(leaf.shape) for leaf in leaves]
    total = sum(count * leaf.dtype.itemsize for count, leaf in zip(counts, leaves, strict=True))
    # The model, the model in float64, and all ranks; half precision repeats all three in float32.
    passes = 6 if any(leaf.dtype.is_floating_point and leaf.dtype.itemsize < 4 for leaf in leaves) else 3
    if total < FEW:
        return ""
    held = 8 * max(counts, default=0) + (total if lacks_weights(manifest) else 0)
    return f"reading {format_bytes(total)} of weights {passes} times, {format_bytes(held)} of them in memory at a time"


def _boundary(data: ModelSummary | ArtifactSummary) -> Iterator[Part]:
    for what, values in (("inputs", data.inputs), ("outputs", data.outputs)):
        rows = [(row.name, _type(row), "" if isinstance(row, ModelValue) else row.sharding) for row in values]
        yield Table(what, ("name", "type", "sharding" if any(row[2] for row in rows) else ""), rows)


def _folded_rows(rows: Sequence[ModelTensor | HeldTensor]) -> list[tuple[str, ...]]:
    """Parameters, equal ones of repeated layers in one line."""
    by_name = {row.name: row for row in rows}
    cells = {
        name: (row.kind, _type(row), *((row.sharding,) if isinstance(row, HeldTensor) else ()))
        for name, row in by_name.items()
    }
    out = []
    for pattern, names in fold_names({name: (*cells[name], row.tied_to is not None) for name, row in by_name.items()}):
        row = by_name[names[0]]
        local = (format_bytes(row.bytes_per_rank[0]),) if isinstance(row, HeldTensor) else ()
        note = f"tied to {row.tied_to}" if row.tied_to else times(names)
        out.append((pattern, *cells[row.name], format_bytes(row.bytes), *local, note))
    return out


def _type(row: ModelValue | BoundaryRecord | ModelTensor | HeldTensor) -> str:
    if isinstance(row, ModelValue) and row.shape is None:
        return f"{row.number} (a number)" if row.constant is None else f"{row.constant} (a constant)"
    return f"{row.dtype}[{', '.join(map(str, row.shape or ()))}]"
