"""Take Hugging Face architectures from a directory to a verified artifact, by the command line alone.

    python -m tools.hf_table [MODEL_TYPE ...] [--write] [--ranks]

Each is a small config with random weights (`tools/hf_models.py`), written by `save_pretrained`, exported, converted for
2 ranks with the plan of its own `config.json`, or with `--plan auto` where transformers has none, cut and verified.
With `--ranks` two processes run it too: they generate where the model does, and the tokens are compared with those of
transformers; otherwise the outputs are. `--write` puts the rows into docs/architectures.md, where those of other
architectures stay as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_outputs
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from tests.zoo.case import randomise
from tools.hf_models import ROWS, Row
from tools.measured import measured_line
from tpcompiler import __version__, cli
from tpcompiler.runtime.model_file import read_model

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
UNKNOWN, MARK = "not measured", "## On two running ranks"
EQUAL = re.compile(r"^equal: .*?(max rel err \S+).*")  # one of its numbers is enough
LONGEST = 600  # seconds that one architecture may take, also on a busy machine
TOKENS, ROOM = 18, 48
GENERATE = {"decoder", "mixture of experts", "encoder-decoder", "speech to text", "state space"}
ON_RANKS = (
    *("llama", "qwen3", "gpt2", "mixtral", "deepseek_v3", "bert", "electra", "t5", "bart", "marian", "whisper"),
    *("speech_to_text", "vit", "dinov2", "clip", "siglip", "wav2vec2", "mamba", "falcon_mamba", "paligemma"),
)
HEAD = """# Hugging Face architectures

{count} architectures of transformers were converted from a directory to two ranks, with the command line alone. {right}
of them are equal to the model on one device.

{line}

transformers is {transformers}.

Each architecture is a config with one or two layers and random weights (`tools/hf_models.py`), written by
`save_pretrained`. Then:

```
tpcompiler export DIR -o model.pt2
tpcompiler convert model.pt2 --tp 2 --plan DIR/config.json --checkpoint DIR -o out
tpcompiler verify out --checkpoint DIR
```

The plan is the config's own, or `--plan auto` if transformers has none. The column `export` has the sizes of inputs
that are dynamic, or fixed as in the example. A row that fails shows the step and its error.

| architecture | kind | export | plan | result |
|---|---|---|---|---|
"""

RANKS_HEAD = """
## On two running ranks

{count} architectures of {kinds} kinds were also run, {right} of them with transformers' own results, last on {day} with
tpcompiler {own}, transformers {transformers} and torch {torch}: `python -m tools.hf_table --ranks --write`. Two
gloo processes, started by torchrun, run the artifact of these commands. Models that generate are exported as one set:

```
tpcompiler export DIR --prefill-decode --batch 2 --max-length 48 -o models
tpcompiler convert models/*.pt2 --tp 2 --plan DIR/config.json --checkpoint DIR -o out        # or --plan auto
tpcompiler verify out/prefill --checkpoint DIR                                               # and each other program
torchrun --nproc-per-node 2 --no-python tpcompiler run out --inputs prompt.safetensors --tokens 18
```

Their tokens are compared with those of transformers' greedy `generate` on one device. Other models are run by
`tpcompiler run`, and their outputs are compared with the model's.

