"""What each op allows: the notation, the registry, the one algorithm over factors, then one file per op family."""

from tpcompiler.rules import (
    attention,
    creation,
    embedding,
    indexing,
    matmul,
    norms,
    pointwise,
    pooling,
    reductions,
    sorting,
    structure,
    views,
)

__all__ = [
    "attention",
    "creation",
    "embedding",
    "indexing",
    "matmul",
    "norms",
    "pointwise",
    "pooling",
    "reductions",
    "sorting",
    "structure",
    "views",
]
