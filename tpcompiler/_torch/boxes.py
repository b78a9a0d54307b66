"""A rank's share of a tensor as boxes of the whole: torch.distributed.checkpoint asks tensors by private names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(NamedTuple):
    """Elements of a tensor: where they start in the whole, and the memory that holds them."""

    start: tuple[int, ...]
    held: torch.Tensor


class BoxedTensor(torch.Tensor):
    """A tensor whose boxes a rank holds some of. It has the shape of the whole, and no values outside the boxes."""

    boxes: Sequence[Box]

    @classmethod
    def of(cls, boxes: Sequence[Box], like: torch.Tensor, shape: Sequence[int]) -> BoxedTensor:
        made = like.new_zeros(()).expand(*shape).as_subclass(cls)
        made.boxes = boxes
        return made

    def __create_write_items__(self, fqn: str, whole: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(box.held), self.size()),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), box.held.size()) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(box.held for box in self.boxes if torch.Size(box.start) == index.offset)
