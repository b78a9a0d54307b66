"""What each op allows: the notation, the registry, the one algorithm over factors, then one file per op family."""

from tpcompiler.rules import (
    attention,
    convolution,
    creation,
    einsum,
    embedding,
    indexing,
    matmul,
    norms,
    pointwise,
    pooling,
    reductions,
    resize,
    sorting,
    structure,
    vectors,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "creation",
    "einsum",
    "embedding",
    "indexing",
    "matmul",
    "norms",
    "pointwise",
    "pooling",
    "reductions",
    "resize",
    "sorting",
    "structure",
    "vectors",
    "views",
]
