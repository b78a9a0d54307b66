"""The records in an artifact's files: their types are their form, which reading checks to the last field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b8",
}  # by torch's name; others are written as torch prints them
OTHERS = "complex32 complex64 complex128 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
PLACEMENT = r"(?:R|[SP]\([^()]*\))"
ON_AXIS = rf"(?:{PLACEMENT}|\d+x{PLACEMENT}(?: \d+x{PLACEMENT})+)"
DEEPEST = 8  # lists and tables in one another in a plan, whose entries are texts or tables of texts
MOST_PROGRAMS = 1_000
MOST_DIMS = 64  # of a tensor or a mesh: torch's own limit
MOST_RANKS = 1 << 16
MOST_SHARES = 1 << 22  # of all tensors on all ranks
LONGEST = 400  # letters of a message, which may quote the file
LARGEST = 1 << 62  # elements or bytes: what a size in a file can be
END = r"$(?!\n)"  # Python's `$` alone also matches before a line's end

Count = Annotated[int, Meta(ge=0, lt=LARGEST)]
Degree = Annotated[int, Meta(ge=1, lt=LARGEST)]
Index = Annotated[int, Meta(gt=-LARGEST, lt=LARGEST)]
AxisName = Annotated[str, Meta(pattern=rf"^[^\W\d]\w*{END}")]
ProgramName = Annotated[str, Meta(pattern=rf"^[^\W\d]\w*{END}")]  # a directory's, which leads nowhere else
ShardingText = Annotated[str, Meta(pattern=rf"^({ON_AXIS}|\[{ON_AXIS}(, {ON_AXIS})*\]){END}")]
DtypeText = Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPES.values())}|torch\.({OTHERS.replace(' ', '|')})){END}")]
Sha256 = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{64}}{END}")]
ProgramFile = Annotated[str, Meta(pattern=rf"^program(_\d+)?\.pt2{END}")]
PackageFile = Annotated[str, Meta(pattern=rf"^(compiled(_\w+)?\.pt2|runner\.so){END}")]
Shape = Annotated[list[Count | str], Meta(max_length=MOST_DIMS)]
Shares = Annotated[list[Degree], Meta(min_length=2, max_length=MOST_RANKS)]  # of an axis' ranks, such as [2, 1, 1]
Mesh = Annotated[dict[AxisName, Degree | Shares], Meta(min_length=1, max_length=MOST_DIMS)]
Factors = Annotated[list[Annotated[int, Meta(ge=2, lt=LARGEST)]], Meta(min_length=2, max_length=MOST_DIMS)]
Rows = list[list[Count]]
DeviceType = Literal["cpu", "cuda"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Goal = Literal["latency", "memory"]
Layout = Literal["ranks", "shared"]  # a self-contained file per rank, or shared programs and separate weights
Optimizer = Literal["adamw", "sgd", "none"]  # whose state the ranks hold next to parameters with gradients
Collectives = Literal["auto", "nccl", "symm_mem"]  # the faster of both, by NCCL, or over symmetric memory
Why = Literal["inherent", "plan-demanded", "fallback"]
Placed = str | dict[str, str]
PlacedBoundary = list[Placed | None] | dict[str, Placed] | None
Read = TypeVar("Read", bound="Record")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Plain data in a file or in an answer. Fields with a default are left out where they have it.

    The comments on fields are their description in docs/json.md.
    """


class BoundaryRecord(Record, frozen=True, kw_only=True):
    """A tensor that the program takes or returns."""

    name: str  # of the argument, or of the output
    shape: Shape  # global; a symbolic size is its text
    dtype: DtypeText  # such as `f32`
    sharding: ShardingText  # such as `S(0)`; over several axes `[S(0), R]`
    # the least and the greatest value of an input that is indices
    values: Annotated[list[Index], Meta(min_length=2, max_length=2)] | None = None

    def __post_init__(self) -> None:
        _refuse_huge(self.shape)


