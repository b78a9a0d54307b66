"""Run the stages of a program one after the other: each rank its own stage, with values from the ranks before it.

torch has no send or receive that a program's file could hold, so this is around the ranks' programs: a rank sends to
the rank with its number in the later stage. In the end all stages get the outputs, so that every rank returns the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpcompiler._torch import TreeSpec, tree_flatten, tree_unflatten, treespec_loads
from tpcompiler.errors import ArtifactError, InputsError, explaining
from tpcompiler.runtime.agree import agreeing, digest_of, named_failures
from tpcompiler.runtime.inputs import check_fixed, keywords_of, put_in_order
from tpcompiler.runtime.records import BoundaryRecord, Manifest, StageRecord
from tpcompiler.runtime.weights import dtype_of
from tpcompiler.runtime.world import destroy_at_exit

Buffers = dict[str, torch.Tensor]  # by name


class Pipeline(torch.nn.Module):
    """This rank's stage of a program, called as the whole program.

    With several micro-batches, a call takes so many batches along dim 0, and returns as many: a stage works on one
    while later stages work on those before it. Each has its own buffers.
    """

    def __init__(
        self,
        stages: Sequence[Manifest],
        module: torch.nn.Module,
        timeout: timedelta,
        buffers: Sequence[Buffers],
        check_inputs: bool = False,
    ) -> None:
        """Make the groups of the stages, on all ranks at the same time.

        Args:
            stages: the manifests of all stages, in order.
            buffers: those of each micro-batch, which programs of one model share.
            check_inputs: in the first call, compare the inputs of all stages.
        """
        super().__init__()
        records = [manifest.stage for manifest in stages if manifest.stage is not None]
        size, rank = stages[0].world_size, dist.get_rank()
        self.stage: StageRecord = records[rank // size]
        self.module, self.exported_program = module, module.exported_program
        self._stages, self._records, self._microbatches = stages, records, buffers
        self._takes, self._makes = map(_read_tree, (self.stage.takes, self.stage.makes))
        self._timeout, self._unchecked = timeout, check_inputs
        refuse_batches(self.stage, len(buffers))
        self._peers = [rank % size + size * stage for stage in range(len(stages))]
        groups = [[first + size * stage for stage in range(len(stages))] for first in range(size)]
        for ranks in groups:  # every rank makes every group, in the same order
            group = dist.new_group(ranks, timeout)
            if rank in ranks:
                self._group = group
                if dist.get_backend() != "nccl":
                    destroy_at_exit(group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self._named(args, kwargs)
        if self._unchecked:  # before a stage waits for another
            with agreeing(self._timeout, self._peers) as mine:
                mine.update({f"input {name!r}": _fact(value) for name, value in given.items()})
            self._unchecked = False
        rows = {row.name: row for stage in self._stages for row in stage.inputs if row.name in given}
        parts = cut_inputs(given, self.stage, [*rows.values()], len(self._microbatches))
        with torch.no_grad(), named_failures({"pp": [self._peers]}):
            sent: list[Any] = []
            made = []
            for number, part in enumerate(parts):
                self._enter(number)
                made.append(self._run(part, sent))
            for work, _ in sent:
                work.wait()
            tensors = [name for name in self.stage.returns if name not in self.stage.constants]
            shared = {name: [self._share(name, own.get(name)) for own in made] for name in tensors}
        joined = {name: join_outputs(name, each, self.stage) for name, each in shared.items()}
        flat = {**self.stage.constants, **joined}
        return tree_unflatten([flat[name] for name in self.stage.returns], self._makes)

    def call_named(self, given: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
        """Call the program on tensors by name; return its own by name. `where` names the inputs in errors.

        Raises:
            InputsError: a tensor is missing, or the program takes none of that name.
        """
        names = self.stage.inputs
        if given.keys() != {*names} or self._takes.num_leaves != len(names):
            raise InputsError(f"{where} has {', '.join(given)}", help=f"the program takes {', '.join(names)}")
        args, kwargs = tree_unflatten([given[name] for name in names], self._takes)
        made = zip(self.stage.returns, tree_flatten(self(*args, **kwargs))[0], strict=True)
        return {name: value for name, value in made if isinstance(value, torch.Tensor)}

    def _run(self, given: Mapping[str, Any], sent: list[Any]) -> dict[str, torch.Tensor]:
        """Run this stage on the values of the stages before it, and send its own to those behind it."""
        program: Any = self.exported_program
        takes = keywords_of(program.call_spec.in_spec)
        inputs = {name: given[name] for name in takes if name not in self.stage.receives}
        for row in self._stages[self.stage.index].inputs:  # in the order in which they are sent
            if row.name in self.stage.receives:
                inputs[row.name] = self._receive(row, self._peers[self.stage.receives[row.name]])
        made: dict[str, torch.Tensor] = self.module(**inputs)
        for target, row in self._wanted():
            value = _resolve(made[row.name])
            sizes = [] if _is_static(row) else [torch.tensor(value.shape, device=value.device)]
            pieces = [*sizes, _bytes_of(value)]
            sent += [(dist.isend(piece, self._peers[target]), piece) for piece in pieces]
        return {name: made[name] for name in self.stage.outputs}

    def _wanted(self) -> Iterator[tuple[int, BoundaryRecord]]:
        """Yield each value that a later stage takes from this one, with the number of that stage."""
        for record, manifest in zip(self._records, self._stages, strict=True):
            rows = {row.name: row for row in manifest.inputs}
            yield from (
                (record.index, rows[name]) for name, stage in record.receives.items() if stage == self.stage.index
            )

    def _receive(self, row: BoundaryRecord, source: int) -> torch.Tensor:
        device = self._device()
        shape = torch.tensor(row.shape if _is_static(row) else [0] * len(row.shape), device=device)
        if not _is_static(row):
            dist.recv(shape, source)
        value = torch.empty(shape.tolist(), dtype=dtype_of(row.dtype), device=device)
        dist.recv(_bytes_of(value), source)
        return value

    def _share(self, name: str, value: torch.Tensor | None) -> torch.Tensor:
        """Return an output on the ranks of all stages."""
        owner = next(record.index for record in self._records if name in record.outputs)
        row = next(row for row in self._stages[owner].outputs if row.name == name)
        shape = torch.tensor(
            value.shape if value is not None else [0] * len(row.shape), dtype=torch.int64, device=self._device()
        )
        dist.broadcast(shape, self._peers[owner], group=self._group)
        made = (
            torch.empty(shape.tolist(), dtype=dtype_of(row.dtype), device=shape.device)
            if value is None
            else _resolve(value)
        )
        dist.broadcast(_bytes_of(made), self._peers[owner], group=self._group)
        return made

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, without those that are constants of the program."""
        flat = put_in_order(self._takes, self.stage.arguments, args, kwargs)
        given = dict(zip(self.stage.arguments, flat, strict=True))
        for name, value in self.stage.fixed.items():
            check_fixed(name, given.pop(name), value)
        for name, value in given.items():
            kinds, kind = (torch.Tensor, "tensor") if name in self.stage.inputs else ((int, float), "number")
            if not isinstance(value, kinds):
                raise InputsError(
                    f"input {name!r} is of type {type(value).__name__}, and the program takes a {kind}",
                    help="pass what it was exported with",
                )
        return given

    def _enter(self, number: int) -> None:
        """Put the buffers of a micro-batch into the program, which keeps what it has written there."""
        if len(self._microbatches) == 1:
            return
        for name, value in self.module.named_buffers():
            for own in self._microbatches:
                own.setdefault(name, value.clone())
        for name, _ in list(self.module.named_buffers()):
            path, _, last = name.rpartition(".")
            setattr(self.module.get_submodule(path), last, self._microbatches[number][name])

    def _device(self) -> torch.device:
        kind = self._stages[0].device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _fact(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {list(value.shape)} of content {digest_of(value)}"


def is_plain(spec: TreeSpec) -> bool:
    """Return True if a pytree has only tuples, lists and dicts: other classes could run code when they are made."""
    return spec.is_leaf() or (spec.type in (tuple, list, dict) and all(map(is_plain, spec.children())))


def _read_tree(text: str) -> TreeSpec:
    damages = (ValueError, LookupError, TypeError, NotImplementedError, RecursionError)
    with explaining("a stage's pytree cannot be read", "copy the artifact again", *damages):
        spec = treespec_loads(text)
    if not is_plain(spec):
        raise ArtifactError("a stage's pytree has a class", help="convert the model again")
    return spec


def _resolve(value: torch.Tensor) -> torch.Tensor:
    """Return a value whose memory has its elements: in order, conjugated and negated."""
    return value.resolve_conj().resolve_neg().contiguous()


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the memory of a value in order as bytes, which backends send of every dtype."""
    return value.reshape(-1).view(torch.uint8)


def _is_static(row: BoundaryRecord) -> bool:
    return all(isinstance(size, int) for size in row.shape)


Tensors = Mapping[str, torch.Tensor]


def refuse_batches(record: StageRecord, count: int) -> None:
    """Refuse micro-batches of a program that could not be called with all samples at once.

    Raises:
        InputsError: at the start, on all ranks alike.
    """
    if count < 1:
        raise InputsError(f"microbatches={count}: there is at least 1", help="leave it out")
    if count > 1 and record.obstacle:
        raise InputsError(
            f"{count} micro-batches of {record.of!r} are not the whole batch: {record.obstacle}",
            help="return one value per sample along dim 0, or load with microbatches=1",
        )


def cut_inputs(given: Tensors, record: StageRecord, rows: Sequence[BoundaryRecord], count: int) -> list[Tensors]:
    """Return the inputs of each micro-batch: a part of the batch, and the same of everything else.

    All ranks have all inputs, so all raise alike: a rank that raised alone would leave the others waiting.

    Raises:
        InputsError: an input has another dtype or shape than so many micro-batches take.
    """
    sizes = dict[str, int]()
    for row in rows:
        parts = count if row.name in record.batched_inputs else 1
        _check_input(given[row.name], row, parts, sizes)
    return [
        {name: value.chunk(count)[at] if name in record.batched_inputs else value for name, value in given.items()}
        for at in range(count)
    ]


def _check_input(value: torch.Tensor, row: BoundaryRecord, parts: int, sizes: dict[str, int]) -> None:
    """Compare an input with its record; `sizes` are those of the dynamic dims before it."""
    is_shard = "S(" in row.sharding
    dtype = dtype_of(row.dtype)
    fits = value.dtype == dtype and value.ndim == len(row.shape)
    for dim, (got, size) in enumerate(zip(value.shape, row.shape, strict=False)):
        times = 1 if dim else parts
        fits &= got % times == 0
        if fits and not is_shard and (isinstance(size, int) or size.isidentifier()):
            own = size if isinstance(size, int) else sizes.setdefault(size, got // times)
            fits = got == own * times
    if not fits:
        shape = ", ".join(
            f"{parts} x {size}" if parts > 1 and not dim else str(size) for dim, size in enumerate(row.shape)
        )
        raise InputsError(
            f"input {row.name!r} is {value.dtype} {list(value.shape)}, the program takes {dtype} [{shape}]"
            + (f" with {' and '.join(f'{name} = {size}' for name, size in sizes.items())}" if sizes else ""),
            help="give a tensor of that dtype and shape"
            + (f": the parts of {parts} micro-batches follow each other along dim 0" if parts > 1 else ""),
        )


def join_outputs(name: str, parts: Sequence[torch.Tensor], record: StageRecord) -> torch.Tensor:
    """Return an output of all micro-batches: joined along the batch, or what they all have alike."""
    return torch.cat(list(parts)) if len(parts) > 1 and name in record.batched_outputs else parts[0]
