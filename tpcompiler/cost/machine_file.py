"""Read machine files: YAML descriptions, given by the user or shipped with the package."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from tpcompiler.cost.collective import KINDS, Collectives
from tpcompiler.cost.machine import DTYPES, Host, Link, Machine
from tpcompiler.errors import MachineError
from tpcompiler.runtime.records import Asked
from tpcompiler.yaml_file import YamlError, compose, plain, read_small_text

SHIPPED = Path(__file__).parent / "machines"
DEFAULT, VARIABLE = "h100", "TPCOMPILER_MACHINE"
SHOWN = 60  # characters of a value in an error
RATES = ("flops", "memory_bandwidth", "memory")  # required of each device
FLOORS = ("product", "attention", "other", "view")
OTHERS = ("cache_bandwidth", "fuses", "rows", "dtypes", "host", "nodes", "links", "symm_mem", "collectives", "base")
FIELDS = (*RATES, *FLOORS, *OTHERS)
OF_DTYPE = ("flops", "memory_bandwidth", "product")


def shipped_machines() -> list[str]:
    """Return the names of the machines in the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def read_machine(given: str | os.PathLike[str] | None = None) -> Machine:
    """Return the machine of a YAML file, or of one that comes with the package, by name.

    By default the machine that the environment variable TPCOMPILER_MACHINE names, or else an H100. `base: NAME` in a
    file fills in omitted entries from a machine of the package.

    Raises:
        MachineError: there is no such file, it is no YAML or too large, or a number in it is missing or impossible.
    """
    given = given or os.environ.get(VARIABLE) or DEFAULT
    path = SHIPPED / f"{given}.yaml"
    path = path if path.is_file() else Path(given)
    data = _read_data(path, given)
    if not isinstance(data, dict):
        raise MachineError(f"machine {path} is no mapping", help=f"begin with a copy of {SHIPPED / 'h100.yaml'}")
    if unknown := [name for name in data if name not in FIELDS]:
        raise MachineError(f"machine {path}: unknown {_short(unknown[0])}", help=f"use {', '.join(FIELDS)}")
    base = _read_base(data, path)
    if base is None and not isinstance(data.get("links"), list):
        raise MachineError(f"machine {path} has no list of links", help=f"begin with a copy of {SHIPPED / 'h100.yaml'}")
    where = str(path)
    numbers = {name: _number(data, name, where) for name in RATES if base is None or name in data}
    numbers |= {name: _number(data, name, where, least=0.0) for name in FLOORS if name in data}
    links = {**(base.links if base else {}), **_read_links(data.get("links", []), where)}
    if ("", 0) not in links:
        raise MachineError(
            f"machine {path}: no link is for all kinds and numbers of ranks",
            help="add one without collective and ranks",
        )
    more: dict[str, Any] = {"links": links, "name": os.fspath(given)}
    if "symm_mem" in data:
        more["symm_mem"] = _read_links(data["symm_mem"], f"{where}, symm_mem")
    if "collectives" in data:
        if data["collectives"] not in get_args(Collectives):
            raise MachineError(
                f"machine {where}: collectives are {_short(data['collectives'])}",
                help=f"use one of {', '.join(get_args(Collectives))}",
            )
        more["collectives"] = data["collectives"]
    if "cache_bandwidth" in data:
        more["cache_bandwidth"] = _number(data, "cache_bandwidth", where)
    if "fuses" in data:
        if data["fuses"] not in ("true", "false"):
            raise MachineError(f"machine {where}: fuses is {_short(data['fuses'])}", help="give true or false")
        more["fuses"] = data["fuses"] == "true"
    if "rows" in data:
        more["rows"] = _read_rows(data["rows"], where)
    if "dtypes" in data:
        more["dtypes"] = _read_dtypes(data["dtypes"], where)
    if "host" in data:
        more["host"] = _read_host(data["host"], where)
    if "nodes" in data:
        more["ranks_per_node"], more["between_nodes"] = _read_nodes(data["nodes"], where)
    defaults = {} if base is None else vars(base)
    return Machine(**{**defaults, **numbers, **more})


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