class TensorRecord(Record, frozen=True, kw_only=True):
    """A parameter, a buffer or a constant."""

    name: str  # its FQN
    kind: str  # `parameter`, `buffer` or `constant_tensor`
    shape: Annotated[list[Count], Meta(max_length=MOST_DIMS)]  # global
    dtype: DtypeText  # such as `f32`
    sharding: ShardingText  # such as `S(0)`; over several axes `[S(0), R]`
    persistent: bool = True  # false for a buffer that a state dict leaves out
    tied_to: str | None = None  # the name of the tensor that it shares its memory with
    stored_in: ProgramName | None = None  # the program whose files hold it

    def __post_init__(self) -> None:
        _refuse_huge(self.shape)

    @property
    def holder(self) -> str:
        """The name under which ranks hold it: that of the tensor it is tied to, or its own."""
        return self.tied_to or self.name

    @property
    def is_own(self) -> bool:
        """True if this program's own files hold it under this name."""
        return self.tied_to is None and self.stored_in is None


PlacedRecord = TensorRecord | BoundaryRecord


class Transfer(Record, frozen=True, kw_only=True):
    """The bytes of one collective call of a rank's program."""

    kind: CollectiveKind  # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    axis: str  # of the mesh; several as `dp.tp`; `tp[:2]` for 2 ranks of it in a row, `tp[::2]` for every second one
    payload_bytes: Count  # what is reduced, gathered in all, or (all_to_all) held by one rank; sizes as in the example
    group_size: Degree  # ranks
    wire_bytes: Count  # what each rank sends on a ring


class Collective(Transfer, frozen=True, kw_only=True):
    """One collective call of a rank's program, and its cause."""

    node: str  # its name in the program
    module: str  # the layer
    source: str  # the user's line of code
    why: Why  # inherent (a pending sum of the plan's own cuts), plan-demanded, or fallback
    reason: str  # the cause in words
    reshard: str  # the change of sharding that it belongs to


class Note(Record, frozen=True):
    """A note of a pass: something that it declined, gave up or could not use."""

    # its subject
    kind: Literal[
        "plan",
        "untouched",
        "whole",
        "dropped",
        "no rule",
        "size",
        "random",
        "mesh",
        "shared",
        "attention",
        "idle",
        "cut",
        "both",
        "examples",
        "collectives",
        "overlap",
        "search",
        "uncut",
        "apart",
        "stages",
    ]
    text: str  # for people


class Calling(Record, frozen=True, kw_only=True):
    """The calling convention of every rank's program."""

    takes: str  # the pytree of its arguments
    returns: str  # the pytree of its results
    names: list[str]  # of its arguments
    # dynamic size -> its least and its greatest value; null without an end
    ranges: dict[str, Annotated[list[Count | None], Meta(min_length=2, max_length=2)]]
    asserted: list[str]  # what is asserted of inputs
    constants: list[str]  # the arguments that are fixed


class CallRecord(Record, frozen=True, kw_only=True):
    """A call of an op on the whole, which a rank does a share of."""

    op: str  # its schema's name and overload
    args: list[Any]  # numbers and texts; others as `ir/node_placement.py` writes them
    kwargs: dict[str, Any]  # likewise
    output: int | None = None  # the index of the one that is meant, of several results


class Asked(Record, frozen=True, kw_only=True):
    """The arguments of an artifact's conversion."""

    inputs: PlacedBoundary  # the placements that were given, or null
    outputs: PlacedBoundary  # likewise
    # the name of the machine by whose seconds its collectives were chosen, without the path of a file
    machine: str | None = None
    collectives: Collectives = "nccl"
    memory: Count | None = None  # the bytes that a rank may hold by the search, or null where it has no limit
    optimize: Goal = "latency"  # what the search makes least: the time of a call, or the bytes of weights on a rank
    calls: float = 1.0  # how often the program is called, next to those that share its weights
    optimizer: Optimizer = "adamw"  # whose state counts as memory, if the program returns gradients
    check_indices: bool = True  # false where ranks assert nothing of computed indices
    keep_repeats: bool = False  # true where attention reads repeated heads of keys and values, as in the model
    # where that was "auto:free", or one that the search has completed to the manifest's
    plan: Literal["auto:free"] | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _refuse_deep(self.plan)


