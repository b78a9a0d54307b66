"""Encoders of text of BERT's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import Dim

from tests.zoo.build import transformer
from tests.zoo.case import BATCH, SEQUENCE, Case, Layers, token_ids
from tests.zoo.decoders import KEY_BIAS

VOCABULARY = 120
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TABLE = {"**.word_embeddings": "embedding_rowwise"}
MLP = {"**.intermediate.dense": "colwise", "**.layer.*.output.dense": "rowwise"}
LAYERS = {
    "**.self.query": "colwise",
    "**.self.key": "colwise",
    "**.self.value": "colwise",
    "**.attention.output.dense": "rowwise",
    **MLP,
}
POOLER = {"pooler.dense": "colwise_gather_output"}
EACH = {"all_reduce": 2}  # attention's output projection, the MLP's second layer
ROWS = {"all_reduce": 1}  # the table's rows
PLACES = Dim("sequence", max=64)  # as many as a table of positions has rows


class SentenceEncoder(torch.nn.Module):
    """The pretrained all-MiniLM-L6-v2 with its mean pooling, as the demo runs it."""

    def __init__(self) -> None:
        super().__init__()
        from examples.minilm import SentenceEncoder

        self.inner = SentenceEncoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids, attention_mask)


def masked(vocabulary: int) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Ids, of which the second half of the first sequence is no text."""

    def make(batch: int, sequence: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(batch, sequence, dtype=torch.int64)
        mask[0, sequence // 2 :] = 0
        return {**token_ids(vocabulary)(batch, sequence), "attention_mask": mask}

    return make


def masked_dims(sequence: Dim) -> dict[str, Any]:
    return {name: {0: BATCH, 1: sequence} for name in ("input_ids", "attention_mask")}


ANY_LENGTH, UP_TO_64 = masked_dims(SEQUENCE), masked_dims(PLACES)


def encoder(
    name: str,
    family: str,
    head: str,
    plan: Mapping[str, object],
    *,
    path: str = "encoder.layer.*",
    outside: Mapping[str, int],
    cut: float,
    sizes: Mapping[str, Any] = SIZES,
    different: Mapping[str, Any] | None = None,
    **stated: Any,
) -> Case:
    """A case of two layers of attention and MLP, with a mask; `different` is its configuration's own."""
    known: dict[str, Any] = {
        "inputs": masked(VOCABULARY),
        "dims": UP_TO_64,
        "layers": (Layers(path, 2, EACH),),
        "flops": 0.99,
        "inert": {"key.bias": KEY_BIAS},
    }
    return Case(
        name=name,
        build=transformer(family, head, {**sizes, **(different or {})}),
        plan=plan,
        outside=outside,
        cut=cut,
        **{**known, **stated},
    )


MINILM = Case(
    name="minilm",
    build=SentenceEncoder,
    inputs=masked(30522),
    dims=ANY_LENGTH,
    plan={**TABLE, **LAYERS},
    layers=(Layers("inner.bert.encoder.layer.*", 6, EACH),),
    outside=ROWS,  # the sentence vector is whole
    # All but 359,808 of 22,713,216 numbers: 197,376 of positions and types, 147,840 of the pooler, norms and biases.
    cut=0.98,
    inert={"key.bias": KEY_BIAS, "pooler.dense.weight": "a mean is taken instead", "pooler.dense.bias": "the same"},
    tested="real weights, a mask, a mean over what it leaves",
)

BERT = encoder(
    "bert",
    "Bert",
    "ForMaskedLM",
    # The head's inner layer comes before a norm over its features.
    {
        **TABLE,
        **LAYERS,
        "cls.predictions.transform.dense": "colwise_gather_output",
        "cls.predictions.decoder": "colwise_gather_output",
    },
    path="bert.encoder.layer.*",
    outside={"all_reduce": 1, "all_gather": 2},  # the rows; the head's inner layer, the logits
    # 5,248 of 75,128 numbers are whole: 4,224 of positions and types, six norms' 768, four row-wise biases' 256.
    cut=0.93,
)


ALBERT = encoder(
    "albert",
    "Albert",
    "Model",
    {
        **TABLE,
        "encoder.embedding_hidden_mapping_in": "colwise_gather_output",
        "**.query": "colwise",
        "**.key": "colwise",
        "**.value": "colwise",
        "**.attention.dense": "rowwise",
        "**.ffn": "colwise",
        "**.ffn_output": "rowwise",
        "pooler": "colwise_gather_output",
    },
    layers=(),  # one, run three times: torch counts its calls by "@1", "@2"
    outside={"all_reduce": 7, "all_gather": 2},  # the rows and twice for each run; the wider vectors, the pooler
    different={"embedding_size": 48, "num_hidden_layers": 3},
    cut=0.92,  # 3,648 of 45,664 whole: 66 rows of 48 for positions and types, norms 352, row-wise biases 128
)


def _boxes(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Ids and where each stands on the page: left and upper edge in the first half, right and lower in the second."""
    generator = torch.Generator().manual_seed(batch * 1000 + sequence)
    bbox = torch.randint(0, 16, (batch, sequence, 4), generator=generator)
    return {**masked(VOCABULARY)(batch, sequence), "bbox": bbox + torch.tensor([0, 0, 16, 16])}


LAYOUTLM = encoder(
    "layoutlm",
    "LayoutLM",
    "Model",
    {**TABLE, **{f"**.{d}_position_embeddings": "embedding_rowwise" for d in "xyhw"}, **LAYERS, **POOLER},
    inputs=_boxes,
    dims={**UP_TO_64, "bbox": {0: BATCH, 1: PLACES}},
    outside={"all_reduce": 1, "all_gather": 1},  # the rows of words, places, heights and widths as one sum
    different={"max_2d_position_embeddings": 32},
    cut=0.93,  # 5,120 of 83,072 whole: 4,224 of positions and types, norms 640, row-wise biases 256
)


CASES = [MINILM, BERT, ALBERT, LAYOUTLM]