| architecture | kind | programs | plan | two ranks |
|---|---|---|---|---|
"""


def call(*words: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def build(row: Row, directory: Path, *, loud: bool = False) -> None:
    """Write a model of the architecture, as Hugging Face has them.

    Args:
        loud: multiply matrices by 4, but for the tokens' embeddings: a decoder that only repeats its last token, as
            one with small weights and tied embeddings does, says little.
    """
    torch.manual_seed(0)
    model: Any = randomise(_auto(row).from_config(row.config()))
    embeddings = {id(model.get_input_embeddings().weight)} if loud else set()
    for value in model.parameters() if loud else ():
        if value.ndim > 1 and id(value) not in embeddings:
            value.data *= 4
    model.save_pretrained(directory)


def _auto(row: Row) -> Any:
    return getattr(transformers, f"AutoModel{row.head}")


def measure(row: Row, directory: Path) -> tuple[str, str, str]:
    """Return (the sizes of the export, the plan, the result) of an architecture."""
    build(row, directory)
    model, out = directory / "model.pt2", directory / "out"
    made = call("export", directory, "-o", model)
    if made.exit_code:
        return "", "", f"export: {_error(made)}"
    sizes = made.stdout.splitlines()[-1]
    plan, made = _convert([model], directory, out)
    if made.exit_code:
        return sizes, plan, f"convert: {_error(made)}"
    made = call("verify", out, "--checkpoint", directory)
    said = made.stdout.splitlines()[0] if made.stdout else f"verify: {_error(made)}"
    return sizes, plan, EQUAL.sub(r"equal: \1", said)


def _convert(models: list[Path], directory: Path, out: Path) -> tuple[str, Result]:
    """Convert with the plan of config.json, or with `auto` where it has none; the plan, and how it ended."""
    convert = ["convert", *models, "--tp", 2, "--checkpoint", directory, "-o", out, "--plan"]
    made = call(*convert, directory / "config.json")
    return ("auto", call(*convert, "auto")) if "brings no plan" in made.stderr else ("config.json", made)


def measure_ranks(row: Row, directory: Path) -> tuple[str, str, str]:
    """Return (the programs, the plan, the result of two processes, or of a command that fails) of an architecture."""
    generates, models, out = row.kind in GENERATE, directory / "models", directory / "out"
    build(row, directory, loud=generates)
    made = call("export", directory, "-o", models, *("--prefill-decode", "--max-length", ROOM) * generates)
    if made.exit_code:
        return "", "", f"export: {_error(made)}"
    files = sorted(models.glob("*.pt2")) or [models]
    names = [file.stem for file in files if file != models]
    plan, made = _convert(files, directory, out)
    programs = ", ".join(names) or "model"
    if made.exit_code:
        return programs, plan, f"convert: {_error(made)}"
    verified = [call("verify", out / name, "--checkpoint", directory) for name in names or [""]]
    if wrong := [each for each in verified if each.exit_code or not each.stdout.startswith("equal")]:
        return programs, plan, f"verify: {_error(wrong[0])}"
    inputs = example_of(next((file for file in files if file.stem == "encoder"), files[-1]), generates)
    return programs, plan, (check_tokens if names else check_outputs)(row, directory, out, inputs)


def example_of(file: Path, generates: bool) -> dict[str, torch.Tensor]:
    """The inputs of the first program's example; for text that is continued, 9 tokens, of which a source pads 3."""
    examples = read_model(file).example_inputs
    assert examples is not None
    inputs: dict[str, torch.Tensor] = {name: value.clone() for name, value in examples[1].items()}
    texts = {
        "input_ids": torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(3)),
        "attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3]),
    }
    if not generates:
        return inputs
    return {name: texts.get(name, value) for name, value in inputs.items() if name != "cache_position"}


