"""Draw the README's picture: the pretrained MiniLM on two ranks.

    python tools/readme_picture.py

Writes docs/minilm.dot and, where graphviz is installed, docs/minilm.svg, which names the .dot that it was made from.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

import torch

import tpcompiler
from examples.minilm import HERE, SENTENCES, SentenceEncoder, checkpoint

DOCS = Path(__file__).parent.parent / "docs"


def dot_text() -> str:
    """The picture as .dot text, made afresh."""
    from transformers import AutoTokenizer

    model = SentenceEncoder()
    tokens = AutoTokenizer.from_pretrained(checkpoint())(SENTENCES, padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    program = tpcompiler.parallelize(torch.export.export(model, (), inputs), 2, HERE / "minilm.yaml")
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / "out")
        return tpcompiler.open(Path(folder) / "out").show(format="dot")


def stamp(dot: str) -> str:
    """The comment that ties an .svg to the .dot it shows."""
    return f"<!-- drawn from minilm.dot, SHA-256 {hashlib.sha256(dot.encode()).hexdigest()} -->\n"


def main() -> None:
    dot = dot_text()
    (DOCS / "minilm.dot").write_text(dot, encoding="utf-8")
    svg = subprocess.run(["dot", "-Tsvg"], input=dot, capture_output=True, text=True, check=True).stdout
    (DOCS / "minilm.svg").write_text(svg + stamp(dot), encoding="utf-8")


if __name__ == "__main__":
    main()
