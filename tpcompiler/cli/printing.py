"""How the command line shows data: tables for people, one JSON object for programs."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from tpcompiler.checkpoint.leaves import leaves_of
from tpcompiler.errors import ArtifactError
from tpcompiler.explain.report import NOTE_TITLES
from tpcompiler.plan.fold import folded
from tpcompiler.printed import one_line
from tpcompiler.runtime.artifact import Manifest, lacks_weights
from tpcompiler.runtime.target import replacing

if TYPE_CHECKING:
    from tpcompiler.explain.costs import CostTable
    from tpcompiler.explain.difference import ArtifactDifference
    from tpcompiler.explain.explanation import Explanation
    from tpcompiler.explain.measured import Counted

FEW = 1 << 30  # bytes of weights
MOST_RANKS = 16  # that a table lists one by one
NUMBERS = ("count", "us", "share", "mean", "largest magnitude")  # columns of them
UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
WIDTH_OF_A_FILE = 160  # rich takes a pipe for 80 columns, and folds names that programs look for


def console() -> Console:
    """Standard output. No markup: the brackets of a shape are not a style. No styles, which are control characters."""
    width = None if sys.stdout.isatty() else WIDTH_OF_A_FILE
    return Console(
        file=sys.stdout, markup=False, highlight=False, emoji=False, width=width, color_system=None, no_color=True
    )


def print_json(data: Mapping[str, Any]) -> None:
    print(json.dumps(_finite(data), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no infinities: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def print_model(data: Mapping[str, Any], path: str) -> None:
    out = console()
    total = sum(row["bytes"] for row in data["parameters"] if "tied_to" not in row)
    out.print(f"{one_line(path)}: {len(data['parameters'])} parameters, buffers and constants, {total:,} bytes")
    kinds = {row["name"]: row["type"] for row in data["modules"]}
    rows = [(pattern, kinds[names[0]].rpartition(".")[2], _times(names)) for pattern, names in folded(kinds)]
    _table(out, "modules", ("name", "class", ""), rows)
    _table(out, "parameters", ("name", "kind", "type", "bytes", ""), _folded_rows(data["parameters"], ()))
    _boundary(out, data)
    out.print("a plan to begin with (save it as plan.yaml):\n")
    print(data["plan"], end="")  # not through rich, which folds long lines


def print_artifact(data: Mapping[str, Any], path: str) -> None:
    out = console()
    print_summary(data, path)
    _table(
        out,
        "parameters",
        ("name", "kind", "type", "sharding", "bytes", "bytes on rank 0", ""),
        _folded_rows(data["tensors"], ("sharding",)),
    )
    _boundary(out, data)
    if data["output_type"]:
        out.print(f"the model returned {one_line(data['output_type'])}; the programs return a dict\n")
    out.print(one_line("written by " + ", ".join(f"{name} {version}" for name, version in data["versions"].items())))


def print_summary(data: Mapping[str, Any], title: str) -> None:
    """The report of a conversion: bytes per rank, collectives by cause, fallbacks, what nothing touches."""
    out = console()
    axes = ",".join(f"{axis}={degree}" for axis, degree in data["mesh"].items())
    out.print(f"{one_line(title)}: mesh {axes}, {len(data['bytes_per_rank'])} ranks, {data['device_type']}")
    whole = data["bytes"]
    rows = [("one device", f"{whole:,}", "100.0%")]
    for ranks, held in _alike(data["bytes_per_rank"]):
        rows.append((ranks, f"{held:,}", f"{100 * held / max(whole, 1):.1f}%"))
    _table(out, "parameters, buffers and constants", ("on", "bytes", "share"), rows)
    collectives = [
        (row["why"], row["kind"], str(row["count"]), f"{row['payload_bytes']:,}", f"{row['wire_bytes']:,}")
        for row in data["collectives"]
    ]
    headers = ("why", "kind", "count", "payload bytes", "wire bytes per rank")
    _table(out, "collectives of one call", headers, collectives)
    lines = []
    for row in data["fallbacks"]:
        where = row.get("source") or row.get("module") or row.get("node")
        text = f"fallback: {row['kind']} of {row['payload_bytes']:,} bytes at {where}: {row.get('reason', '')}"
        lines.append(one_line(text))
    for kind, title in NOTE_TITLES.items():
        texts = [note["text"] for note in data["notes"] if note["kind"] == kind]
        if texts:
            lines += [f"{title}:", *(f"  {one_line(text)}" for text in texts)]
    if lines:
        print("\n".join(lines), end="\n\n")


def _alike(per_rank: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Each rank, or of a large mesh the neighbours that hold equally much, with what they hold."""
    first = 0
    for held, equal in itertools.groupby(per_rank):
        last = first + len(list(equal)) - 1
        if first == last or len(per_rank) <= MOST_RANKS:
            yield from ((f"rank {rank}", held) for rank in range(first, last + 1))
        else:
            yield f"ranks {first} to {last}", held
        first = last + 1


