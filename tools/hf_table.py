"""Take Hugging Face architectures from a directory to a verified artifact, by the command line alone.

    python -m tools.hf_table [MODEL_TYPE ...] [--write]

Each is a small config with random weights (`tools/hf_models.py`), written by `save_pretrained`, exported, converted for
2 ranks with the plan of its own `config.json`, or with `--plan auto` where transformers has none, cut and verified.
`--write` puts the rows into docs/architectures.md, where those of other architectures stay as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_outputs
from typer.testing import CliRunner, Result

from tests.zoo.case import randomise
from tools.hf_models import ROWS, Row
from tools.measured import front_line, record
from tpcompiler import cli

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
UNKNOWN = "not measured"
LONGEST = 600  # seconds that one architecture may take, also on a busy machine
HEAD = """# Hugging Face architectures

{count} architectures of transformers were tried, from a directory to two ranks by the command line alone; {right} are
equal to the model on one device.

{line}

transformers is {transformers}. With the names of some architectures the tool leaves the other rows as they are.

Each is a config with one layer or two and random weights (`tools/hf_models.py`), written by `save_pretrained`. Then:

```
tpcompiler export DIR -o model.pt2
tpcompiler convert model.pt2 --tp 2 --plan DIR/config.json --checkpoint DIR -o out
tpcompiler verify out --checkpoint DIR
```

The plan is the config's own, or `--plan auto` where transformers has none. `export` is the line that the command
prints: which sizes of the inputs are dynamic, and which are fixed as in the example. A row that fails shows the step
and its error.

| architecture | kind | export | plan | result |
|---|---|---|---|---|
"""


def call(*words: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def build(row: Row, directory: Path) -> None:
    """Write a model of the architecture, as Hugging Face has them."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(row.model_type, **row.sizes)
    auto: Any = getattr(transformers, f"AutoModel{row.head}")
    model: Any = randomise(auto.from_config(config))
    model.save_pretrained(directory)


def measure(row: Row, directory: Path) -> tuple[str, str, str]:
    """Return (the sizes of the export, the plan, the result) of an architecture."""
    build(row, directory)
    model, out = directory / "model.pt2", directory / "out"
    made = call("export", directory, "-o", model)
    if made.exit_code:
        return "", "", f"export: {_error(made)}"
    sizes = made.stdout.splitlines()[-1]
    convert = ["convert", model, "--tp", 2, "--checkpoint", directory, "-o", out, "--plan"]
    plan, made = "config.json", call(*convert, directory / "config.json")
    if "brings no plan" in made.stderr:
        plan, made = "auto", call(*convert, "auto")
    if made.exit_code:
        return sizes, plan, f"convert: {_error(made)}"
    made = call("verify", out, "--checkpoint", directory)
    return sizes, plan, made.stdout.splitlines()[0] if made.stdout else f"verify: {_error(made)}"


def _error(result: Result) -> str:
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {(str(result.exception) or 'no text').splitlines()[0]}"
    lines = result.stderr.splitlines() or ["nothing"]
    return re.sub(r"/\S*/", "", lines[0])


def measure_apart(row: Row) -> tuple[str, str, str]:
    """Measure in a fork of this process, which has imported what it takes; it ends after LONGEST seconds."""
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe(duplex=False)

        def child() -> None:
            try:
                there.send(measure(row, Path(folder)))
            except Exception as error:  # whatever transformers raises
                there.send(("", "", f"build: {type(error).__name__}: {str(error).splitlines()[0]}"))

        process = fork.Process(target=child)
        process.start()
        found = here.recv() if here.poll(LONGEST) else ("", "", f"no end within {LONGEST} s")
        process.kill()
        process.join()
        return found


def table_rows(page: str) -> dict[str, str]:
    """Architecture -> its line of the page."""
    return {line.split("|")[1].strip(): line for line in page.splitlines() if re.match(r"\| [\w-]+ \| (?!kind)", line)}


def render(lines: dict[str, str]) -> str:
    """The page of these lines, in the order of `tools/hf_models.py`."""
    chosen = [lines.get(row.model_type, f"| {row.model_type} | {row.kind} |  |  | {UNKNOWN} |") for row in ROWS]
    measured, right = (sum(text in line for line in chosen) for text in ("|", "| equal"))
    measured -= sum(UNKNOWN in line for line in chosen)
    line = front_line(PAGE.name)
    head = HEAD.format(count=measured, right=right, line=line, transformers=transformers.__version__)
    return head + "\n".join(chosen) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", default=[row.model_type for row in ROWS])
    parser.add_argument("--write", action="store_true", help="write docs/architectures.md")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    lines, right = table_rows(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}, True
    with tempfile.TemporaryDirectory() as folder:
        measure(ROWS[0], Path(folder))  # so that this process has imported what its forks need
    named = {row.model_type: row for row in ROWS}
    for row in (named[name] for name in asked.model_types):
        cells = [row.model_type, row.kind, *(text.replace("|", "\\|") for text in measure_apart(row))]
        right &= cells[-1].startswith("equal")
        lines[row.model_type] = f"| {' | '.join(cells)} |"
        print(lines[row.model_type], flush=True)
        if asked.write:
            record(PAGE.name, [row.model_type])
            PAGE.write_text(render(lines), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
