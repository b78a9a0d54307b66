"""The styles of a plan: Hugging Face's `tp_plan` names, torch's ParallelStyle, and explicit placements."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from tpcompiler.errors import PlanError, UnsupportedError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import PlacementSpec, format_spec, read_spec

Layouts = tuple[PlacementSpec | None, ...]


@dataclass(frozen=True)
class Style:
    """A request of a plan entry for a layer or a parameter, in features instead of weight dims.

    Features mean the same for every layer: "out" is the embedding dim of an Embedding, "in" its vocabulary. On a
    module, `whole` and `placement` apply to its direct parameters and buffers, unless these (or a submodule) have an
    entry themselves. `inputs` and `outputs` count as torch counts layouts: None also stands for an argument or a result
    that is no tensor.
    """

    name: str  # a name of STYLES, "placement", "prepare_input", "prepare_output" or "prepare_input_output"
    cut: Literal["out", "in"] | None = None  # the feature of the layer's weight that is sharded
    whole: bool = False  # parameters are pinned to R
    # Placements may be dicts by axis, which have no hash.
    inputs: Layouts = field(default=(), hash=False)  # required of the layer's inputs, in order; None = as it comes
    outputs: Layouts = field(default=(), hash=False)  # required of the layer's outputs; None = as it comes
    placement: PlacementSpec | None = field(default=None, hash=False)  # explicit, for a parameter or buffer
    axis: str = ""  # the mesh axis, if the mesh has it; else the one that shards layers
    packed: bool = False  # the sharded feature consists of parts in a row, each sharded separately
    sizes: tuple[int, ...] = ()  # of the parts; a single number counts equal parts; empty: the uses reveal them
    dispatches: bool = False  # tokens are sent to the ranks of their experts, and the results back
    in_turns: bool = False  # attention shards its steps over `axis`, and gathers keys and values in turns

    @property
    def places(self) -> bool:
        """True if the style requests any placement."""
        return bool(self.cut or self.whole or self.placement is not None or self.inputs or self.outputs)

    @property
    def rests(self) -> bool:
        """True if the style says how parameters are held between their uses, next to what another entry asks."""
        return self.name == "shard_at_rest"

    @property
    def is_form(self) -> bool:
        """True if the style requests another form of the program, which the search may choose by itself too."""
        return self.name in (
            "attend_in_turns",
            "dispatch_experts",
            "grouped_gemm",
            "sequence_parallel",
            "shard_at_rest",
        )

    def axis_on(self, mesh: Mesh) -> str:
        """Return the style's axis if the mesh has it, else the one that shards layers."""
        return self.axis if self.axis in mesh.names else mesh.model_axis

    @property
    def written(self) -> str:
        """The name in a plan, with the sizes or the axis."""
        if self.rests:
            return f"{self.name}({self.axis})"
        sizes = ",".join(map(str, self.sizes))
        return f"{self.name}:{sizes}" if sizes else self.name

    def to_data(self) -> str | dict[str, object]:
        """Return the style as plain JSON data, which `read_style` reads back to an equal style."""
        plain = replace(self, sizes=())
        if self == AUTO or self.rests or (self.name in STYLES and plain == STYLES[self.name]):
            return self.written
        if self.placement is not None:
            text = format_spec(self.placement)
            return text if isinstance(text, str) else {**text}
        data: dict[str, object] = {"style": self.written} if self.name in STYLES else {}
        for part, layouts in (("inputs", self.inputs), ("outputs", self.outputs)):
            if layouts:
                data[part] = [None if layout is None else format_spec(layout) for layout in layouts]
        return data


# A row-wise style pins no output: its Partial is reduced to R anyway.
STYLES = {
    style.name: style
    for style in (
        Style("colwise", cut="out"),
        Style("colwise_gather_output", cut="out", outputs=(Replicate(),)),
        Style("rowwise", cut="in"),
        Style("rowwise_split_input", cut="in"),
        Style("embedding_rowwise", cut="in"),
        Style("packed_colwise", cut="out", packed=True),
        Style("packed_rowwise", cut="in", packed=True),
        Style("replicate", whole=True),
        Style("sequence_parallel", whole=True, inputs=(Shard(1),), outputs=(Shard(1),)),
        Style("gather", outputs=(Replicate(),)),
        Style("moe_tp_experts"),  # its weights have their own entries; pending sums are reduced where they are small
        Style("grouped_gemm", placement=Shard(0), axis="ep"),  # each rank holds some experts
        Style("dispatch_experts", placement=Shard(0), axis="ep", dispatches=True),
        Style("attend_in_turns", in_turns=True, axis="cp"),
        Style("shard_at_rest", axis="dp"),  # gathered for each use
    )
}