def _read_base(data: Mapping[str, Any], path: Path) -> Machine | None:
    if "base" not in data:
        return None
    others = [name for name in shipped_machines() if name != path.stem]
    if data["base"] not in others:
        raise MachineError(f"machine {path}: base is {_short(data['base'])}", help=f"use one of {', '.join(others)}")
    return read_machine(data["base"])


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


def _read_links(data: Any, where: str) -> dict[tuple[str, int], list[Link]]:
    """Return links by kind and ranks, in the file's order."""
    if not isinstance(data, list):
        raise MachineError(f"machine {where}: links are {_short(data)}", help="give a list of links")
    links = dict[tuple[str, int], list[Link]]()
    for at, each in enumerate(data):
        key, link = _read_link(each, f"{where}, links[{at}]")
        links.setdefault(key, []).append(link)
    return links


def _read_link(data: Any, where: str) -> tuple[tuple[str, int], Link]:
    if not isinstance(data, dict) or set(data) - {"collective", "ranks", "latency", "hop", "bandwidth"}:
        raise MachineError(
            f"machine {where} is {_short(data)}",
            help="give latency and bandwidth, and where they differ collective and ranks",
        )
    kind, ranks = data.get("collective", ""), data.get("ranks", 0)
    if (
        not isinstance(kind, str)
        or kind not in ("", *KINDS)
        or type(ranks) is not int
        or (ranks < 2 and "ranks" in data)
    ):
        raise MachineError(
            f"machine {where} is for {_short(kind)} of {_short(ranks)} ranks",
            help=f"use one of {', '.join(KINDS)}, and a number of ranks from 2",
        )
    hop = _number(data, "hop", where, least=0.0) if "hop" in data else 0.0
    return (kind, ranks), Link(_number(data, "latency", where, least=0.0), _number(data, "bandwidth", where), hop)


def _read_rows(data: Any, where: str) -> dict[float, float]:
    if not isinstance(data, list) or not all(
        isinstance(each, dict) and set(each) == {"rows", "share"} for each in data
    ):
        raise MachineError(
            f"machine {where}: rows are {_short(data)}",
            help="give the shares of flops, such as [{rows: 128, share: 0.36}, {rows: 1024, share: 1.0}]",
        )
    pairs = [(_number(each, "rows", where), _number(each, "share", where)) for each in data]
    return dict(sorted(pairs))


def _read_dtypes(data: Any, where: str) -> dict[str, dict[str, float]]:
    rows = data.values() if isinstance(data, dict) and not set(data) - {*DTYPES} else [None]
    if not all(isinstance(own, dict) and own and not set(own) - {*OF_DTYPE} for own in rows):
        raise MachineError(
            f"machine {where}: dtypes are {_short(data)}",
            help=f"give some of {', '.join(OF_DTYPE)} for some of {', '.join(DTYPES)}",
        )
    return {dtype: {name: _number(own, name, f"{where}, {dtype}") for name in own} for dtype, own in data.items()}


def _read_host(data: Any, where: str) -> Host:
    if not isinstance(data, dict) or set(data) - {*Host._fields}:
        raise MachineError(f"machine {where}: host is {_short(data)}", help="give seconds of operation and collective")
    return Host(**{name: _number(data, name, f"{where}, host", least=0.0) for name in data})


def _read_nodes(data: Any, where: str) -> tuple[int, dict[tuple[str, int], list[Link]]]:
    where = f"{where}, nodes"
    ranks = data.get("ranks_per_node") if isinstance(data, dict) else None
    if not isinstance(data, dict) or set(data) != {"ranks_per_node", "links"} or type(ranks) is not int or ranks < 1:
        raise MachineError(f"machine {where} are {_short(data)}", help="give ranks_per_node from 1, and links")
    links = _read_links(data["links"], where)
    if ("", 0) not in links:
        raise MachineError(
            f"machine {where}: no link is for all kinds and numbers of ranks",
            help="add one without collective and ranks",
        )
    return ranks, links


def _short(value: object) -> str:
    """Return a value as an error shows it: a file may hold a long one."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _number(data: Mapping[str, Any], name: str, where: str, least: float | None = None) -> float:
    value: Any = data.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and least is None):
        raise MachineError(
            f"machine {where}: {name} is {_short(value)}",
            help=f"give a number {'from 0' if least is not None else 'above 0'}, such as 4.5e+11 (YAML wants the sign)",
        )
    return float(value)
