"""The commands from a checkpoint to an artifact: `export` without weights, `cut` the ranks' out of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tpcompiler.cli.bars import progress
from tpcompiler.cli.memory import return_freed_tensors
from tpcompiler.cli.options import Artifact, Json, MeshOption, Tp, Trust, app, read_mesh
from tpcompiler.errors import ArtifactError, reason

Checkpoint = Annotated[
    Path, typer.Option("--checkpoint", metavar="DIR", help="The model's *.safetensors files, as Hugging Face has them.")
]
Partial = Annotated[bool, typer.Option("--partial", help="Ignore checkpoint tensors that the program does not use.")]


@app.command()
def export(
    source: Annotated[
        str, typer.Argument(metavar="DIR|module:factory", help="A Hugging Face directory, or a function of your own.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="MODEL.pt2", help="The file to write.")],
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Rows of the example.", min=1)] = 2,
    length: Annotated[int, typer.Option("--length", metavar="N", help="Tokens of the example.", min=1)] = 16,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="By default the config's.")] = None,
    static: Annotated[bool, typer.Option("--static", help="Fix all sizes as in the example.")] = False,
    prefill_decode: Annotated[
        bool,
        typer.Option(
            "--prefill-decode",
            help="Write OUT/prefill.pt2 and OUT/decode.pt2 (and OUT/encoder.pt2), over one cache, for one batch.",
        ),
    ] = False,
    max_length: Annotated[
        int, typer.Option("--max-length", metavar="N", help="Tokens that this cache has room for.", min=3)
    ] = 512,
    json: Json = False,
) -> None:
    """Export a model without its weights.

    Of a Hugging Face directory, with any kind of model, the config is read and no weights. Prints which sizes are
    dynamic. Convert the file as any other; then cut the ranks' weights out of the checkpoint.

    \b
    Example:
      tpcompiler export checkpoint -o model.pt2
      tpcompiler convert model.pt2 --tp 2 --plan checkpoint/config.json --checkpoint checkpoint -o out
      tpcompiler export models:build -o model.pt2
      tpcompiler export checkpoint --prefill-decode --batch 1 --max-length 512 -o models
      tpcompiler convert models/prefill.pt2 models/decode.pt2 --tp 2 --plan checkpoint/config.json -o out
    """
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
            program, sizes = export_without_weights(source, batch=batch, length=length, dtype=dtype, static=static)
            files = [out]
            try:
                with replacing(out) as file:
                    save_weightless(program, file)
            except (OSError, RuntimeError) as error:
                raise ArtifactError(
                    f"cannot write {out}: {reason(error)}", help="check the path and the free space"
                ) from error
    names = weightless_names(program)
    if json:
        printing.print_json(ExportedFiles(out=list(map(str, files)), weights=sorted(names), sizes=sizes))
    else:
        wrote = f"wrote {' and '.join(map(str, files))}"
        typer.echo(f"{wrote}: the program, without its {len(names)} weights (convert --checkpoint adds them)")
        if sizes:
            typer.echo(sizes)


@app.command()
def cut(
    directory: Artifact,
    checkpoint: Checkpoint,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="N,..", help="Of these ranks only: one machine's, such as 0,1.")
    ] = None,
    partial: Partial = False,
    force: Annotated[bool, typer.Option("--force", help="Write weights again, or begin another cut anew.")] = False,
    json: Json = False,
) -> None:
    """Cut the ranks' weights out of a checkpoint.

    Of an artifact that was converted without weights. One tensor is read at a time; an interrupted cut goes on.

    \b
    Example:
      tpcompiler cut out --checkpoint checkpoint
      tpcompiler cut out --checkpoint checkpoint --ranks 0,1
    """
    words = [word.strip() for word in ranks.split(",")] if ranks is not None else []
    if not all(word.isascii() and word.isdecimal() and len(word) < 9 for word in words):
        raise typer.BadParameter("give numbers, such as 0,1", param_hint="--ranks")
    with progress(f"reading {checkpoint}", quiet=json):
        from tpcompiler.checkpoint.cut import cut_checkpoint
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import CutWeights

        return_freed_tensors()
        only = [int(word) for word in words] if words else None
        cut_checkpoint(directory, checkpoint, only, partial=partial, force=force)
    if json:
        printing.print_json(CutWeights(out=str(directory), ranks=only))
    else:
        typer.echo(f"wrote the weights of {'all ranks' if not words else 'rank ' + ', '.join(words)} into {directory}")


@app.command("reshard")
def reshard_artifact(
    directory: Artifact,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The directory to write.")],
    tp: Tp = None,
    mesh: MeshOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier artifact at OUT.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Write an artifact for another number of ranks.

    By the same plan, from an artifact with weights alone; the weights are the same bits, and are read one tensor at a
    time.

    \b
    Example:
      tpcompiler reshard out --tp 8 -o out8
    """
    with progress(f"reading {directory}", quiet=json):
        from tpcompiler.api.elastic import reshard
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import ReshardedArtifact

        over = read_mesh(tp, mesh)
        return_freed_tensors()
        reshard(directory, over, out, force=force, trust=trust)
    if json:
        printing.print_json(ReshardedArtifact(out=str(out), mesh=dict(over.axes)))
    else:
        typer.echo(f"wrote {over.world_size} ranks to {out}")


@app.command("merge")
def merge_artifact(
    directory: Artifact,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The file to write.")],
    safetensors: Annotated[
        bool, typer.Option("--safetensors", help="Write the weights alone, by name, as a checkpoint has them.")
    ] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Write the single-device model that an artifact was made from.

    From an artifact with weights alone; they are the same bits. Or, with --safetensors, a checkpoint of them.

    \b
    Example:
      tpcompiler merge out -o model.pt2
      tpcompiler merge out --safetensors -o model.safetensors
    """
    with progress(f"putting {directory} together", quiet=json):
        from tpcompiler.api.elastic import merge
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import MergedModel

        return_freed_tensors()
        merge(directory, out, safetensors=safetensors, trust=trust)
    if json:
        printing.print_json(MergedModel(out=str(out)))
    else:
        typer.echo(f"wrote {out}")