AUTO = Style("auto")  # for "**" alone: the search decides the layers that no other entry names

# Several of these differ from their style only in backward, or in the DTensors that Hugging Face's hooks create.
ALIASES = {
    "local_colwise": "colwise",
    "colwise_rep": "colwise_gather_output",
    "embedding_colwise": "colwise_gather_output",
    "local_rowwise": "rowwise",
    "rowwise_rep": "rowwise_split_input",
    "local_packed_rowwise": "packed_rowwise",
    "replicated_with_grad_allreduce": "replicate",
    "local": "replicate",
    "local_params": "replicate",
    "isolated": "replicate",
    "mla_kv_a_proj": "replicate",
    "all_reduce": "gather",
    # The tokens' route follows from the placement of the experts' weights.
    "ep_router": "moe_tp_experts",
    "ep_dispatch_experts": "moe_tp_experts",
    "moe_identity_expert": "moe_tp_experts",
}

_WHOLE = "use 'replicate' meanwhile: every rank then holds and runs the whole layer"

# Recognised but refused by name, with the replacement to suggest.
REFUSED = {
    "megamoe_experts": _WHOLE,
    "megamoe_router": _WHOLE,
}


def read_style(value: object, *, where: str) -> Style:
    """Read a style in any of the forms that users write; `where` locates it in errors.

    - a name of `STYLES` or `ALIASES`; a packed one may name its parts: `packed_colwise:2` has two equal ones,
      `packed_colwise:64,16,16` parts of these sizes
    - a placement, as text that tpcompiler prints (`S(0)`, `S(1, parts 48 48)`) or torch's own, or `{axis: placement}`
    - `{style: name, inputs: [placement or null], outputs: [...]}`, each part optional, with at least one list
    - an instance of torch's ColwiseParallel, RowwiseParallel, SequenceParallel or
      PrepareModuleInput/Output/InputOutput, or one of these classes, which equals its instance without arguments. Their
      `input_layouts` (and PrepareModuleOutput's `output_layouts`) describe layouts that the compiler infers, so they
      request nothing.

    Raises:
        PlanError: any other value.
        UnsupportedError: a style that is recognised but not supported, or a ParallelStyle of another class.
    """
    if isinstance(value, str):
        return _read_text(value.strip(), where)
    if isinstance(value, Placement):
        return Style("placement", placement=_read_spec(value, where))
    if isinstance(value, Mapping):
        return _read_mapping(value, where)
    if isinstance(value, ParallelStyle) or (isinstance(value, type) and issubclass(value, ParallelStyle)):
        return _read_torch_style(value, where)
    raise PlanError(f"{value!r} is not a style", help=_known_styles(), asked_by=where)


def _known_styles() -> str:
    return f"use one of {', '.join(STYLES)}, or a placement such as S(0) or R"


def _read_text(text: str, where: str) -> Style:
    if resting := re.fullmatch(r"shard_at_rest\((\w+)\)", text):
        return replace(STYLES["shard_at_rest"], axis=resting[1])
    if "(" in text or text in ("R", "Replicate"):
        return Style("placement", placement=_read_spec(text, where))
    return _read_name(text, where)


