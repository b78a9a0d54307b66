"""Small networks in styles of writing that published models have besides: einsum, unrolled steps, graphs, mixing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import BATCH, SEQUENCE, Case, Layers, noise, randomise, token_ids

VOCABULARY = 120


class EinsumLayer(nn.Module):
    """Heads are a dim of the weights, and every product is an einsum."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        of_heads = (width, heads, width // heads)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.zeros(of_heads)) for _ in range(3))
        self.wo = nn.Parameter(torch.zeros(heads, width // heads, width))
        self.w1, self.w2 = nn.Parameter(torch.zeros(width, inner)), nn.Parameter(torch.zeros(inner, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (torch.einsum("bsd,dhk->bshk", normed, w) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
        read = torch.einsum("bhst,bthk->bshk", scores.softmax(-1), v)
        x = x + torch.einsum("bshk,hkd->bsd", read, self.wo)
        inner = torch.einsum("bsd,df->bsf", self.norm2(x), self.w1)
        return x + torch.einsum("bsf,fd->bsd", F.gelu(inner), self.w2)


class EinsumTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 48)
        self.layers = nn.Sequential(*(EinsumLayer(48, 8, 96) for _ in range(2)))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bsd,vd->bsv", self.layers(self.table(input_ids)), self.table.weight)


EINSUM = Case(
    name="einsum_transformer",
    tested="contractions by einsum",
    build=lambda: randomise(EinsumTransformer()),
    inputs=token_ids(VOCABULARY),
    dims={"input_ids": {0: BATCH, 1: SEQUENCE}},
    plan={
        "table.weight": "S(0)",
        "**.wq": "S(1)",
        "**.wk": "S(1)",
        "**.wv": "S(1)",
        "**.wo": "S(0)",
        "**.w1": "S(1)",
        "**.w2": "S(0)",
    },
    layers=(Layers("layers.*", 2, {"all_reduce": 2}),),
    outside={"all_reduce": 1, "all_gather": 1},  # the rows; the logits, by the boundary
    cut=0.99,  # 384 of 43,008 numbers whole: norms
)


class ConvAutoencoder(nn.Module):
    """Down by strided convolutions, up by transposed ones, beside what was kept on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down1, self.down2 = nn.Conv2d(16, 24, 3, 2, 1), nn.Conv2d(24, 40, 3, 2, 1)
        self.middle1, self.middle2 = nn.Conv2d(40, 80, 1), nn.Conv2d(80, 40, 1)
        self.up2 = nn.ConvTranspose2d(40, 24, 4, 2, 1)
        self.up1 = nn.ConvTranspose2d(24, 16, 4, 2, 1)
        self.join2, self.join1 = nn.Conv2d(48, 24, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 5, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x1 = F.relu(self.stem(pixel_values))
        x2 = F.relu(self.down1(x1))
        x3 = F.relu(self.down2(x2))
        x3 = F.relu(self.middle2(F.relu(self.middle1(x3))))
        x2 = F.relu(self.join2(torch.cat([self.up2(x3), x2], 1)))
        x1 = F.relu(self.join1(torch.cat([self.up1(x2), x1], 1)))
        return self.out(x1)  # type: ignore[no-any-return]


AUTOENCODER = Case(
    name="conv_u",
    build=lambda: randomise(ConvAutoencoder()),
    inputs=lambda batch, size: noise("pixel_values", batch, 3, size, size),
    dims={"pixel_values": {0: BATCH}},
    example=(2, 16),
    others=((3, 16), (1, 16)),
    plan={
        "stem": "colwise_gather_output",
        "down1": "colwise_gather_output",
        "down2": "colwise_gather_output",
        "middle1": "colwise",
        "middle2": "rowwise",
        "up2": "colwise_gather_output",
        "up1": "colwise_gather_output",
        "join2": "colwise_gather_output",
        "join1": "colwise",
        "out": "rowwise",
    },
    layers=(),
    # The middle, the output; the stem, both ways down, both up, the lower join.
    outside={"all_gather": 6, "all_reduce": 2},
    cut=0.99,  # 45 of 55,773 numbers whole: row-wise biases
    flops=0.99,
)


class GRU(nn.Module):
    """Its gates are layers of their own, and its steps are written out by the export."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(inside, width) for _ in range(3))
        self.states = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reset, update, new = (gate(x) for gate in self.inputs)
        state = torch.zeros(x.shape[0], reset.shape[-1])
        made = []
        for step in range(x.shape[1]):
            r = torch.sigmoid(reset[:, step] + self.states[0](state))
            z = torch.sigmoid(update[:, step] + self.states[1](state))
            n = torch.tanh(new[:, step] + r * self.states[2](state))
            state = (1 - z) * n + z * state
            made.append(state)
        return torch.stack(made, 1)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 24)
        self.gru = GRU(24, 40)
        self.out = nn.Linear(40, 11)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.table(input_ids)))  # type: ignore[no-any-return]


UNROLLED = Case(
    name="gru",
    build=lambda: randomise(Tagger()),
    inputs=token_ids(VOCABULARY),
    dims={"input_ids": {0: BATCH}},
    example=(2, 5),
    others=((3, 5), (1, 5)),
    plan={
        "table": "embedding_rowwise",
        "gru.inputs.*": "colwise",
        "gru.states.*": {"style": "colwise", "inputs": ["R"]},
        "out": "rowwise",
    },
    layers=(),
    # The rows, the tags; the state before each step but the first, whose state is zeros.
    outside={"all_reduce": 2, "all_gather": 4},
    cut=0.99,  # 11 of 11,251 numbers whole: a row-wise bias
    flops=0.99,
)


CASES = [EINSUM, AUTOENCODER, UNROLLED]