class Package(Record, frozen=True, kw_only=True):
    """The compiled form of an artifact's programs."""

    # file name -> SHA-256 (hex), of the package, of the library that runs it from Python, and of programs that say how
    # each model is called (`called_file`)
    files: dict[PackageFile, Sha256]
    # program -> model in the package -> the ranks, or processes, that run it.
    models: dict[ProgramName, dict[str, list[Count]]]
    processes: Count = 0  # their number, if each runs several ranks, with the same bits; 0: one for each rank
    device_type: DeviceType  # `cpu` or `cuda`
    torch: str  # the version that compiled it, and runs it
    compiler: str  # the C++ compiler, as it names itself
    strides: dict[str, list[Count]]  # of the tensors whose memory is not in row-major order, as a file's is
    capability: list[str]  # what it needs of the CPU, or of the GPU
    threads: Count  # of a rank's process, on the CPU


class StageRecord(Record, frozen=True, kw_only=True):
    """A program that is one stage of a pipeline: its ranks run it after those of earlier stages."""

    of: ProgramName  # the whole program
    index: Count  # of the stage, from 0
    count: Degree  # number of stages
    receives: dict[str, Count]  # input -> the earlier stage that returns it under the same name
    outputs: list[str]  # the outputs of the whole that this stage returns
    inputs: list[str]  # the tensors that the whole takes, in order
    arguments: list[str]  # these, and the numbers and texts that the whole takes, in order
    fixed: dict[str, bool | int | float | str | None]  # the arguments that are constants of the whole
    returns: list[str]  # the outputs of the whole, in order
    constants: dict[str, bool | int | float | str | None] = {}  # those that are no tensors
    takes: str  # the pytree of the arguments of the whole, as torch writes it
    makes: str  # the pytree of its results
    # the inputs of the whole whose dim 0 is the batch, and the outputs: micro-batches are cut and joined along it
    batched_inputs: list[str] = []
    batched_outputs: list[str] = []
    obstacle: str = "it was converted without batches"  # the reason why there are no micro-batches, or empty


class Manifest(Record, frozen=True, kw_only=True):
    """All that an artifact's `manifest.json` records."""

    mesh: Mesh  # axis -> degree, or the unequal shares of its ranks
    # degrees of the factors of an axis over only some of which tensors are sharded, outermost first: `tp` as 2 x 2
    factors: dict[AxisName, Factors] = {}
    groups: dict[str, Rows]  # process-group name in the graphs -> the groups of ranks that have it, which share no rank
    device_type: DeviceType  # `cpu` or `cuda`
    plan: dict[str, Any]  # as a plan file has it
    tensors: list[TensorRecord]  # parameters, buffers and constants
    inputs: list[BoundaryRecord]  # the tensors that the programs take
    outputs: list[BoundaryRecord]  # the tensors that they return
    collectives: list[Collective]  # of one call, in order
    notes: list[Note]  # what the compiler declined or could not use
    output_type: str | None  # the class that the model returned, where the programs return a dict instead
    versions: dict[str, str]  # of tpcompiler, torch and python
    files: dict[str, Sha256]  # file name -> SHA-256 (hex)
    calling: Calling  # how every rank's program is called
    # the constant that tells ranks with one graph apart, such as where their slices begin: its name and every rank's
    # row. Empty where nothing does
    rank_numbers: Annotated[dict[str, Rows], Meta(max_length=1)]
    # the constants that are memory which the GPUs of a group map from each other, and the group of each. No file has
    # them: `tpcompiler.load` allocates them
    symm_mem: dict[str, str]
    # file name -> the ranks that run it: those with equal graphs. Empty in memory
    programs: dict[ProgramFile, list[Count]]
    asked: Asked  # how it was converted
    # the first of the programs that share tensors by name; null for an artifact's only program
    family: ProgramName | None = None
    stage: StageRecord | None = None  # null for a program that is whole
    compiled: Package | None = None  # the package of a lone artifact; that of several programs is in `programs.json`
    format: int  # of the files

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def layout(self) -> Layout:
        return "ranks" if "rank_0.pt2" in self.files else "shared"

    @property
    def degrees(self) -> dict[str, int]:
        """The number of ranks along each axis."""
        return degrees_of(self.mesh)

    def placed(self) -> Iterator[tuple[str, PlacedRecord]]:
        """Tensors, inputs and outputs by name; an output's as `output NAME`."""
        yield from ((row.name, row) for row in self.tensors)
        yield from ((row.name, row) for row in self.inputs)
        yield from ((f"output {row.name}", row) for row in self.outputs)

    def __post_init__(self) -> None:
        if self.world_size > MOST_RANKS:
            raise ValueError(f"the mesh {self.mesh} has more than {MOST_RANKS} ranks")
        _refuse_deep(self.plan)
        world = range(self.world_size)
        if len(self.tensors) * len(world) > MOST_SHARES:
            raise ValueError(f"{len(self.tensors)} tensors on {len(world)} ranks are more than {MOST_SHARES} shares")
        parts = [(f"group {name!r}", groups) for name, groups in self.groups.items()]
        parts += [("programs", list(self.programs.values()))] if self.programs else []
        for name, ranks in parts:
            if sorted(rank for part in ranks for rank in part) != list(world):
                raise ValueError(f"{name} does not have each of {len(world)} ranks once")
        for axis, degrees in self.factors.items():
            if self.degrees.get(axis) != math.prod(degrees):
                raise ValueError(f"the axis {axis!r} has the factors {degrees}, and the mesh is {self.mesh}")
        for sent in self.collectives:
            if not self.mesh.keys() >= {axis.partition("[")[0] for axis in sent.axis.split(".")}:
                raise ValueError(f"collective {sent.node!r} is over {sent.axis!r}, and the mesh is {self.mesh}")
        names = {row.name for row in self.tensors}
        if loose := [row for row in self.tensors if row.holder not in names]:
            raise ValueError(f"{loose[0].name!r} is tied to {loose[0].tied_to!r}, which is no tensor")
        for name, rows in self.rank_numbers.items():
            if len(rows) != len(world) or len(set(map(len, rows))) != 1:
                raise ValueError(f"{name!r} does not have a row of one length for each of {len(world)} ranks")


