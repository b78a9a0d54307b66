"""Read the programs of the ranks that a process runs, as one (`ir/hosting.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler._torch import with_state
from tpcompiler.checkpoint.leaves import placed_shardings, shardings_of
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir.hosting import Hosts, host_ranks, name_leaves
from tpcompiler.ir.mesh import hosted_group, hosted_groups
from tpcompiler.ir.shares import mesh_of
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.runtime.artifact import Manifest, program_file
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import Weights, fill_rank, read_graph


def read_hosted(files: ProgramFiles, weights: Weights | None = None) -> tuple[ExportedProgram, Manifest]:
    """Return this process's program, and what the manifest says for the world of processes.

    Raises:
        ArtifactError: as `read_rank`.
        MeshError: as `Hosts`, for the processes of this world.
        UnsupportedError: as `read_process`.
    """
    manifest, process = files.manifest, dist.get_rank()
    hosts = hosts_of(manifest, dist.get_world_size())
    program = read_process(files, hosts, process, lambda own, rank: fill_rank(own, files, rank, files.folder, weights))
    return program, hosted_manifest(manifest, hosts, process)


def read_process(
    files: ProgramFiles, hosts: Hosts, process: int, fill: Callable[[ExportedProgram, int], ExportedProgram]
) -> ExportedProgram:
    """Return the program of a process; `fill` puts a rank's weights into its program.

    Raises:
        ArtifactError: as `read_rank`.
        UnsupportedError: as `host_ranks`; or the program is a stage.
    """
    manifest, ranks = files.manifest, []
    if manifest.stage is not None:
        raise UnsupportedError(f"{files.folder} is a stage of a program", help="load it without same_bits")
    graphs = dict[str, ExportedProgram]()  # of ranks alike, one
    for rank in hosts.ranks(process):
        name = program_file(manifest, rank)
        alike = graphs[name] = graphs.get(name) or read_graph(files, rank)
        state, constants = dict(alike.state_dict), dict(alike.constants)
        program = fill(with_state(alike, state, constants, alike.module_call_graph, None), rank)
        program = expand_collectives(program)
        ranks.append((program, {**program.constants, **program.state_dict}))
    return host_ranks(ranks, hosts, process, placed_shardings(manifest))


def hosts_of(manifest: Manifest, processes: int) -> Hosts:
    """Return which ranks each of some processes runs.

    Raises:
        MeshError: as `Hosts`.
    """
    return Hosts(mesh_of(manifest), processes)


def names_in(manifest: Manifest, processes: int, process: int) -> list[dict[str, str]]:
    """Return the name of each tensor of each rank of a process (`name_leaves`)."""
    hosts = hosts_of(manifest, processes)
    shardings = shardings_of(manifest)
    return name_leaves(hosts, process, [*shardings, *manifest.rank_numbers], shardings)


def hosted_manifest(manifest: Manifest, hosts: Hosts, process: int) -> Manifest:
    """Return what a manifest says for the world of processes, and its tensors under the names of this process."""
    named = names_in(manifest, hosts.processes, process)
    rows: Mapping[str, str] = {name: leaf for own in named for leaf, name in own.items()}
    tensors = {row.name: row for row in manifest.tensors}
    return structs.replace(
        manifest,
        mesh=hosts.degrees,
        factors={},
        groups={
            hosted_group(name, hosts.processes): [[*own] for own in hosted_groups(groups, hosts.each)]
            for name, groups in manifest.groups.items()
        },
        tensors=[
            structs.replace(tensors[leaf], name=name, tied_to=None) for name, leaf in rows.items() if leaf in tensors
        ],
        programs={},
        rank_numbers={},
        symm_mem={},
    )
