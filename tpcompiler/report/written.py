"""The facts in an artifact's files about one value: its placement and reason, its operands and its collectives."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.export import ExportGraphSignature

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.cost.collective import KIND_OF
from tpcompiler.errors import ArtifactError, TpCompilerError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import leaf_of_module
from tpcompiler.ir.node_placement import NO_CLAIM, Claim, claims_of, records_of
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import mesh_of, read_sharding
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.ir.text import value_text
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective, Record, TensorRecord


class Operand(Record, frozen=True):
    """A value that an op reads."""

    name: str  # of the value or the leaf
    sharding: str  # as it is
    needed: str  # as the op needs it


@dataclass(frozen=True)
class Written:
    """The program of rank 0 by the names of the single-device program's values."""

    manifest: Manifest
    graph: fx.Graph
    signature: ExportGraphSignature

    @classmethod
    def of(cls, program: ArtifactProgram) -> Written:
        """Read the program of rank 0; its weights need not exist.

        Raises:
            ArtifactError: a file is damaged or, without trust, could run code.
        """

        def read() -> Written:
            exported = expand_collectives(program.graph(0))
            return cls(program.manifest, exported.graph, exported.graph_signature)

        return program.known.once("written", read)

    @cached_property
    def claims(self) -> dict[fx.Node, Claim]:
        return dict(claims_of(self.graph))

    @cached_property
    def leaves(self) -> dict[str, TensorRecord]:
        """Parameters, buffers and constants by the name of their placeholder."""
        rows = {row.name: row for row in self.manifest.tensors}
        specs = self.signature.input_specs
        return {spec.arg.name: rows[spec.target] for spec in specs if spec.target in rows}

    def inputs(self) -> Iterator[tuple[str, torch.Tensor, Sharding]]:
        """The tensors that the user gives: rank 0's fake value of each, and how it is cut.

        Raises:
            ArtifactError: as `read_claimed`.
        """
        rows, mesh = {row.name: row for row in self.manifest.inputs}, mesh_of(self.manifest)
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name in rows:
                yield node.name, edit.fake(node), read_claimed(rows[node.name].sharding, mesh, edit.fake(node))

    def ops(self, name: str) -> list[fx.Node]:
        """The nodes that do a rank's share of an op."""
        return [node for node, claim in self.claims.items() if claim.origin == name and claim.reshard is None]

    def names(self) -> list[str]:
        """All that can be asked for."""
        ops = (claim.origin for claim in self.claims.values() if claim.sharding and claim.origin is not None)
        leaves = (row.name for row in self.manifest.tensors)
        inputs = (row.name for row in self.manifest.inputs)
        sent = (record.node for record in self.manifest.collectives)
        return list(dict.fromkeys([*leaves, *inputs, *sent, *(op for op in ops if op not in self.leaves)]))

    def named(self, name: str) -> str | None:
        """Resolve a name: one of `names`, a collective by its kind (`all_gather_1`), or the module of a weight."""
        known = self.names()
        kind, number = re.fullmatch(r"(.*?)(_\d+)?", name, re.DOTALL).groups("")  # type: ignore[union-attr]
        calls = (f"{call}{number}" for call, each in KIND_OF.items() if each == kind)
        weight = leaf_of_module(name, [row.name for row in self.manifest.tensors])
        return next((each for each in (name, *calls, weight) if each in known), None)

    def placed(self, name: str) -> tuple[list[str], str]:
        """The shardings that an op makes, and the reason."""
        made = [self.claims[node] for node in self.ops(name) if self.claims[node].sharding is not None]
        claim = next((claim for claim in made if claim.reason), made[-1] if made else NO_CLAIM)
        return claim.sharding or [], claim.reason or ""

    def operands(self, name: str) -> list[Operand]:
        """Return the placed operands of an op, once each."""
        own = self.ops(name)
        read = (value for node in own for value in node.all_input_nodes if value not in own)
        return list(dict.fromkeys(each for value in read for each in self._operand(value)))

    def _operand(self, value: fx.Node) -> Iterator[Operand]:
        claim = self.claims.get(value, NO_CLAIM)
        origin = value.name if claim.origin is None else claim.origin
        if states := claim.states:
            yield Operand(self._called(origin), states[0], states[-1])
        elif texts := claim.sharding:
            at: Any = value.args[1] if value.target is operator.getitem else 0
            text = texts[at if at < len(texts) else 0]
            yield Operand(origin, text, text)
        elif value.op == "placeholder":
            inputs = {row.name: row for row in self.manifest.inputs}
            if row := self.leaves.get(value.name) or inputs.get(value.name):
                yield Operand(row.name, row.sharding, row.sharding)

    def _called(self, name: str) -> str:
        """The name of a leaf behind that of its placeholder."""
        return self.leaves[name].name if name in self.leaves else name

    def sent(self, name: str) -> list[Collective]:
        """The collectives that change what an op reads or makes, in order."""
        own = self.ops(name)
        nodes = [*(value for node in own for value in node.all_input_nodes), *own]
        reshards = {self.claims[node].reshard for node in nodes if node in self.claims}
        reshards |= {claim.reshard for claim in self.claims.values() if claim.origin == name}
        sent = records_of(self.graph, self.manifest).items()
        return [record for node, record in sent if not reshards.isdisjoint(self._changes(node))]

    def _changes(self, collective: fx.Node) -> set[str | None]:
        """The changes of sharding that a collective is part of: that of its own claim, or of each of its results."""
        return {claim.reshard for node in (collective, *collective.users) if (claim := self.claims.get(node))}

    def change(self, record: Collective) -> Operand:
        """The value that a collective changes."""
        found = (c for c in self.claims.values() if c.reshard == record.reshard and c.sharding is not None)
        claim = next(found, NO_CLAIM)
        states = claim.states or ("",)
        return Operand(claim.origin or "", states[0], states[-1])

    def users(self, leaf: str) -> list[str]:
        """The ops that read a leaf."""
        names = {placeholder for placeholder, row in self.leaves.items() if leaf in (row.name, row.tied_to)}
        found = list[str]()
        for node, claim in self.claims.items():
            if claim.origin is not None and claim.reshard is None:
                read = {self.claims.get(value, NO_CLAIM).origin or value.name for value in node.all_input_nodes}
                found += [claim.origin] if names & read else []
        return list(dict.fromkeys(found))


def read_claimed(text: str, mesh: Mesh, value: torch.Tensor) -> Sharding:
    """The sharding that an artifact says a value has.

    Raises:
        ArtifactError: it cannot have it.
    """
    try:
        return read_sharding(text, mesh, value.ndim)
    except (TpCompilerError, ValueError) as error:
        said = f"a value of {value_text(value)} is {text!r}"
        raise ArtifactError(f"the artifact says that {said}", help="convert the model again") from error
