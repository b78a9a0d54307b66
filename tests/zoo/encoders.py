"""Encoders of text."""

from __future__ import annotations

import torch

from tests.zoo.case import BATCH, SEQUENCE, Case, Layers, token_ids
from tests.zoo.decoders import KEY_BIAS


class SentenceEncoder(torch.nn.Module):
    """The pretrained all-MiniLM-L6-v2 with its mean pooling, as the demo runs it."""

    def __init__(self) -> None:
        super().__init__()
        from examples.minilm import SentenceEncoder

        self.inner = SentenceEncoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids, attention_mask)


def _masked(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    made = token_ids(30522)(batch, sequence)
    mask = torch.ones(batch, sequence, dtype=torch.int64)
    mask[0, sequence // 2 :] = 0
    return {**made, "attention_mask": mask}


MINILM = Case(
    name="minilm",
    build=SentenceEncoder,
    inputs=_masked,
    tested="real weights, a mask, a mean over what it leaves",
    dims={"input_ids": {0: BATCH, 1: SEQUENCE}, "attention_mask": {0: BATCH, 1: SEQUENCE}},
    plan={
        "**.word_embeddings": "embedding_rowwise",
        "**.self.query": "colwise",
        "**.self.key": "colwise",
        "**.self.value": "colwise",
        "**.attention.output.dense": "rowwise",
        "**.intermediate.dense": "colwise",
        "**.layer.*.output.dense": "rowwise",
    },
    # Attention's output projection, the MLP's second layer.
    layers=(Layers("inner.bert.encoder.layer.*", 6, {"all_reduce": 2}),),
    outside={"all_reduce": 1},  # the table's rows; the sentence vector is whole
    # All but 359,808 of 22,713,216 numbers: 197,376 of positions and types, 147,840 of the pooler, norms and biases.
    cut=0.98,
    inert={"key.bias": KEY_BIAS, "pooler.dense.weight": "a mean is taken instead", "pooler.dense.bias": "the same"},
)

CASES = [MINILM]
