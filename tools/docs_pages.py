"""What the site shows of files that lie elsewhere: `mkdocs` calls this (`hooks` in mkdocs.yml)."""

from __future__ import annotations

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
