"""The command that runs the ranks of a set, `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpcompiler.cli.options import Artifact, Json, Trust, app


@app.command("generate")
def generate_tokens(
    directory: Artifact,
    inputs: Annotated[Path, typer.Option("--inputs", metavar="FILE", help="The prompts as safetensors, by name.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="How many to generate.", min=1)] = 16,
    outputs: Annotated[
        Path | None, typer.Option("--outputs", metavar="FILE", help="Write them as safetensors, as `tokens`.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Run the package, which is machine code.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Generate tokens under torchrun, the most likely one at each step.

    Of an artifact that `export --prefill-decode` began. The file has `input_ids`; with an encoder its inputs, and
    `decoder_input_ids` to begin with. Rank 0 prints a line of tokens for each row.

    \b
    Example:
      torchrun --nproc-per-node 2 --no-python tpcompiler generate chat --inputs prompt.safetensors --tokens 16
    """
    import torch
    import torch.distributed as dist

    from tpcompiler.cli import printing
    from tpcompiler.errors import ArtifactError
    from tpcompiler.runtime.artifact import programs_in
    from tpcompiler.runtime.generate import generate
    from tpcompiler.runtime.inputs import read_tensors, write_tensors
    from tpcompiler.runtime.load import load

    if not {"prefill", "decode"} <= set(programs_in(directory)):
        raise ArtifactError(
            f"{directory} has no programs called prefill and decode",
            help="export with --prefill-decode, and convert its files together",
        )
    if outputs is not None and not outputs.parent.is_dir():
        raise ArtifactError(f"cannot write {outputs}: {outputs.parent} is no directory", help="make it first")
    programs = load(directory, trust=trust, compiled=compiled)
    steps = torch.stack(list(generate(programs, read_tensors(inputs), tokens, str(inputs))), 1).cpu()
    if dist.get_rank() == 0:
        if outputs is not None:
            write_tensors(outputs, {"tokens": steps})
        if json:
            from tpcompiler.cli.answers import GeneratedTokens

            printing.print_json(GeneratedTokens(tokens=steps.tolist(), out=str(outputs) if outputs else None))
        else:
            for row in steps.tolist():
                typer.echo(" ".join(map(str, row)))
    dist.destroy_process_group()
