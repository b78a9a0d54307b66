"""Read machine files: YAML descriptions, given by the user or shipped with the package."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from tpcompiler.cost.machine import Host, Link, Links, Machine
from tpcompiler.errors import MachineError
from tpcompiler.runtime.records import Asked, CollectiveKind, Collectives, Record, read_record
from tpcompiler.yaml_file import YamlError, compose, plain, read_small_text

SHIPPED = Path(__file__).parent / "machines"
DEFAULT, VARIABLE = "h100", "TPCOMPILER_MACHINE"
SHOWN = 60  # characters of a value in an error
LARGEST = 1e100
REQUIRED = ("flops", "memory_bandwidth", "memory", "links")  # unless a base has them

# The limits refuse other units: TFLOP/s, GB/s, GB and microseconds.
Flops = Annotated[float, Meta(ge=1e6, lt=LARGEST)]
Bandwidth = Annotated[float, Meta(ge=1e5, lt=LARGEST)]
Bytes = Annotated[float, Meta(ge=1e3, lt=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(gt=0, lt=LARGEST)]
UNITS = {  # of a field; all others are seconds
    "flops": "FLOP/s, such as 9.9e+14",
    "memory_bandwidth": "bytes/s, such as 3.3e+12",
    "cache_bandwidth": "bytes/s, such as 3.3e+12",
    "bandwidth": "bytes/s, such as 4.5e+11",
    "memory": "bytes, such as 8.0e+10",
}
NarrowDtype = Literal["int8", "int8_weights", "float8", "float8_weights"]
RateOfDtype = Literal["flops", "memory_bandwidth", "product"]
Fuses = Literal["true", "false"]  # texts, because the reader of YAML makes only numbers of scalars
CHOICES = {  # by the end of a place in a file
    "dtypes": NarrowDtype,
    "dtypes[...]": RateOfDtype,
    "fuses": Fuses,
    "collectives": Collectives,
    "collective": CollectiveKind,
}


class LinkEntry(Record, frozen=True, kw_only=True):
    """A link between ranks, as a machine file has it."""

    latency: Seconds  # seconds
    bandwidth: Bandwidth  # bytes/s that each rank sends
    hop: Seconds = 0.0  # seconds of each step of a ring
    collective: CollectiveKind | None = None  # all others by default
    ranks: Annotated[int, Meta(ge=2)] | None = None  # all other numbers by default


class ShareOfRows(Record, frozen=True, kw_only=True):
    """The share of FLOP/s that matrix products of so many rows reach."""

    rows: Rate  # of the left operand
    share: Rate  # of `flops`


class NodesEntry(Record, frozen=True, kw_only=True):
    """The number of ranks on a node, and the links between nodes."""

    ranks_per_node: Annotated[int, Meta(ge=1)]
    links: list[LinkEntry]


class MachineEntry(Record, frozen=True, kw_only=True):
    """A machine file: the fields of `Machine` that it gives."""

    base: str | None = None
    flops: Flops | None = None
    memory_bandwidth: Bandwidth | None = None
    memory: Bytes | None = None
    links: list[LinkEntry] | None = None
    product: Seconds | None = None
    attention: Seconds | None = None
    other: Seconds | None = None
    view: Seconds | None = None
    fuses: Fuses | None = None
    cache_bandwidth: Bandwidth | None = None
    rows: list[ShareOfRows] | None = None
    dtypes: dict[NarrowDtype, Annotated[dict[RateOfDtype, Rate], Meta(min_length=1)]] | None = None
    host: dict[Literal["operation", "collective"], Seconds] | None = None
    symm_mem: list[LinkEntry] | None = None
    collectives: Collectives | None = None
    nodes: NodesEntry | None = None


TABLES = {  # within a machine file
    "links": (LinkEntry, "a link"),
    "symm_mem": (LinkEntry, "a link"),
    "rows": (ShareOfRows, "an entry of rows"),
    "nodes": (NodesEntry, "nodes"),
}


def shipped_machines() -> list[str]:
    """Return the names of the machines in the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def read_machine(given: str | os.PathLike[str] | None = None) -> Machine:
    """Return the machine of a YAML file, or of one that comes with the package, by name.

    By default the machine that the environment variable TPCOMPILER_MACHINE names, or else an H100. `base: NAME` in a
    file fills in omitted entries from a machine of the package, and links of kinds and numbers of ranks that the file's
    links do not cover.

    Raises:
        MachineError: there is no such file, it is no YAML or too large, or a number in it is missing or impossible.
    """
    given = given or os.environ.get(VARIABLE) or DEFAULT
    path = SHIPPED / f"{given}.yaml"
    path = path if path.is_file() else Path(given)
    data = _read_data(path, given)
    try:
        entry = read_record(MachineEntry, data)
    except ValueError as error:
        raise MachineError(f"machine {path}{error}{_value_at(data, str(error))}", help=_remedy(str(error))) from None
    others = [name for name in shipped_machines() if name != path.stem]
    if entry.base is not None and entry.base not in others:
        raise MachineError(f"machine {path}: base is {_short(entry.base)}", help=f"use one of {', '.join(others)}")
    if lacks := [name for name in REQUIRED if entry.base is None and getattr(entry, name) is None]:
        raise MachineError(f"machine {path} has no {lacks[0]}", help=f"begin with a copy of {SHIPPED / 'h100.yaml'}")
    fields = dict(vars(read_machine(entry.base))) if entry.base else {}
    links = _replace(fields.get("links", {}), _group(entry.links or ()))
    changed = {
        **{name: getattr(entry, name) for name in entry.__struct_fields__ if name in Machine.__dataclass_fields__},
        "fuses": entry.fuses and entry.fuses == "true",
        "rows": entry.rows and dict(sorted((each.rows, each.share) for each in entry.rows)),
        "host": entry.host and Host(**entry.host),
        "symm_mem": entry.symm_mem and _group(entry.symm_mem),
        "ranks_per_node": entry.nodes and entry.nodes.ranks_per_node,
        "between_nodes": entry.nodes and _group(entry.nodes.links),
        "links": links,
        "name": os.fspath(given),
    }
    machine = Machine(**{**fields, **{name: value for name, value in changed.items() if value is not None}})
    for where, each in (("", machine.links), (", nodes", machine.between_nodes if entry.nodes else machine.links)):
        if ("", 0) not in each:
            raise MachineError(
                f"machine {path}{where}: no link is for all kinds and numbers of ranks",
                help="add one without collective and ranks",
            )
    return machine


