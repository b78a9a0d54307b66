"""Fill a program that was exported without weights from a checkpoint, or from an artifact's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.export import ExportedProgram

from tpcompiler._torch import with_state
from tpcompiler.checkpoint.ranks import RankShares, Source, open_source
from tpcompiler.checkpoint.sources import find_sources
from tpcompiler.errors import ArtifactError, option
from tpcompiler.runtime.artifact import lacks_weights
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import read_values, taken_by
from tpcompiler.runtime.weightless import weightless_names
from tpcompiler.runtime.weights import TensorEntry, laid_out

Keep = Callable[[str, torch.Tensor], torch.Tensor]


def refuse_needless(lacking: Collection[str], checkpoint: str | os.PathLike[str] | None) -> None:
    """Raise ArtifactError for a checkpoint of a model that lacks no weights."""
    if checkpoint is not None and not lacking:
        raise ArtifactError(
            f"{os.fspath(checkpoint)} is not needed: the model has its weights",
            help=f"leave {option('--checkpoint', 'checkpoint')} out",
        )


def with_weights(
    program: ExportedProgram, files: ProgramFiles, checkpoint: str | os.PathLike[str] | None = None
) -> ExportedProgram:
    """Return an artifact's model with all its weights, mapped; missing ones come from the checkpoint, or the ranks.

    Raises:
        ArtifactError: as `fill_weights`; or a checkpoint was given for a model that has its weights.
    """
    refuse_needless(weightless_names(program), checkpoint)
    if not weightless_names(program):
        return program
    state, constants = dict(program.state_dict), dict(program.constants)
    filled = with_state(program, state, constants, program.module_call_graph, program.example_inputs)
    if checkpoint is not None:  # no checkpoint contains computed values, such as rotary frequencies
        for name, value in computed_values(filled, files).items():
            (state if name in state else constants)[name] = value
    fill_weights(filled, RankShares(files) if checkpoint is None else open_source(checkpoint), partial=True)
    return filled


def computed_values(program: ExportedProgram, files: ProgramFiles) -> dict[str, torch.Tensor]:
    """Return the artifact's values of constants and buffers that the program lacks."""
    lacking = weightless_names(program) & {*program.constants, *program.graph_signature.buffers}
    values = {name: value for name, value in read_values(files).items() if name in lacking}
    if lacking - values.keys() and not lacks_weights(files.manifest):
        source = RankShares(files)
        values |= {name: source.read(name) for name in (lacking - values.keys()) & source.tensors.keys()}
    return values


def fill_weights(
    program: ExportedProgram, source: Source, *, partial: bool = False, keep: Keep = lambda name, value: value
) -> None:
    """Fill in all weights without values, one tensor at a time; tied weights stay tied.

    A persistent buffer gets the source's value, if it has one.

    Args:
        source: the source of the tensors, which are mapped if their layout is the program's.
        partial: ignore tensors that the program does not use.
        keep: transforms each tensor before the next one is read.

    Raises:
        ArtifactError: the source does not fit the program; one message has all faults.
    """
    tensors = {**program.constants, **program.state_dict}
    names: dict[int, list[str]] = {}
    lacking = weightless_names(program)
    buffers = program.state_dict.keys() & set(program.graph_signature.buffers)
    for name in sorted(lacking | buffers):
        names.setdefault(id(tensors[name]), []).append(name)
    taken = taken_by(program)
    leaves = [
        TensorEntry(
            first, tensors[first].dtype, tuple(tensors[first].shape), tuple(rest), is_optional=first not in lacking
        )
        for first, *rest in names.values()
    ]
    recipes = find_sources(leaves, source, partial=partial)
    for leaf in (leaf for leaf in leaves if leaf.name in recipes):
        value, old = recipes[leaf.name].make(source.read), tensors[leaf.name]
        want = next(taken[name] for name in (leaf.name, *leaf.aliases) if name in taken)
        value = keep(leaf.name, laid_out(value, want))
        weight = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
        for state in (program.state_dict, program.constants):
            state.update({name: weight for name in (leaf.name, *leaf.aliases) if name in state})