def print_diagnosis(data: Mapping[str, Any], path: str, machine: str) -> None:
    """What each degree gives, one line each; then what stops degrees, or costs."""
    out = console()
    out.print(f"{one_line(path)} on {one_line(machine)}: a rank may hold {decimal(data['limit'])}")
    rows = [
        (
            str(each["ranks"]),
            *(decimal(each["bytes"][part]) for part in ("weights", "caches", "activations", "total")),
            str(each["collectives"]),
            decimal(each["wire_bytes"]),
            _duration(each["seconds"]["total"]),
            "yes" if each["fits"] else "no",
        )
        for each in data["degrees"]
    ]
    headers = ("ranks", "weights", "caches", "at peak", "in all", "count", "sent", "step", "fits")
    _table(out, "of each rank, in one call", headers, rows, right=headers[:-1])
    lines = [f"{each['ranks']}: {one_line(remark)}" for each in data["degrees"] for remark in each["remarks"]]
    lines += [f"{each['ranks']}: not possible: {one_line(each['reason'])}" for each in data["stopped"]]
    print("".join(f"{line}\n" for line in lines), end="\n" if lines else "")
    print(f"the smallest that fits: --tp {data['least']}")


def _duration(seconds: float) -> str:
    unit, name = next((pair for pair in UNITS_OF_TIME if seconds >= pair[0]), UNITS_OF_TIME[-1])
    return f"{seconds / unit:.3g} {name}"


def print_outputs(rows: Iterable[Sequence[str]]) -> None:
    _table(console(), "outputs", ("name", "shape", "dtype", "mean", "largest magnitude"), rows)


def print_explanation(said: Explanation, machine: str) -> None:
    out = console()
    where = "".join(filter(None, (said.module and f" of {said.module}", said.source and f" at {said.source}")))
    lines = [
        f"{said.name}: {said.what}{where}",
        f"  {said.type}: {', '.join(said.sharding)}",
        f"  why: {said.reason}",
        *([f"  read by: {', '.join(said.users)}"] if said.users else []),
    ]
    print("\n".join(map(one_line, lines)), end="\n\n")
    slices = [(" ".join(map(str, each.ranks)), each.shape, each.indices) for each in said.slices]
    _table(out, "what ranks hold", ("ranks", "shape", "indices"), slices)
    operands = [(each.name, each.sharding, each.needed) for each in said.operands]
    _table(out, "operands", ("name", "sharding", "needed"), operands)
    rows = [
        (
            row["node"],
            row["kind"],
            f"{row['payload_bytes']:,}",
            f"{row['wire_bytes']:,}",
            f"{row['why']}: {row['reason']}",
        )
        for row in said.collectives
    ]
    _table(out, "collectives", ("name", "kind", "bytes", "wire bytes", "why"), rows)
    least = "" if said.seconds is None else f" (least total {said.seconds * 1e6:,.3f} us on {machine})"
    notes = {(True, False): "the artifact's", (False, True): "a tie"}
    choices = [
        (
            ", ".join(each.makes),
            ", ".join(each.needs),
            ("fails" if each.failed else "never") if each.seconds is None else f"{each.seconds * 1e6:+,.3f}",
            *("" if count is None else f"{count:+,}" for count in (each.wire_bytes, each.held_bytes)),
            notes.get((each.is_chosen, each.is_tied), ""),
        )
        for each in said.alternatives
    ]
    headers = ("makes" if any(each.needs for each in said.alternatives) else "sharding", "needs", "us")
    _table(out, one_line(f"alternatives{least}"), (*headers, "wire bytes", "held bytes", ""), choices)
    failed = [f"{', '.join(each.makes)}: fails: {each.failed}" for each in said.alternatives if each.failed]
    print("".join(f"{one_line(line)}\n" for line in failed), end="\n" if failed else "")