def torchrun(out: Path, *words: object) -> str:
    """Run a command of tpcompiler as two processes; the last line of its error, or nothing."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tpcompiler.cli"]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *map(str, words)], capture_output=True, text=True, timeout=LONGEST, env=environment)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines or ["no text"])[0]


def _written(command: str, out: Path, inputs: dict[str, torch.Tensor], *words: object) -> dict[str, torch.Tensor] | str:
    """The tensors that two ranks write for these inputs, or their error."""
    save_file(inputs, out.parent / "in.safetensors")
    found = out.parent / "found.safetensors"
    error = torchrun(out, command, out, "--inputs", out.parent / "in.safetensors", "--outputs", found, *words)
    return error or load_file(found)


def check_tokens(row: Row, directory: Path, out: Path, inputs: dict[str, torch.Tensor]) -> str:
    """Compare the tokens that two ranks generate with those of transformers on one device."""
    model = _auto(row).from_pretrained(directory).eval()
    prompt, given = "input_ids", dict[str, torch.Tensor]()
    if "input_ids" in inputs:
        given["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if model.config.is_encoder_decoder:
        prompt, inputs = "decoder_input_ids", {**inputs, "decoder_input_ids": torch.tensor([[1], [1]])}
    made = _written("run", out, inputs, "--tokens", TOKENS)
    if isinstance(made, str):
        return f"generate: {made}"
    # Not the settings of a kind of model, such as a last token that must be an end.
    generate: Any = transformers.GenerationMixin.generate
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, decoder_start_token_id=1, max_new_tokens=TOKENS, do_sample=False
    )
    wanted = generate(model, **{**given, **inputs})[:, inputs[prompt].shape[1] :]
    if not torch.equal(made["tokens"], wanted):
        return "NOT the tokens of transformers"
    return f"{TOKENS} tokens a row as transformers: {len(wanted.unique())} different ones"


def check_outputs(row: Row, directory: Path, out: Path, inputs: dict[str, torch.Tensor]) -> str:
    """Compare the outputs of two ranks with those of transformers on one device."""
    made = _written("run", out, inputs)
    if isinstance(made, str):
        return f"run: {made}"
    with torch.no_grad():
        wanted = _auto(row).from_pretrained(directory).eval()(**inputs)
    errors = {name: (made[name] - wanted[name]).abs().max().item() for name in made if name in wanted}
    close = all(torch.allclose(made[name], wanted[name], rtol=1e-4, atol=1e-5) for name in errors)
    name, error = next(iter(errors.items()))
    return f"outputs as transformers: max abs err {error:.2g} of {name}" if close else "NOT the outputs of transformers"


def _error(result: Result) -> str:
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {(str(result.exception) or 'no text').splitlines()[0]}"
    lines = result.stderr.splitlines() or ["nothing"]
    return re.sub(r"/\S*/", "", lines[0])


def measure_apart(row: Row, measure: Callable[[Row, Path], tuple[str, str, str]]) -> tuple[str, str, str]:
    """Measure in a fork of this process, which has imported what it takes; it ends after LONGEST seconds."""
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe(duplex=False)

        def child() -> None:
            try:
                there.send(measure(row, Path(folder)))
            except Exception as error:  # whatever transformers raises
                there.send(("", "", f"build: {type(error).__name__}: {(str(error) or 'no text').splitlines()[0]}"))

        process = fork.Process(target=child)
        process.start()
        found: tuple[str, str, str] = here.recv() if here.poll(LONGEST) else ("", "", f"no end within {LONGEST} s")
        process.kill()
        process.join()
        return found


def table_rows(page: str, *, ranks: bool = False) -> dict[str, str]:
    """Architecture -> its line in the page's first table, or in that of running ranks."""
    part = page.partition(MARK)[2 if ranks else 0]
    return {line.split("|")[1].strip(): line for line in part.splitlines() if re.match(r"\| [\w-]+ \| (?!kind)", line)}


def render(lines: dict[str, str]) -> str:
    """The first part of the page, of these lines, in the order of `tools/hf_models.py`."""
    chosen = [lines.get(row.model_type, f"| {row.model_type} | {row.kind} |  |  | {UNKNOWN} |") for row in ROWS]
    measured, right = (sum(text in line for line in chosen) for text in ("|", "| equal"))
    measured -= sum(UNKNOWN in line for line in chosen)
    line = measured_line("python -m tools.hf_table --write")
    head = HEAD.format(count=measured, right=right, line=line, transformers=transformers.__version__)
    return head + "\n".join(chosen) + "\n"


def render_ranks(lines: dict[str, str]) -> str:
    """The second part, of those that were run."""
    chosen = [lines[name] for name in ON_RANKS if name in lines]
    kinds, right = {line.split("|")[2] for line in chosen}, sum("as transformers" in line for line in chosen)
    versions = {"own": __version__, "torch": torch.__version__.partition("+")[0]}
    versions |= {"transformers": transformers.__version__, "day": str(date.today())}
    head = RANKS_HEAD.format(count=len(chosen), kinds=len(kinds), right=right, **versions)
    return head + "\n".join(chosen) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--write", action="store_true", help="write docs/architectures.md")
    parser.add_argument("--ranks", action="store_true", help="run two processes, and compare with transformers")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    page, right = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", True
    first, mark, second = page.partition(f"\n{MARK}")
    second, lines = mark + second, table_rows(page, ranks=asked.ranks)
    with tempfile.TemporaryDirectory() as folder:
        measure(ROWS[0], Path(folder))  # so that this process has imported what its forks need
    named = {row.model_type: row for row in ROWS}
    for name in asked.model_types or (ON_RANKS if asked.ranks else named):
        row = named[name]
        found = measure_apart(row, measure_ranks if asked.ranks else measure)
        cells = [row.model_type, row.kind, *(text.replace("|", "\\|") for text in found)]
        right &= cells[-1].startswith("equal") or "as transformers" in cells[-1]
        lines[name] = f"| {' | '.join(cells)} |"
        print(lines[name], flush=True)
        if asked.write:
            text = first + render_ranks(lines) if asked.ranks else render(lines) + second
            PAGE.write_text(text, encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
