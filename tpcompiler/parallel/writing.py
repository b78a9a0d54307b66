"""Write an artifact: its manifest, the ranks' programs and weights, and the model that they were made from."""

from __future__ import annotations

import copy
import platform
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler._torch import all_tensors, forget_index, guards_of, guards_on, save_program, set_guards, with_state
from tpcompiler.artifact.program import Stored
from tpcompiler.errors import TpCompilerWarning, UnsupportedError, option
from tpcompiler.frontend.refused import refuse_hollow, refuse_unwritable
from tpcompiler.ir import edit
from tpcompiler.ir.calling_convention import calling_of, odd_keys, plain_outputs, tree_text
from tpcompiler.ir.devices import values
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.program import PlacedProgram, results_of, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.symm_mem import rooms_of
from tpcompiler.ir.text import dtype_name
from tpcompiler.parallel.partition import Partition
from tpcompiler.plan.plan import Plan
from tpcompiler.rules.index_range import door_ranges
from tpcompiler.runtime.artifact import (
    FORMAT,
    MODEL,
    VALUES,
    VERSION,
    WHOLE,
    Manifest,
    program_file,
    sha256,
    weights_file,
    write_record,
)
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.place import leave_out, memory_of, place_state
from tpcompiler.runtime.pt2 import MODEL as JSON
from tpcompiler.runtime.pt2 import Pt2, has_pickled_examples, why_not_read
from tpcompiler.runtime.records import Asked, BoundaryRecord, Layout, TensorRecord
from tpcompiler.runtime.target import MANIFEST, refuse_full_disk
from tpcompiler.runtime.weightless import hollow_like, save_marked, weightless_names
from tpcompiler.runtime.weights import TensorEntry, lay_out, write_weights
from tpcompiler.terminal.progress import counted

Write = Callable[[int, Path], str | None]  # of a rank; gives the file's SHA-256 if it is known
FEW, MOST_PLACES = 64, 1 << 20  # elements of a literal; of one that holds positions in a dim
NODE_BYTES, FILE_BYTES = 4_000, 1 << 16  # upper bounds of a node's text, and of an archive without nodes


def manifest_of(partition: Partition, plan: Plan, asked: Asked) -> Manifest:
    """Return the manifest of a converted program, without notes and the files' hashes."""
    program, mesh = partition.program, partition.program.mesh
    ranges = door_ranges(program, {node.name: placement_of(node).shardings[0] for node in program.user_inputs()})
    inputs = [
        BoundaryRecord(
            name=node.name,
            values=list(ranges[node.name]) if node.name in ranges else None,
            **_described(edit.fake(node), placement_of(node).shardings[0], mesh),
        )
        for node in program.user_inputs()
    ]
    outputs = [
        BoundaryRecord(name=name, **_described(edit.fake(value), placement_of(value).shardings[0], mesh))
        for name, value in results_of(program).items()
        if edit.is_tensor(value)
    ]
    first = partition.rank_program(0)
    return Manifest(
        mesh=mesh.written,
        factors={axis: list(degrees) for axis, degrees in mesh.factors},
        groups=partition.groups(),
        device_type="cuda" if partition.device_type == "cuda" else "cpu",
        plan=plan.to_data(),
        tensors=_tensors(program),
        inputs=inputs,
        outputs=outputs,
        collectives=partition.collectives(),
        notes=[],
        output_type=None,
        versions={"tpcompiler": VERSION, "torch": str(torch.__version__), "python": platform.python_version()},
        calling=calling_of(first, guards_of(first)),
        rank_numbers=partition.rank_numbers,
        asked=asked,
        symm_mem={name: room.group for name, room in rooms_of(first).items()},
        files={},
        programs={},
        format=FORMAT,
    )


def _tensors(program: PlacedProgram) -> list[TensorRecord]:
    first_of = tied(program)
    names = {node.name: fqn for node, fqn in program.leaves()}
    specs = {spec.target: spec for _, spec in program.inputs()}
    rows = []
    for node, fqn in program.leaves():
        first = first_of[node.name]
        rows.append(
            TensorRecord(
                name=fqn,
                kind=specs[fqn].kind.name.lower(),
                persistent=specs[fqn].persistent is not False,
                tied_to=names[first] if first != node.name else None,
                **_described(program.state(fqn), placement_of(node).shardings[0], program.mesh),
            )
        )
    return rows


