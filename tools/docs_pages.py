"""The pages of the site that are generated or lie elsewhere: `mkdocs` calls this (`hooks` in mkdocs.yml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "passes/README.md": "passes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
WRITERS = {
    "bad-input.md": ["tests.bad_input.table"],
    "json.md": ["tools.json_page"],
    "ops.md": ["tools.op_coverage", "page"],
}
GENERATED = [*WRITERS, "json-schema.json"]


def on_startup(*, command: str, dirty: bool) -> None:
    """Write the generated pages into docs/, before mkdocs looks for files."""
    for words in WRITERS.values():
        subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links as they are from the folder of the others, and the examples that they lead to."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, at in PAGES.items():
            text = text.replace(f"]({other})", f"]({at})")
        files.append(File.generated(config, page, content=text))
    for example in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{example.name}", abs_src_path=str(example)))
    return files
