"""A scenario: calls of several programs, in which an input may be an output of an earlier call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch.export import ExportedProgram

from tpcompiler._torch import input_values
from tpcompiler.errors import InputsError
from tpcompiler.judge.compare.compare import Call, Made
from tpcompiler.runtime.inputs import arrange_inputs, read_tensors
from tpcompiler.runtime.records import Record, read_record
from tpcompiler.yaml_file import YamlError, compose, plain, read_small_text

FORM = 'write "calls: [{program: NAME, inputs: {NAME: SOURCE}}]"'
SOURCE = re.compile(r"(?P<argmax>argmax\()?(?P<of>[^\[\]()]+)(?:\[(?P<at>[-\d:, ]+)\])?(?(argmax)\))")
AT = re.compile(r"(-?\d{1,9})?(:)?(-?\d{1,9})?")


class ScenarioCall(Record, frozen=True, kw_only=True):
    """A call of a program.

    `inputs`: by name, a number or nested lists of them; or the text of a source.
    """

    program: str
    inputs: dict[str, Any]


class Scenario(Record, frozen=True, kw_only=True):
    """Calls in order; `tensors` is a safetensors file next to the scenario."""

    calls: Annotated[list[ScenarioCall], Meta(min_length=1)]
    tensors: str | None = None


@dataclass(frozen=True)
class _Source:
    """A tensor of the file, or of an earlier call; a part of it, and the index of its largest element."""

    text: str
    of: str
    at: tuple[int | slice, ...]
    is_argmax: bool

    @classmethod
    def read(cls, text: str, where: str) -> _Source:
        found = SOURCE.fullmatch(text.strip())
        pieces = [AT.fullmatch(piece.strip()) for piece in found["at"].split(",")] if found and found["at"] else []
        if found is None or not all(piece and piece[0] for piece in pieces):
            raise InputsError(
                f"{where}: {text!r} is no source",
                help="write a tensor of the file, or vision.output, prefill.logits[:, -1:], argmax(decode.logits)",
            )
        at = tuple(
            slice(*(int(bound) if bound else None for bound in (piece[1], piece[3]))) if piece[2] else int(piece[1])
            for piece in pieces
            if piece
        )
        return cls(text, found["of"].strip(), at, bool(found["argmax"]))

    def value(self, given: Mapping[str, torch.Tensor], made: Made, where: str) -> torch.Tensor:
        program, _, output = self.of.partition(".")
        value = given.get(self.of, made.get(program, {}).get(output))
        if value is None:
            known = [*given, *(f"{name}.{output}" for name, outputs in made.items() for output in outputs)]
            raise InputsError(
                f"{where}: there is no {self.of!r}",
                help=f"take one of {', '.join(known)}" if known else "call the program before that makes it",
            )
        try:
            part = value[self.at] if self.at else value
            return part.argmax(-1) if self.is_argmax else part
        except (IndexError, RuntimeError) as error:
            raise InputsError(
                f"{where}: {self.text!r} cannot be taken from a tensor of shape {list(value.shape)}",
                help="give an index or a slice for each dim, at most",
            ) from error


def read_scenario(path: Path, programs: Mapping[str, ExportedProgram]) -> list[Call]:
    """Read the calls of a scenario: YAML with `calls`, and `tensors` if there is a file of them.

    Outputs of earlier calls are those of the single device, so that every call is compared on equal inputs.

    Args:
        programs: single-device programs by name.

    Raises:
        InputsError: the file cannot be read, or a call names no program, or a source has another form; when it is
            called, an input is missing or unlike the program's.
    """
    try:
        root = compose(read_small_text(str(path)))
        scenario = read_record(Scenario, None if root is None else plain(root, numbers=True))
    except (YamlError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix("is ").removeprefix(": ")
        line = f" line {error.line}" if isinstance(error, YamlError) and error.line else ""
        help = error.help if isinstance(error, YamlError) else "check the path" if isinstance(error, OSError) else FORM
        raise InputsError(f"scenario {path}{line} cannot be read: {reason}", help=help) from None
    given = read_tensors(path.parent / scenario.tensors) if scenario.tensors is not None else {}
    calls: list[Call] = []
    for number, call in enumerate(scenario.calls):
        where = f"scenario {path}, call {number + 1}"
        if call.program not in programs:
            raise InputsError(
                f"{where}: there is no program {call.program!r}", help=f"call one of {', '.join(programs)}"
            )
        where = f"{where} ({call.program})"
        sources = {
            name: _Source.read(value, f"{where}, {name}") if isinstance(value, str) else value
            for name, value in call.inputs.items()
        }
        calls.append((call.program, _Later(programs[call.program], sources, given, where), {}))
    return calls


@dataclass(frozen=True)
class _Later:
    """The inputs of a call, which are known when the calls before it have been made."""

    program: ExportedProgram
    sources: Mapping[str, Any]
    given: Mapping[str, torch.Tensor]
    where: str

    def __call__(self, made: Made) -> tuple[tuple[Any, ...], dict[str, Any]]:
        expected = input_values(self.program)
        values = {}
        for name, source in self.sources.items():
            where = f"{self.where}, {name}"
            like = expected.get(name)
            if isinstance(source, _Source):
                values[name] = source.value(self.given, made, where)
            else:
                values[name] = _constant(source, like.dtype if isinstance(like, torch.Tensor) else None, where)
        return arrange_inputs(values, self.program, self.where)


def _constant(source: Any, dtype: torch.dtype | None, where: str) -> torch.Tensor:
    try:
        return torch.tensor(source, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputsError(
            f"{where}: {source!r} is no tensor", help="write a number, or lists of equal length"
        ) from error