class ProgramList(Record, frozen=True, kw_only=True):
    """The list of programs over one set of weights: each has its artifact in a directory of its name."""

    format: int
    programs: Annotated[list[ProgramName], Meta(max_length=MOST_PROGRAMS)]
    compiled: Package | None = None


def read_record(kind: type[Read], data: Any) -> Read:
    """Check plain data, and make a record of it.

    Raises:
        ValueError: it has another form; the message is `: ...` or ` at $.tensors[0].shape: ...`.
    """
    try:
        return msgspec.convert(data, kind)
    except ValueError as error:
        what, _, where = str(error).replace("\\\\", "\\").replace(END, "$").replace("`", "").partition(" - at ")
        raise ValueError(f"{where and f' at {where}'}: {what[0].lower()}{what[1:LONGEST]}") from None


def plain_data(record: Record) -> dict[str, Any]:
    """The data that `read_record` makes the same record of."""
    data: dict[str, Any] = msgspec.to_builtins(record)
    return data


def is_whole(text: str) -> bool:
    """True if every rank has all of a tensor of this sharding: `R`, or `[R, R]` on two axes."""
    return "S(" not in text and "P(" not in text


def _refuse_huge(shape: Sequence[int | str]) -> None:
    if math.prod(size for size in shape if isinstance(size, int)) >= LARGEST:
        raise ValueError(f"the shape {shape} has {LARGEST} elements or more")


def degrees_of(mesh: Mapping[str, int | list[int]]) -> dict[str, int]:
    """Return the number of ranks along each axis."""
    return {axis: each if isinstance(each, int) else len(each) for axis, each in mesh.items()}


def mesh_text(mesh: Mapping[str, int | Sequence[int]]) -> str:
    """Return a mesh as users write it: `dp=2,tp=2:1:1`."""
    return ",".join(
        f"{axis}={each if isinstance(each, int) else ':'.join(map(str, each))}" for axis, each in mesh.items()
    )


def _refuse_deep(plan: Any) -> None:
    level, depth = [plan], 0
    while level := [part for part in level if isinstance(part, (dict, list))]:
        level = [each for part in level for each in (part.values() if isinstance(part, dict) else part)]
        if (depth := depth + 1) > DEEPEST + 1:  # the plan itself is a table
            raise ValueError(f"the plan has more than {DEEPEST} tables and lists in one another")
