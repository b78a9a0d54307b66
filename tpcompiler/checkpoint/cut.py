"""Cut a checkpoint into the ranks' weights, one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest

import torch
from torch.export import ExportedProgram

from tpcompiler.checkpoint.conversion import Recipe
from tpcompiler.checkpoint.fill import refuse_needless
from tpcompiler.checkpoint.leaves import entries_of, leaves_of, shardings_of, wanted_leaves
from tpcompiler.checkpoint.ranks import Source, open_source
from tpcompiler.checkpoint.sources import find_sources
from tpcompiler.errors import ArtifactError, explaining, option, reason
from tpcompiler.ir.shares import cut, mesh_of
from tpcompiler.runtime.artifact import VALUES, Manifest, say_files, weights_file
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import read_values, taken_by, with_tied
from tpcompiler.runtime.target import CUT, refuse_full_disk, replacing
from tpcompiler.runtime.weightless import weightless_names
from tpcompiler.runtime.weights import OtherContent, Writing, laid_out
from tpcompiler.terminal.progress import reporting

READ_AHEAD = 1 << 28  # bytes of two successive tensors up to which the second is read while the first is written
Progress = Callable[[int, int], None]  # (bytes done, total)
TELL = reporting("cutting the weights", "bytes")


def cut_programs(
    programs: Iterable[ProgramFiles],
    checkpoint: str | os.PathLike[str] | Source,
    ranks: Sequence[int] | None = None,
    *,
    partial: bool = False,
    force: bool = False,
    progress: Progress = TELL,
) -> None:
    """Write the weights files of programs that were converted without weights (`ParallelProgram.cut`).

    Raises:
        ArtifactError: a program has its weights, the checkpoint does not fit (all faults at once), an interrupted cut
            of another checkpoint exists, or a file cannot be written.
    """
    source = open_source(checkpoint)
    works = [_Work(files, source, ranks) for files in programs]
    every = {leaf.name: leaf for work in works for leaf in wanted_leaves(work.manifest, work.values)}
    recipes = find_sources(list(every.values()), source, partial=partial)
    if any(not work.is_cut for work in works) and not force:
        works = [work for work in works if not work.is_cut]  # those that an interrupted cut left out
    for work in works:
        work.begin(recipes, force)
    total, done = sum(work.size for work in works), 0
    for work in works:
        for count in work.run():
            done += count
            progress(done, total)


def refuse_other_checkpoint(
    programs: Sequence[tuple[Manifest, ExportedProgram]], checkpoint: str | os.PathLike[str], partial: bool
) -> None:
    """Check that a checkpoint has the weights that programs lack, before anything is written.

    Raises:
        ArtifactError: as `cut_programs`; or the programs already have their weights.
    """
    refuse_needless({name for _, program in programs for name in weightless_names(program)}, checkpoint)
    wanted = {
        leaf.name: leaf
        for manifest, program in programs
        for leaf in wanted_leaves(manifest, {*program.state_dict, *program.constants} - weightless_names(program))
    }
    find_sources(list(wanted.values()), open_source(checkpoint), partial=partial)


class _Work:
    """The weights files of one program's ranks."""

    def __init__(self, files: ProgramFiles, source: Source, ranks: Sequence[int] | None) -> None:
        self.directory, self.manifest, self.source = files.folder, files.manifest, source
        if VALUES not in self.manifest.files:
            raise ArtifactError(
                f"{self.directory} has its weights", help="cut an artifact of a model that was exported without weights"
            )
        self.ranks = list(range(self.manifest.world_size)) if ranks is None else sorted(set(ranks))
        if outside := [rank for rank in self.ranks if not 0 <= rank < self.manifest.world_size]:
            raise ArtifactError(
                f"rank {outside[0]} is outside the artifact's world of {self.manifest.world_size}",
                help=f"give ranks from 0 to {self.manifest.world_size - 1}",
            )
        self.values = read_values(files)
        self.leaves = leaves_of(self.manifest)
        self.mesh = mesh_of(self.manifest)
        self.shardings = shardings_of(self.manifest)
        self.entries = {rank: entries_of(self.manifest, rank) for rank in self.ranks}
        self.size = sum(entry.nbytes for entries in self.entries.values() for entry in entries)

    @property
    def is_cut(self) -> bool:
        """True if all requested ranks have their weights."""
        return all(weights_file(rank) in self.manifest.files for rank in self.ranks)

    def begin(self, recipes: Mapping[str, Recipe], force: bool) -> None:
        """Reject overwriting weights or another cut, and open the state of this one."""
        if there := [rank for rank in self.ranks if weights_file(rank) in self.manifest.files and not force]:
            raise ArtifactError(
                f"{self.directory} has the weights of rank {there[0]} already",
                help=f"write them again with {option('--force', 'force=True')}",
            )
        self.recipes = recipes
        self.begun = self._begun(force)

    def _begun(self, force: bool) -> bool:
        """Return True if an interrupted cut of the same files exists; `run` compares its content."""
        self.sources = self.source.fingerprint()
        expected = {"sources": self.sources, "programs": dict(self.manifest.files), "ranks": self.ranks}
        state = self.directory / CUT
        with contextlib.suppress(OSError, ValueError):
            if json.loads(state.read_text(encoding="utf-8")) == expected and not force:
                return True
        if state.is_file() and not force:
            raise self._refuse_to_go_on()
        with explaining(f"cannot write {state}", "check the free space"), replacing(state) as path:
            path.write_text(json.dumps(expected), encoding="utf-8")
        return False

    def _refuse_to_go_on(self) -> ArtifactError:
        return ArtifactError(
            f"{self.directory} has an interrupted cut of other ranks, or the checkpoint was changed since",
            help=f"start again with {option('--force', 'force=True')}",
        )

    def run(self) -> Iterator[int]:
        """Cut tensor by tensor; yield the number of bytes written."""
        parts = {rank: self.directory / f".{weights_file(rank)}.part" for rank in self.ranks}
        hashes: dict[str, str] = {}
        try:
            with contextlib.ExitStack() as opened:
                writing = {
                    rank: opened.enter_context(Writing(parts[rank], self.entries[rank], go_on=self.begun))
                    for rank in self.ranks
                }
                kept = sum(each.kept for each in writing.values())
                refuse_full_disk(self.directory / CUT, self.size - kept)
                yield kept
                order = [entry.name for entry in self.entries[self.ranks[0]]] if self.ranks else []
                for name, whole in self._wholes(order):
                    for rank in self.ranks:
                        yield writing[rank].put(self._share(name, whole, rank))
                if self.source.fingerprint() != self.sources:
                    raise ArtifactError(
                        f"{self.source.path} was changed while it was cut",
                        help=f"start again with {option('--force', 'force=True')} when it is whole",
                    )
                hashes = {weights_file(rank): each.finish() for rank, each in writing.items()}
            for rank in self.ranks:
                os.replace(parts[rank], self.directory / weights_file(rank))
            say_files(self.directory, self.manifest, hashes)
            (self.directory / CUT).unlink()
        except OtherContent as error:
            raise self._refuse_to_go_on() from error
        except OSError as error:
            raise ArtifactError(
                f"cannot write the weights of {self.directory}: {reason(error)}",
                help="cut again when there is room: it continues from here",
            ) from error

    def _wholes(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield every tensor; small ones are read while the previous one is written."""
        shapes = {leaf.name: math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves}
        with ThreadPoolExecutor(1) as reader:
            ahead: Future[torch.Tensor | None] | None = None
            for name, following in zip_longest(names, names[1:]):
                whole = self._whole(name) if ahead is None else ahead.result()
                small = following is not None and shapes.get(following, 0) + shapes.get(name, 0) <= READ_AHEAD
                ahead = reader.submit(self._whole, following) if small else None
                yield name, whole
                del whole

    def _whole(self, name: str) -> torch.Tensor | None:
        if name in self.manifest.rank_numbers:
            return None
        return self.recipes[name].make(self.source.read) if name in self.recipes else self.values[name]

    def _share(self, name: str, whole: torch.Tensor | None, rank: int) -> torch.Tensor:
        if whole is None:
            return torch.tensor([self.manifest.rank_numbers[name][rank]])
        return cut(whole, self.shardings[name], self.mesh, rank)


def read_shares(
    checkpoint: str | os.PathLike[str] | Source,
    manifest: Manifest,
    values: Mapping[str, torch.Tensor],
    rank: int,
    program: ExportedProgram,
) -> dict[str, torch.Tensor]:
    """Read one rank's weights from a checkpoint, and no more of it; `values` are those that no checkpoint has.

    Raises:
        ArtifactError: as `cut_programs`.
    """
    leaves, mesh, source = leaves_of(manifest), mesh_of(manifest), open_source(checkpoint)
    recipes = find_sources(wanted_leaves(manifest, values), source, partial=True)
    shardings, taken, shares = shardings_of(manifest), taken_by(program), {}
    for leaf in leaves:
        whole = recipes[leaf.name].make(source.read) if leaf.name in recipes else values[leaf.name]
        shares[leaf.name] = laid_out(cut(whole, shardings[leaf.name], mesh, rank).clone(), taken[leaf.name])
    numbers = {name: torch.tensor([rows[rank]]) for name, rows in manifest.rank_numbers.items()}
    return with_tied({**shares, **numbers}, manifest)