def print_difference(found: ArtifactDifference, machine: str) -> None:

    out = console()
    if found.equal:
        out.print("equal: the same mesh, placements, collectives and bytes (weights are not compared)")
        return
    axes = (",".join(f"{axis}={degree}" for axis, degree in mesh.items()) for mesh in found.meshes)
    held = (f"{max(own):,}" for own in found.held_bytes)
    totals = [
        ("mesh", *axes),
        ("device", *found.device_types),
        ("bytes held by the rank that holds most", *held),
        ("wire bytes of a rank and call", *(f"{count:,}" for count in found.wire_bytes)),
        (f"us of the collectives on {machine}", *(f"{seconds * 1e6:,.3f}" for seconds in found.sent_seconds)),
    ]
    _table(out, "in all", ("", "first", "second"), totals)
    placed = {each.name: (each.what, each.first, each.second) for each in found.placements}
    rows = [(pattern, *placed[names[0]], _times(names)) for pattern, names in folded(placed)]
    _table(out, "placements that differ", ("name", "kind", "first", "second", ""), rows)
    sent: dict[str, tuple[tuple[str, ...], ...]] = {}
    for each in found.collectives:
        pairs = (f"{a:,} -> {b:,}" for a, b in zip(each.first, each.second, strict=True))
        sent[each.module] = (*sent.get(each.module, ()), (each.kind, each.why, *pairs))
    traffic = [(pattern, *row, _times(names)) for pattern, names in folded(sent) for row in sent[names[0]]]
    _table(
        out, "collectives that differ, in each module", ("module", "kind", "why", "count", "wire bytes", ""), traffic
    )


def print_costs(table: CostTable, machine: str) -> None:

    out = console()
    sizes = []
    for size in table.sizes:
        ends = f"{size.least} to {'any' if size.most is None else size.most}"
        sizes.append((size.name, size.input, str(size.dim), ends, str(size.step), str(size.value)))
    _table(out, "dynamic sizes", ("name", "input", "dim", "range", "step", "value"), sizes)
    layers: dict[str, tuple[tuple[str, ...], ...]] = {}
    for each in table.costs:
        row = (each.kind, str(each.count), each.formula, f"{each.wire_bytes:,}", f"{each.seconds * 1e6:,.3f}")
        layers[each.layer] = (*layers.get(each.layer, ()), row)
    rows = [(pattern, *row, _times(names)) for pattern, names in folded(layers) for row in layers[names[0]]]
    count = sum(each.count for each in table.costs)
    rows.append(("in all", "", str(count), table.formula, f"{table.wire_bytes:,}", f"{table.seconds * 1e6:,.3f}", ""))
    headers = ("layer", "kind", "count", "formula", "wire bytes", "us", "")
    _table(out, one_line(f"collectives of one call of a rank, us on {machine}"), headers, rows)


def print_counts(rows: Sequence[Counted]) -> None:

    layers: dict[str, tuple[tuple[str, ...], ...]] = {}
    for each in rows:
        pair = (f"{each.count} / {each.called}", f"{each.wire_bytes:,} / {each.called_bytes:,}")
        layers[each.layer] = (*layers.get(each.layer, ()), (each.kind, *pair, "" if each.agrees else "NOT EQUAL"))
    shown = [(pattern, *row, _times(names)) for pattern, names in folded(layers) for row in layers[names[0]]]
    headers = ("layer", "kind", "count", "wire bytes", "", "")
    _table(console(), "collectives of rank 0, as its files say / as it called them", headers, shown)


class Picture(NamedTuple):
    """A view, the file it belongs in, and what to say when it is not of the kind that was asked for."""

    content: str | bytes
    file: Path | None
    note: str = ""