def _read_name(name: str, where: str) -> Style:
    unsized, _, sizes = name.partition(":")
    style = STYLES.get(ALIASES.get(unsized, unsized)) if name != AUTO.name else AUTO
    if style is not None and style.packed and re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", sizes):
        return replace(style, sizes=tuple(map(int, sizes.split(","))))
    if style is not None and unsized == name:
        return style
    if style is not None and style.packed:
        help = f"write {unsized}:2 for two equal parts, {unsized}:64,16,16 for sizes, or {unsized} alone"
        raise PlanError(f"{sizes!r} in {name!r} says no parts", help=help, asked_by=where)
    if name in REFUSED:
        raise _unsupported(name, REFUSED[name], where)
    nearest = difflib.get_close_matches(name, [*STYLES, *ALIASES, *REFUSED], n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise PlanError(f"unknown style {name!r}", help=hint + _known_styles(), asked_by=where)


def _unsupported(name: str, instead: str, where: str) -> UnsupportedError:
    return UnsupportedError(f"style {name!r} is recognised but not supported yet", help=instead, asked_by=where)


def _read_spec(value: object, where: str) -> PlacementSpec:
    if value == {}:
        raise PlanError("{} places nothing", help='name a mesh axis, such as {"tp": "S(0)"}', asked_by=where)
    return read_spec(value, where)


def _read_layouts(value: object, where: str) -> Layouts:
    layouts = value if isinstance(value, list | tuple) else [value]
    return tuple(None if layout is None else _read_spec(layout, where) for layout in layouts)


def _read_mapping(value: Mapping[object, object], where: str) -> Style:
    if not any(isinstance(part, list | tuple) for part in value.values()):
        return Style("placement", placement=_read_spec(value, where))
    if unknown := [part for part in value if part not in ("style", "inputs", "outputs")]:
        raise PlanError(
            f"{unknown[0]!r} is not a part of a style",
            help='write {"style": name, "inputs": [placement or null, ...], "outputs": [...]}',
            asked_by=where,
        )
    inputs, outputs = (_read_layouts(value.get(part, ()), where) for part in ("inputs", "outputs"))
    if "style" in value:
        style = _read_name(str(value["style"]), where)
        return replace(style, inputs=inputs, outputs=outputs or style.outputs)
    return _prepare(inputs, outputs, where)


def _prepare(inputs: Layouts, outputs: Layouts, where: str) -> Style:
    """Return a style that shards nothing: it only places a layer's inputs and outputs."""
    names = [name for name, layouts in (("input", inputs), ("output", outputs)) if layouts]
    if all(layout is None for layout in inputs + outputs):
        raise PlanError("the style asks for nothing", help="give a placement for an input or an output", asked_by=where)
    return Style("_".join(["prepare", *names]), inputs=inputs, outputs=outputs)


def _read_torch_style(value: ParallelStyle | type[ParallelStyle], where: str) -> Style:
    kind = value if isinstance(value, type) else type(value)
    if kind not in _TORCH_STYLES:  # by class, not isinstance: a subclass may mean anything
        known = ", ".join(known.__name__ for known in _TORCH_STYLES)
        raise UnsupportedError(
            f"ParallelStyle {kind.__name__!r} is not one of torch's own", help=f"use {known}", asked_by=where
        )
    if not isinstance(value, type):
        return _TORCH_STYLES[kind](value, where)
    if kind in (ColwiseParallel, RowwiseParallel, SequenceParallel):
        return _TORCH_STYLES[kind](kind(), where)
    return _prepare((), (), where)  # without arguments, the other classes request nothing


def _read_colwise(style: ColwiseParallel, where: str) -> Style:
    outputs = _read_layouts(style.output_layouts, where)
    if outputs == (Shard(-1),):
        return STYLES["colwise"]
    if outputs == (Replicate(),):
        return STYLES["colwise_gather_output"]
    return replace(STYLES["colwise"], outputs=outputs)


def _read_rowwise(style: RowwiseParallel, where: str) -> Style:
    outputs = _read_layouts(style.output_layouts, where)
    return STYLES["rowwise"] if outputs == (Replicate(),) else replace(STYLES["rowwise"], outputs=outputs)


def _read_sequence(style: SequenceParallel, where: str) -> Style:
    along = _read_layouts(style.sequence_sharding, where)
    return replace(STYLES["sequence_parallel"], inputs=along, outputs=along)


def _read_prepare_input(style: PrepareModuleInput, where: str) -> Style:
    return _prepare(_desired_inputs(style, where), (), where)


def _read_prepare_output(style: PrepareModuleOutput, where: str) -> Style:
    return _prepare((), _read_layouts(style.desired_output_layouts, where), where)


def _read_prepare_input_output(style: PrepareModuleInputOutput, where: str) -> Style:
    outputs = _read_layouts(style.prepare_module_output.desired_output_layouts, where)
    return _prepare(_desired_inputs(style.prepare_module_input, where), outputs, where)


def _desired_inputs(style: PrepareModuleInput, where: str) -> Layouts:
    if style.desired_input_kwarg_layouts:
        raise _unsupported(
            "PrepareModuleInput(desired_input_kwarg_layouts=...)", "use desired_input_layouts, by position", where
        )
    return _read_layouts(style.desired_input_layouts or (), where)


_TORCH_STYLES: dict[type[ParallelStyle], Callable[[Any, str], Style]] = {
    ColwiseParallel: _read_colwise,
    RowwiseParallel: _read_rowwise,
    SequenceParallel: _read_sequence,
    PrepareModuleInput: _read_prepare_input,
    PrepareModuleOutput: _read_prepare_output,
    PrepareModuleInputOutput: _read_prepare_input_output,
}