def _described(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> dict[str, Any]:
    return {
        "shape": [size if isinstance(size, int) else str(size) for size in value.shape],
        "dtype": dtype_name(value.dtype),
        "sharding": sharding.text(mesh),
    }


class ProgramWriter:
    """Writes the files of one program into a folder."""

    def __init__(
        self,
        original: ExportedProgram,
        partition: Partition,
        manifest: Manifest,
        *,
        keep_output_types: bool = False,
        elsewhere: Stored,
        layout: Layout | None = None,
        whole: ExportedProgram | None = None,
    ) -> None:
        """Complete the manifest, and refuse programs that files cannot hold.

        Args:
            manifest: the description of the program in memory.
            elsewhere: leaf -> the program that stores it; in these files it has a shape but no values.
            whole: the program that was cut into stages, to be written next to the first.
            layout: by default "shared" if the model was exported without weights, else "ranks".

        Raises:
            UnsupportedError, ProgramError: torch's file format, or this layout, cannot store the program.
        """
        self.original, self.partition, self.elsewhere, self.whole = original, partition, elsewhere, whole
        self.hollow = weightless_names(original)
        if layout == "ranks":
            refuse_hollow(original, "written in self-contained files")
        self.layout: Layout = layout or ("shared" if self.hollow else "ranks")
        _refuse_unwritable(original, partition)
        spec = original.call_spec.out_spec
        replaced = plain_outputs(spec)[1] if not keep_output_types and spec is not None else None
        self.plain = replaced is not None  # an output class becomes a dict
        tensors = [structs.replace(row, stored_in=elsewhere.get(row.name)) for row in manifest.tensors]
        calling = manifest.calling
        if manifest.stage is not None:
            calling = structs.replace(calling, asserted=guards_on(calling.asserted, calling.names))
        if replaced is not None and spec is not None:
            calling = structs.replace(calling, returns=tree_text(plain_outputs(spec)[0]))
        count = len(partition.classes)
        names = [f"program_{i}.pt2" if count > 1 else "program.pt2" for i in range(count)]
        programs = dict(zip(names, map(list, partition.classes), strict=True))
        self.manifest = structs.replace(
            manifest, output_type=replaced, tensors=tensors, calling=calling, programs=programs
        )
        self.own = [row.name for row in tensors if row.is_own]  # the tensors stored in these files, once each

    def write(self, directory: Path) -> None:
        """Write all files, the manifest last.

        Raises:
            OSError: a file cannot be written.
        """
        programs = self.manifest.programs.items()
        work: list[tuple[str, Write, int]] = [(name, self._write_program, ranks[0]) for name, ranks in programs]
        write_rank: Write = self._write_rank if self.layout == "ranks" else self._write_weights
        if not self.hollow:
            work += [(weights_file(rank, self.layout), write_rank, rank) for rank in range(self.manifest.world_size)]
        files = {
            name: write(rank, directory / name) or sha256(directory / name)
            for name, write, rank in counted(work, "writing files", "files")
        }
        if self.hollow:
            files[VALUES] = self._write_values(directory / VALUES)
        self._write_model(directory / MODEL)
        files[MODEL] = sha256(directory / MODEL)
        if self.whole is not None:
            _write_whole(self.whole, directory / WHOLE)
            files[WHOLE] = sha256(directory / WHOLE)
        write_record(directory / MANIFEST, structs.replace(self.manifest, files=files))

    def _write_program(self, rank: int, path: Path) -> None:
        """Write the program of a rank, which others run too, without weights."""
        program = self._program_of(rank, path, is_whole=False)
        held = all_tensors(program)
        _save_marked(program, path, [name for name, value in held.items() if _has_room(value)])
        if rank == 0 and (reason := why_not_read(path)):
            warnings.warn(
                f"these files are only read with {option('--trust', 'trust=True')}: {reason}",
                TpCompilerWarning,
                stacklevel=2,
            )

    def _write_rank(self, rank: int, path: Path) -> None:
        """Write the program of a rank with its weights, next to that of its class, which has the same graph."""
        program = self._program_of(rank, path, is_whole=True)
        with Opened(path.with_name(program_file(self.manifest, rank))) as file:
            text = Pt2(file).text(JSON)
        _save(lambda: save_program(program, path, text=text))

    def _program_of(self, rank: int, path: Path, *, is_whole: bool) -> ExportedProgram:
        """Return the program of a rank as a file has it, with its weights or without."""
        program = self.partition.rank_program(rank)
        room = [name for name, value in all_tensors(program).items() if _has_room(value)]
        for fqn in (*self.elsewhere, *self.manifest.symm_mem) if is_whole else room:
            leave_out(program, fqn)
        place_state(program, "cpu")  # every rank would load a file with cuda:0 onto cuda:0
        graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
        for _, value in (pair for graph in graphs for pair in values(graph)):
            forget_index(value)
        if self.manifest.stage is not None:
            set_guards(program, guards_on(guards_of(program), self.manifest.calling.names))
        if self.plain:
            signature = program.module_call_graph[0].signature
            assert signature is not None
            signature.out_spec = plain_outputs(signature.out_spec)[0]
        if has_pickled_examples(program):
            program.example_inputs = None  # makes the file readable without trust
        refuse_full_disk(path, _bytes_in_file(program))
        return program

    def _write_weights(self, rank: int, path: Path) -> str:
        state = self.partition.share(rank).local_state
        return _write_tensors(path, {name: state[name] for name in (*self.own, *self.manifest.rank_numbers)})

    def _write_values(self, path: Path) -> str:
        """Write the tensors that do have values in a model without weights, whole."""
        state = self.partition.program.state
        return _write_tensors(path, {name: state(name) for name in self.own if name not in self.hollow})

    def _write_model(self, path: Path) -> None:
        """Write the single-device program without its weights, for conversion to other ranks."""
        held = all_tensors(self.original)
        tied = {row.name: row.holder for row in self.manifest.tensors}
        # torch keeps a tied weight under all its names, even those that no input takes.
        first = {memory_of(held[name]): taken for name, taken in tied.items()}
        tied |= {name: first[at] for name, v in held.items() if _has_room(v) and (at := memory_of(v)) in first}
        # Small literals are not weights, and a trace may read them.
        literals = {row.name for row in self.manifest.tensors if row.kind == "constant_tensor"}
        kept = {name for name in literals if held[name].numel() <= (MOST_PLACES if _has_places(held[name]) else FEW)}
        hollow = {name: tied[name] for name in tied.keys() - kept if _has_room(held.get(name))}
        state = {name: value for name, value in self.original.state_dict.items() if name in tied}
        _write_hollow(self.original, path, state, hollow, plain=self.plain)


def _refuse_unwritable(original: ExportedProgram, partition: Partition) -> None:
    refuse_unwritable(partition.program.graph)
    for name, value in results_of(partition.program).items():
        if isinstance(value, str):
            raise UnsupportedError(
                f"output '{name}' is the text {value!r}, which torch.export.load cannot read back",
                help="return tensors and numbers only",
            )
    for spec in (original.call_spec.in_spec, original.call_spec.out_spec):
        for key in odd_keys(spec) if spec is not None else ():
            raise UnsupportedError(
                f"a dict that the program takes or returns has the key {key!r}, which torch's file does not keep",
                help="use text or numbers as keys",
            )


def _write_tensors(path: Path, state: Mapping[str, torch.Tensor]) -> str:
    entries = lay_out(TensorEntry(name, value.dtype, tuple(value.shape)) for name, value in state.items())
    refuse_full_disk(path, sum(entry.nbytes for entry in entries))
    return write_weights(path, entries, (state[entry.name] for entry in entries))


def _write_whole(whole: ExportedProgram, path: Path) -> None:
    """Write the program that was cut into stages without its weights; small constants stay."""
    held, first = all_tensors(whole), dict[object, str]()
    literals = {spec.target for spec in whole.graph_signature.input_specs if spec.kind is InputKind.CONSTANT_TENSOR}
    names = [name for name, v in held.items() if _has_room(v) and not (name in literals and v.numel() <= FEW)]
    hollow = {name: first.setdefault(memory_of(held[name]), name) for name in names}
    _write_hollow(whole, path, whole.state_dict, hollow, plain=True)


def _write_hollow(
    program: ExportedProgram, path: Path, state: Mapping[str, Any], hollow: Mapping[str, str], *, plain: bool
) -> None:
    """Write a single-device program in which some tensors have no values: name -> the tensor that it is tied to."""
    held = all_tensors(program)
    made = {first: hollow_like(held[first]) for first in {*hollow.values()}}
    state, constants = (
        {name: made[hollow[name]] if name in hollow else value for name, value in own.items()}
        for own in (state, program.constants)
    )
    graph = program.module_call_graph
    if plain:
        signature = copy.copy(graph[0].signature)
        assert signature is not None
        signature.out_spec = plain_outputs(signature.out_spec)[0]
        graph = [replace(graph[0], signature=signature), *graph[1:]]
    examples = None if has_pickled_examples(program) else program.example_inputs
    _save_marked(with_state(program, dict(state), constants, graph, examples), path, hollow)


@collector_rests()  # not if it holds weights: other ranks' programs are garbage by then
def _save_marked(program: ExportedProgram, path: Path, names: Collection[str]) -> None:
    _save(lambda: save_marked(program, path, names, all_tensors(program)))


def _save(save: Callable[[], None]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No complete tensor found")  # for leaves that are left out
            save()
    except RuntimeError as error:  # torch's archive writer raises this for a failed write
        raise OSError(str(error)) from error


def _has_places(value: torch.Tensor) -> bool:
    """Return True if a conversion may read the values: looking up consecutive rows becomes a slice."""
    return value.ndim == 1 and not value.is_floating_point() and not value.is_complex()


def _has_room(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _bytes_in_file(program: ExportedProgram) -> int:
    """Return an upper bound of the program's file: its tensors, once each, and its graph."""
    held = {
        id(v): v for v in (*program.state_dict.values(), *program.constants.values()) if isinstance(v, torch.Tensor)
    }
    nodes = sum(len(part.graph.nodes) for part in program.graph_module.modules() if isinstance(part, fx.GraphModule))
    tensors: int = sum(value.untyped_storage().nbytes() for value in held.values())
    return tensors + NODE_BYTES * nodes + FILE_BYTES
