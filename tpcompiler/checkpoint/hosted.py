"""Read the programs of the ranks that a process runs, as one (`ir/hosting.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler._torch import with_state
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir.hosting import Hosts, host_ranks, name_leaves
from tpcompiler.ir.mesh import Mesh, hosted_group, hosted_groups
from tpcompiler.ir.shares import row_sharding
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.runtime.artifact import Manifest, program_file
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import Weights, fill_rank, read_rank


def read_hosted(
    files: ProgramFiles, weights: Weights | None = None
) -> tuple[ExportedProgram, Manifest, list[dict[str, str]]]:
    """Return this process's program, what the manifest says for the world of processes, and `names_here`.

    Raises:
        ArtifactError: as `read_rank`.
        MeshError: as `Hosts`, for the processes of this world.
        UnsupportedError: as `host_ranks`; or the program is a stage.
    """
    manifest = files.manifest
    if manifest.stage is not None:
        raise UnsupportedError(f"{files.folder} is a stage of a program", help="load it without same_bits")
    hosts, process = hosts_here(manifest), dist.get_rank()
    first, ranks = dict[str, ExportedProgram](), []
    for rank in hosts.ranks(process):
        name = program_file(manifest, rank)
        if name not in first:
            program = first[name] = read_rank(files, rank, weights)
        else:  # the graph of ranks alike is read once
            alike = first[name]
            state, constants = dict(alike.state_dict), dict(alike.constants)
            program = with_state(alike, state, constants, alike.module_call_graph, None)
            fill_rank(program, files, rank, files.folder / name, weights)
        program = expand_collectives(program)
        ranks.append((program, {**program.constants, **program.state_dict}))
    shardings = {name: row_sharding(row, hosts.mesh) for name, row in manifest.placed()}
    program = host_ranks(ranks, hosts, process, shardings)
    return program, hosted_manifest(manifest, hosts, process), names_here(manifest, hosts, process)


def hosts_here(manifest: Manifest) -> Hosts:
    """Return which ranks each process of this world runs.

    Raises:
        MeshError: as `Hosts`.
    """
    return Hosts(Mesh.of(manifest.mesh, manifest.factors), dist.get_world_size())


def names_here(manifest: Manifest, hosts: Hosts, process: int) -> list[dict[str, str]]:
    """Return the name of each tensor of each rank of a process (`name_leaves`)."""
    shardings = {row.name: row_sharding(row, hosts.mesh) for row in manifest.tensors}
    return name_leaves(hosts, process, shardings, shardings)


def hosted_manifest(manifest: Manifest, hosts: Hosts, process: int) -> Manifest:
    """Return what a manifest says for the world of processes, and its tensors under the names of this process."""
    rows: Mapping[str, str] = {name: leaf for own in names_here(manifest, hosts, process) for leaf, name in own.items()}
    tensors = {row.name: row for row in manifest.tensors}
    return structs.replace(
        manifest,
        mesh=hosts.degrees,
        factors={},
        groups={
            hosted_group(name, hosts.processes): [[*own] for own in hosted_groups(groups, hosts.each)]
            for name, groups in manifest.groups.items()
        },
        tensors=[structs.replace(tensors[leaf], name=name, tied_to=None) for name, leaf in rows.items()],
        programs={},
        rank_numbers={},
        symm_mem={},
    )