def picture(
    directory: Path, format: str, file: Path | None, rank: int, tensor: str | None, *, trust: bool = False
) -> Picture:
    """A tensor, or a rank's program, as text, html, dot, svg or png. Without Graphviz's `dot` the program's svg and png
    become dot, with a note."""
    if tensor is not None:
        from tpcompiler.views.tensor import visualize_sharding

        return Picture(visualize_sharding(directory, tensor, format="svg" if format == "svg" else "text"), file)
    if format == "text":
        from tpcompiler.views.table import artifact_text

        return Picture(artifact_text(directory, rank, trust=trust), file)
    if format == "html":
        from tpcompiler.views.html import artifact_html

        return Picture(artifact_html(directory, rank, trust=trust), file)
    import graphviz

    from tpcompiler.views.dot import artifact_dot

    graph = artifact_dot(directory, rank, trust=trust)
    if format == "dot":
        return Picture(str(graph.source), file)
    try:
        drawn = graph.pipe(format=format, quiet=True)
        return Picture(drawn if format == "png" else drawn.decode(), file)
    except graphviz.ExecutableNotFound:
        target, source = ((file or Path("out")).with_suffix(suffix) for suffix in (f".{format}", ".dot"))
        note = (
            f"Graphviz's program dot is not installed, so this is its source text and no {format.upper()}\n"
            f"  help: install graphviz, then: dot -T{format} {source} -o {target}"
        )
        return Picture(str(graph.source), file and source, note)
    except (graphviz.CalledProcessError, OSError) as error:  # OSError: it ended before it had read all
        said = getattr(error, "stderr", b"").decode(errors="replace").strip()
        line = (said or str(error)).splitlines()[0]
        raise ArtifactError(
            f"Graphviz cannot draw {directory}: {line}", help="take its source text with --format dot, or --format text"
        ) from error


def write_content(file: Path, content: str | bytes) -> None:
    """Raises ArtifactError where the file cannot be written."""
    with writing(file) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing(file: Path) -> Iterator[Path]:
    """What becomes the file when all is written. Raises ArtifactError where it cannot be."""
    try:
        with replacing(file) as temporary:
            yield temporary
    except OSError as error:
        raise ArtifactError(f"cannot write {file}: {error.strerror}", help="choose another file") from error


def cost_of_verifying(manifest: Manifest) -> str:
    """How much of weights `verify` reads, and holds at a time: one in float64. Nothing where they are few."""
    leaves = leaves_of(manifest)
    counts = [math.prod(leaf.shape) for leaf in leaves]
    total = sum(count * leaf.dtype.itemsize for count, leaf in zip(counts, leaves, strict=True))
    # One device, the same in float64, all ranks; and all of it once more in float32 where there is less.
    passes = 6 if any(leaf.dtype.is_floating_point and leaf.dtype.itemsize < 4 for leaf in leaves) else 3
    if total < FEW:
        return ""
    held = 8 * max(counts, default=0) + (total if lacks_weights(manifest) else 0)
    return f"reading {decimal(total)} of weights {passes} times, {decimal(held)} of them in memory at a time"


def _boundary(out: Console, data: Mapping[str, Any]) -> None:
    for what in ("inputs", "outputs"):
        rows = [(row["name"], _type(row), row.get("sharding", "")) for row in data[what]]
        _table(out, what, ("name", "type", "sharding" if any(row[2] for row in rows) else ""), rows)


def _folded_rows(rows: Sequence[Mapping[str, Any]], more: Sequence[str]) -> list[tuple[str, ...]]:
    """Parameters, equal ones of repeated layers in one line."""
    by_name = {row["name"]: row for row in rows}
    signatures = {
        name: (row["kind"], _type(row), *(row[m] for m in more), bool(row.get("tied_to")))
        for name, row in by_name.items()
    }
    out = []
    for pattern, names in folded(signatures):
        row = by_name[names[0]]
        local = (f"{row['bytes_per_rank'][0]:,}",) if "bytes_per_rank" in row else ()
        note = f"tied to {row['tied_to']}" if row.get("tied_to") else _times(names)
        out.append((pattern, row["kind"], _type(row), *(row[m] for m in more), f"{row['bytes']:,}", *local, note))
    return out


def _type(row: Mapping[str, Any]) -> str:
    if "constant" in row:
        return f"{row['constant']} (a constant)"
    if "number" in row:
        return f"{row['number']} (a number)"
    return f"{row['dtype']}[{', '.join(str(size) for size in row['shape'])}]"


def _times(names: Sequence[str]) -> str:
    return f"x {len(names)}" if len(names) > 1 else ""


def _table(
    out: Console, title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = NUMBERS
) -> None:
    rows = list(rows)
    out.print(title if rows else f"{title}: none")
    used = [i for i, header in enumerate(headers) if header or any(row[i] for row in rows)]
    table = Table(box=None, pad_edge=False)
    for i in used:
        numbers = "bytes" in headers[i] or headers[i] in right
        table.add_column(headers[i], justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(one_line(row[i]) for i in used))
    if rows:
        with out.capture() as drawn:
            out.print(table)
        print("\n".join(line.rstrip() for line in drawn.get().splitlines()))  # without the last column's padding
    print()
