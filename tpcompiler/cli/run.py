"""Commands that deploy an artifact: `package` compiles it, `run` runs a rank."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from msgspec.structs import asdict

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import NOT_EQUAL, Artifact, Checkpoint, Imports, Json, Trust, app, report
from tpcompiler.errors import ArtifactError
from tpcompiler.terminal.tables import Part


@app.command("package")
def package_artifact(
    directory: Artifact,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Threads of a rank on a CPU; torchrun sets one.", min=1)
    ] = 1,
    checkpoint: Checkpoint = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not compare it with the model.")] = False,
    processes: Annotated[
        int,
        typer.Option("--processes", metavar="N", help="For N processes with --same-bits. 0: one for each rank.", min=0),
    ] = 0,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Compile an artifact's programs with AOTInductor.

    Writes OUT/compiled.pt2, once for all ranks and without weights. Then runs all ranks in processes, and compares
    them with the model; with --checkpoint, on weights that are not cut yet. Exits with 1, and deletes the package, if
    they differ.

    \b
    Example:
      tpcompiler package out
      torchrun --nproc-per-node 2 --no-python tpcompiler run out --compiled --inputs in.safetensors
    """
    with progress(f"reading {directory}", quiet=json) as show_step:
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import WrittenPackage

        show_step("compiling and checking")
        made, comparison = open(directory, trust).package(
            threads=threads, check=not no_check, checkpoint=checkpoint, processes=processes
        )
    is_right = comparison is None or comparison.ok
    file = directory / "compiled.pt2"
    models, on = sum(map(len, made.models.values())), made.device_type
    how = f"{threads} thread{'s' * (threads != 1)} a rank" if on == "cpu" else made.capability[0]
    wrote = f"wrote {file}: {models} model{'s' * (models != 1)}, torch {made.torch}, {on}, {how}"
    verdict = str(comparison or "its numbers were not compared with the model's (--no-check)").splitlines()
    answer = WrittenPackage(**asdict(made), out=str(file) if is_right else None, report=comparison)
    printing.print_answer(json, answer, [*([wrote] if is_right else []), *verdict])
    if not is_right:
        typer.echo("the package is not right, and was deleted", err=True)
        raise typer.Exit(NOT_EQUAL)


@app.command()
def run(
    directory: Artifact,
    inputs: Annotated[
        Path, typer.Option("--inputs", metavar="FILE", help="Inputs, or prompts, as safetensors, by name.")
    ],
    outputs: Annotated[
        Path | None, typer.Option("--outputs", "-o", metavar="FILE", help="Write the outputs as safetensors, by name.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", metavar="N", help="Generate N tokens per row with a prefill and a decode program.", min=1
        ),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--not-compiled",
            help="Run the package, which is machine code. Default: only with --trust.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        Literal["nccl", "gloo"] | None,
        typer.Option("--backend", help="Backend of the process group. Default: NCCL on GPUs.", show_default=False),
    ] = None,
    same_bits: Annotated[
        bool, typer.Option("--same-bits", help="Give the same bits on any number of processes that divides the ranks.")
    ] = False,
    count: Annotated[
        bool, typer.Option("--count", help="Compare the collectives called with those of the files. No package.")
    ] = False,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run an artifact under torchrun, one process per rank.

    Each rank takes its shares of the inputs; rank 0 prints the whole outputs. With --tokens: greedy generation from
    `input_ids` (of an encoder's model, from its inputs and `decoder_input_ids`), for models of `export
    --prefill-decode`. With --count: exits with 1 if ranks called other collectives.

    \b
    Example:
      torchrun --nproc-per-node 2 -m tpcompiler.cli run out --inputs in.safetensors
      torchrun --nproc-per-node 2 --no-python tpcompiler run out --inputs in.safetensors --outputs out.safetensors
      torchrun --nproc-per-node 2 --no-python tpcompiler run chat --inputs prompt.safetensors --tokens 16
    """
    if count and compiled:
        raise typer.BadParameter("a package is machine code, whose calls are not seen", param_hint="--count")
    if same_bits and count:
        raise typer.BadParameter("it counts the collectives of ranks: leave --count out", param_hint="--same-bits")
    if count and tokens is not None:
        raise typer.BadParameter("it is for one call: leave --tokens out", param_hint="--count")
    others = os.environ.get("RANK", "0") != "0"  # one of the ranks shows progress
    with progress(f"reading {directory}", quiet=json or others) as show_step:
        import torch
        import torch.distributed as dist

        from tpcompiler.checkpoint.load import load
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import GeneratedTokens, Returned
        from tpcompiler.cli.boundary import cut_inputs, join_outputs
        from tpcompiler.runtime.artifact import programs_in
        from tpcompiler.runtime.inputs import read_tensors, write_tensors
        from tpcompiler.runtime.program_files import open_program, open_programs
        from tpcompiler.runtime.run import generate, run_file, summarize

        several = open_programs(directory, trust=trust) if programs_in(directory) else {}
        is_cut = any(each.manifest.stage for each in several.values())
        if is_cut and (count or tokens is not None or compiled):
            hint = "--count" if count else "--tokens / --compiled"
            raise typer.BadParameter("the program is cut into stages", param_hint=hint)
        if tokens is None and not is_cut:
            stored = open_program(directory, trust=trust)
            manifest = stored.manifest
        elif not is_cut and not {"prefill", "decode"} <= set(programs_in(directory)):
            raise ArtifactError(
                f"{directory} has no programs called prefill and decode",
                help="export with --prefill-decode, and convert its files together",
            )
        if outputs is not None and not os.path.isdir(outputs.parent):
            raise ArtifactError(f"cannot write {outputs}: {outputs.parent} is not a directory", help="make it first")
        compiled = False if count else compiled
        given = read_tensors(inputs)  # before the minutes that follow
        show_step(f"loading {directory}")
        module: Any = load(directory, trust=trust, compiled=compiled, backend=backend, same_bits=same_bits)
        show_step("running")
        if tokens is not None:
            named = {"tokens": torch.stack(list(generate(module, given, tokens, str(inputs))), 1).cpu()}
        elif is_cut:
            named = module.call_named(given, str(inputs))
        else:
            with contextlib.ExitStack() as stack:
                if count:
                    from tpcompiler.artifact.stored import StoredProgram
                    from tpcompiler.report.measured import WatchedCollectives, compare_counts, counts_table

                    calls = stack.enter_context(WatchedCollectives()).calls
                shares = cut_inputs(given, manifest, dist.get_rank(), str(inputs), dist.get_world_size())
                named = run_file(module, manifest, inputs, shares)
            named = join_outputs(named, manifest)
    agrees = True
    if dist.get_rank() == 0:
        rows = compare_counts(StoredProgram(stored), calls, given) if count else None
        agrees = all(row.agrees for row in rows or ())
        if outputs is not None:
            write_tensors(outputs, named)
        out = str(outputs) if outputs else None
        answer: Returned | GeneratedTokens
        parts: list[Part]
        if tokens is None:
            found = summarize(named)
            answer = Returned(outputs=found, counts=rows, out=out)
            parts = [printing.outputs_table(found), *([] if rows is None else [counts_table(rows)])]
        else:
            answer = GeneratedTokens(tokens=named["tokens"].tolist(), out=out)
            parts = [" ".join(map(str, row)) for row in answer.tokens]
        printing.print_answer(json, answer, parts)
    dist.destroy_process_group()  # NCCL requires it
    if not agrees:
        report("the ranks called other collectives than the files record")
        raise typer.Exit(NOT_EQUAL)
