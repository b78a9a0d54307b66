"""Commands that move weights: `export` leaves them out, `cut` and `reshard` write them for ranks or one device."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Annotated

import typer

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import Artifact, Force, Json, MeshOption, RequiredCheckpoint, Tp, Trust, app, read_mesh
from tpcompiler.errors import ArtifactError, explaining
from tpcompiler.runtime.hub import refuse_missing_config

M_MMAP_THRESHOLD, MIB = -3, 1 << 20


def return_freed_tensors() -> None:
    """Let this process return every block of a MiB or more to the system as soon as it is freed.

    For commands that stream weights. After glibc has freed a block of up to 32 MiB, it takes blocks of that size from
    its heap, where any small object above a block keeps it resident: most of a model that is streamed would stay.
    Commands that run a model are faster without this. Does nothing with other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)


def _model_source(text: str) -> str:
    if ":" not in text:
        refuse_missing_config(text)
    return text


IgnoreUnused = Annotated[
    bool, typer.Option("--ignore-unused", help="Ignore checkpoint tensors that the program does not use.")
]


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|module:factory", parser=_model_source, help="A Hugging Face directory, or your own function."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="MODEL.pt2", help="The file to write.")],
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Batch size of the example.", min=1)] = 2,
    length: Annotated[int, typer.Option("--length", metavar="N", help="Tokens per row of the example.", min=1)] = 16,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="Default: the config's.")] = None,
    static: Annotated[bool, typer.Option("--static", help="Make all sizes static, as in the example.")] = False,
    prefill_decode: Annotated[
        bool,
        typer.Option(
            "--prefill-decode",
            help="Write prefill.pt2, decode.pt2 (and encoder.pt2) that share a cache into the directory MODEL.pt2.",
        ),
    ] = False,
    max_length: Annotated[
        int, typer.Option("--max-length", metavar="N", help="Tokens per row that this cache can hold.", min=3)
    ] = 512,
    training: Annotated[
        bool, typer.Option("--training", help="Export the model's loss with the gradients of all parameters.")
    ] = False,
    json: Json = False,
) -> None:
    """Export a model without its weights.

    For a Hugging Face directory only the config is read. Prints the dynamic sizes. Convert the file, then cut the
    ranks' weights out of the checkpoint.

    \b
    Example:
      tpcompiler export checkpoint -o model.pt2
      tpcompiler convert model.pt2 --tp 2 --plan checkpoint/config.json --checkpoint checkpoint -o out
      tpcompiler export models:build -o model.pt2
      tpcompiler export checkpoint --training --batch 8 -o training.pt2
      tpcompiler export checkpoint --prefill-decode --batch 1 --max-length 512 -o models
      tpcompiler convert models/prefill.pt2 models/decode.pt2 --tp 2 --plan checkpoint/config.json -o out
    """
    if prefill_decode and training:
        raise typer.BadParameter("leave it out with --prefill-decode", param_hint="--training")
    sizes = ""
    with progress(f"exporting {source}", quiet=json):
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import ExportedFiles
        from tpcompiler.frontend.exporting import export_prefill_and_decode, export_without_weights
        from tpcompiler.runtime.target import in_place_of, replacing
        from tpcompiler.runtime.weightless import save_weightless, weightless_names

        if prefill_decode:
            if os.path.lexists(out):
                raise ArtifactError(f"{out} exists already", help="choose another directory")
            made = export_prefill_and_decode(source, batch=batch, length=length, max_length=max_length, dtype=dtype)
            with in_place_of(out, force=False) as folder:
                for name, each in made.items():
                    save_weightless(each.program, folder / f"{name}.pt2")
            program, files = made["decode"].program, [out / f"{name}.pt2" for name in made]
            sizes = "\n".join(f"{name}: {each.sizes}" for name, each in made.items() if each.sizes)
        else:
            program, sizes = export_without_weights(
                source, batch=batch, length=length, dtype=dtype, static=static, training=training
            )
            if training:
                from tpcompiler.api.training import add_gradients  # it reads the rules, which an export does not need

                program = add_gradients(program, None if ":" in source and not os.path.exists(source) else "loss")
            files = [out]
            problem, help = f"cannot write {out}", "check the path and the free space"
            with explaining(problem, help, OSError, RuntimeError), replacing(out) as file:
                save_weightless(program, file)
    names = weightless_names(program)
    wrote = f"wrote {' and '.join(map(str, files))}"
    lines = [f"{wrote}: the program without its {len(names)} weights (convert --checkpoint adds them)"]
    answer = ExportedFiles(out=list(map(str, files)), weights=sorted(names), sizes=sizes)
    printing.print_answer(json, answer, [*lines, *sizes.splitlines()])


@app.command()
def cut(
    directory: Artifact,
    checkpoint: RequiredCheckpoint,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="N,..", help="Only these ranks, such as one machine's: 0,1.")
    ] = None,
    ignore_unused: IgnoreUnused = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Cut the ranks' weights out of a checkpoint.

    Fills an artifact that was converted without weights, one tensor at a time; an interrupted cut resumes.

    \b
    Example:
      tpcompiler cut out --checkpoint checkpoint
      tpcompiler cut out --checkpoint checkpoint --ranks 0,1
    """
    words = [word.strip() for word in ranks.split(",")] if ranks is not None else []
    if not all(word.isascii() and word.isdecimal() and len(word) < 9 for word in words):
        raise typer.BadParameter("give numbers, such as 0,1", param_hint="--ranks")
    with progress(f"reading {checkpoint}", quiet=json):
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import CutWeights

        return_freed_tensors()
        only = [int(word) for word in words] if words else None
        open(directory).cut(checkpoint, only, partial=ignore_unused, force=force)
    whose = "all ranks" if not words else f"rank {', '.join(words)}"
    answer = CutWeights(out=str(directory), ranks=only)
    printing.print_answer(json, answer, [f"wrote the weights of {whose} into {directory}"])


@app.command("reshard")
def reshard_artifact(
    directory: Artifact,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The directory, or file, to write.")],
    tp: Tp = None,
    mesh: MeshOption = None,
    single_device: Annotated[
        bool, typer.Option("--single-device", help="Write the single-device model, a .pt2 file, instead.")
    ] = False,
    safetensors: Annotated[
        bool, typer.Option("--safetensors", help="Write only the single-device weights, as a checkpoint, instead.")
    ] = False,
    force: Force = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Write an artifact for other ranks or one device.

    Needs only the artifact, with weights. The plan stays, and the weights are the same bits, read one tensor at a time.

    \b
    Example:
      tpcompiler reshard out --tp 8 -o out8
      tpcompiler reshard out --single-device -o model.pt2
      tpcompiler reshard out --safetensors -o model.safetensors
    """
    is_merged = single_device or safetensors
    if is_merged and (tp, mesh) != (None, None):
        raise typer.BadParameter("leave --tp and --mesh out: one device has no mesh", param_hint="--single-device")
    with progress(f"reading {directory}", quiet=json):
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import ReshardedArtifact, WrittenFile

        return_freed_tensors()
        answer: WrittenFile | ReshardedArtifact
        if is_merged:
            open(directory, trust).merge(out, safetensors=safetensors)
            text, answer = f"wrote {out}", WrittenFile(out=str(out))
        else:
            over = read_mesh(tp, mesh)
            open(directory, trust).reshard(over, out, force=force)
            text = f"wrote {over.world_size} ranks to {out}"
            answer = ReshardedArtifact(out=str(out), mesh=dict(over.axes))
    printing.print_answer(json, answer, [text])