def machine_of(asked: Asked, given: str | os.PathLike[str] | None = None) -> Machine:
    """Return the machine for an artifact's prices: the given one, or the one that it was converted for.

    The latter only if it comes with the package, because an artifact stores only a file's name.

    Args:
        asked: as `Manifest.asked`.

    Raises:
        MachineError: as `read_machine`.
    """
    machine = read_machine(given or (asked.machine if asked.machine in shipped_machines() else None))
    return machine.using(asked.collectives)


def _read_data(path: Path, given: str | os.PathLike[str]) -> Any:
    reason, line, help = "", "", f"give {', '.join(shipped_machines())}, or the path of a YAML file"
    try:
        root = compose(read_small_text(os.fspath(path)))
        return None if root is None else plain(root, numbers=True)
    except YamlError as error:
        reason = str(error).removeprefix("is ")
        if error.line is not None:
            line, help = f" line {error.line}", error.help
    except (OSError, ValueError) as error:  # a null character in the name raises ValueError
        reason = getattr(error, "strerror", None) or str(error)
    raise MachineError(f"machine {str(given)!r}{line} cannot be read: {reason}", help=help)


def _group(links: Sequence[LinkEntry]) -> Links:
    """Return links by kind and ranks, in the file's order."""
    groups: dict[tuple[str, int], list[Link]] = {}
    for each in links:
        groups.setdefault((each.collective or "", each.ranks or 0), []).append(
            Link(each.latency, each.bandwidth, each.hop)
        )
    return groups


def _replace(base: Links, own: Links) -> Links:
    """Return the file's links, and those of its base that they do not cover: a link for all covers every one."""
    kept = {
        key: own.get(key, links)
        for key, links in base.items()
        if key in own or not any(kind in ("", key[0]) and ranks in (0, key[1]) for kind, ranks in own)
    }
    return {**kept, **own}


def _value_at(data: Any, error: str) -> str:
    """Return the value that an error ` at $.links[0].latency: ...` is about, in brackets; empty for a table or list."""
    if "enum" in error:  # it has the value
        return ""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", error.partition(":")[0]):
        data = data[name] if name else data[int(index)]
    return "" if isinstance(data, (dict, list)) else f" ({_short(data)})"


def _remedy(error: str) -> str:
    field = error.partition(":")[0].rpartition(".")[2].partition("[")[0]
    if "unknown field" in error:
        kind, name = TABLES.get(field, (MachineEntry, "a machine"))
        return f"{name} has {', '.join(kind.__struct_fields__)}; docs/machines.md has their forms"
    for place, choices in CHOICES.items():
        if f"{place}: invalid" in error:
            return f"use one of {', '.join(get_args(choices))}"
    if "expected float <" in error or "expected float >" in error:
        return f"give {UNITS.get(field, 'seconds, such as 6.0e-06')}"
    if "expected float" in error:
        return "give a number such as 4.5e+11 (YAML wants the sign)"
    return "docs/machines.md has the form"


def _short(value: object) -> str:
    """Return a value as an error shows it: a file may hold a long one."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
