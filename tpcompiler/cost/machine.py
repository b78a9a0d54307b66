"""What a machine can do, read from a data file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tpcompiler.cost.collective import KINDS
from tpcompiler.errors import MachineError
from tpcompiler.yaml_file import YamlError, compose, plain, read_small_text

KNOWN = Path(__file__).parent / "machines"
DEFAULT = "h100"
SHOWN = 60  # characters of a value in an error
RATES = ("flops", "memory_bandwidth", "memory")


class Link(NamedTuple):
    """Seconds until the first byte of a collective, and the bytes/s that each rank sends from then on."""

    latency: float
    bandwidth: float

    def seconds(self, wire_bytes: float) -> float:
        return self.latency + wire_bytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """One device, and the links to others.

    Attributes:
        flops: FLOP/s of matrix products.
        memory_bandwidth: bytes/s.
        memory: bytes that a device holds.
        links: by kind of collective and number of ranks; "" for all other kinds, 0 for all other numbers.
        name: as it was asked for: "h100", or the path of a file.
    """

    flops: float
    memory_bandwidth: float
    memory: float
    links: Mapping[tuple[str, int], Link] = field(default_factory=dict)
    name: str = ""

    @property
    def plain_link(self) -> Link:
        """What is so unless a link says otherwise."""
        return self.links["", 0]

    def link(self, kind: str, ranks: int) -> Link:
        keys = ((kind, ranks), (kind, 0), ("", ranks), ("", 0))
        return next(self.links[key] for key in keys if key in self.links)

    @classmethod
    def read(cls, given: str | os.PathLike[str] = DEFAULT) -> Machine:
        """The machine of a YAML file, or of one of those that come with the package, by name.

        Raises:
            MachineError: there is no such file, it is no YAML or more than is read, or a number in it is missing or
                impossible.
        """
        path = KNOWN / f"{given}.yaml"
        path = path if path.is_file() else Path(given)
        data = _read_data(path, given)
        if not isinstance(data, dict) or not isinstance(data.get("links"), list):
            raise MachineError(
                f"machine {path} is no mapping with a list of links",
                help=f"begin with a copy of {KNOWN / DEFAULT}.yaml",
            )
        unknown = [name for name in data if name not in (*RATES, "links")]
        if unknown:
            raise MachineError(
                f"machine {path}: unknown {_short(unknown[0])}", help=f"use {', '.join(RATES)} and links"
            )
        rates = {name: _number(data, name, str(path)) for name in RATES}
        links = {key: link for at, each in enumerate(data["links"]) for key, link in [_read_link(each, at, str(path))]}
        if ("", 0) not in links:
            raise MachineError(
                f"machine {path}: no link is for all kinds and numbers of ranks",
                help="add one without collective and ranks",
            )
        return cls(**rates, links=links, name=os.fspath(given))


def _read_data(path: Path, given: str | os.PathLike[str]) -> Any:
    known = ", ".join(sorted(file.stem for file in KNOWN.glob("*.yaml")))
    reason, line, help = "", "", f"give {known}, or the path of a YAML file"
    try:
        root = compose(read_small_text(os.fspath(path)))
        return None if root is None else plain(root, numbers=True)
    except YamlError as error:
        reason = str(error).removeprefix("is ")
        if error.line is not None:
            line, help = f" line {error.line}", error.help
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or str(error)
    raise MachineError(f"machine {str(given)!r}{line} cannot be read: {reason}", help=help)


def _short(value: object) -> str:
    """Return a value as an error shows it: a file may hold a long one."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _read_link(data: Any, at: int, path: str) -> tuple[tuple[str, int], Link]:
    where = f"{path}, links[{at}]"
    if not isinstance(data, dict) or set(data) - {"collective", "ranks", "latency", "bandwidth"}:
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
    return (kind, ranks), Link(_number(data, "latency", where, least=0.0), _number(data, "bandwidth", where))


def _number(data: Mapping[str, Any], name: str, where: str, least: float | None = None) -> float:
    value: Any = data.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and least is None):
        raise MachineError(
            f"machine {where}: {name} is {_short(value)}",
            help=f"give a number {'from 0' if least is not None else 'above 0'}, such as 4.5e+11 (YAML wants the sign)",
        )
    return float(value)
