"""Check outputs, written values and calling conventions against the manifest and the originals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import GRADIENT_KINDS, RETURNED_KINDS, WRITTEN_KINDS, TreeSpec, tree_names
from tpcompiler.frontend.written_back import find_overwritten
from tpcompiler.ir import edit
from tpcompiler.ir.calling_convention import calling_of, plain_outputs
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.ir.text import dtype_name
from tpcompiler.judge.sound.folded import Folded, read_claimed
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.judge.sound.written import WrittenRank
from tpcompiler.runtime.artifact import Manifest

CALLING = {
    "takes": "takes",
    "returns": "returns",
    "names": "calls its arguments",
    "ranges": "takes the sizes",
    "asserted": "asserts of its inputs",
    "constants": "takes the constants",
}


def check_outputs(made: Folded, manifest: Manifest) -> None:
    """Check that outputs have the manifest's shardings, and that written values have those of their buffers.

    Raises:
        Unsound: an output has another sharding, or the manifest does not list it.
    """
    program, rows = made.program, iter(manifest.outputs)
    signature = program.module_call_graph[0].signature
    assert signature is not None
    names = iter(tree_names(signature.out_spec))
    values: Any = program.graph.output_node().args[0]
    owners = {node.name: node for node, _ in edit.placeholders(program)}
    owners |= {spec.target: node for node, spec in edit.placeholders(program) if spec.target is not None}
    for _, lost, buffer in find_overwritten(program):
        raise Unsound(lost, f"shares the memory of {buffer!r}, which is written before it is returned")
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        name = next(names, None) if spec.kind in RETURNED_KINDS else None
        if not edit.is_tensor(value):
            continue
        if spec.kind in RETURNED_KINDS:
            row = next(rows, None)
            if row is None or row.name != name:
                raise Unsound(value, f"is output {name!r}, and the manifest says {row and row.name!r}")
            sharding = read_claimed(value, row.sharding, made.mesh, edit.ndim(value))
            _check_value(made, value, "", f"the manifest says output {name!r}", sharding, row.dtype, row.shape)
        if spec.kind in (*WRITTEN_KINDS, *GRADIENT_KINDS):
            owner = owners[str(spec.target)]
            (sharding, *_), whole = made.shardings[owner], edit.outputs(made.whole[owner])[0]
            what = f"{'a gradient of' if spec.kind in GRADIENT_KINDS else 'written back to'} {spec.target!r} as "
            _check_value(made, value, what, "that", sharding, dtype_name(whole.dtype), whole.shape)
    if left := next(rows, None):
        raise Unsound(None, f"the manifest names an output {left.name!r}, which the program lacks")


def _check_value(
    made: Folded, value: fx.Node, what: str, whose: str, sharding: Sharding, dtype: str, shape: Sequence[Any]
) -> None:
    """Check the dtype, shape and sharding of a value that leaves the program; `what` and `whose` word the finding."""
    found, whole = made.shardings[value][0], edit.outputs(made.whole[value])[0]
    if dtype_name(whole.dtype) != dtype or not _has_shape(whole.shape, shape):
        both = [f"{dtype_name(whole.dtype)} {list(whole.shape)}", f"{dtype} {list(shape)}"]
    elif found != sharding:
        both = [each.text(made.mesh) for each in (found, sharding)]
    else:
        return
    raise Unsound(value, f"is {what}{both[0]}, and {whose} is {both[1]}")


def _has_shape(shape: Sequence[Any], said: Sequence[Any]) -> bool:
    """Compare the known sizes; symbols may have other names."""
    return len(shape) == len(said) and all(
        not isinstance(named, int) or statically_equal(size, named) for size, named in zip(shape, said, strict=True)
    )


def check_calls(ranks: Sequence[WrittenRank], manifest: Manifest, originals: Sequence[ExportedProgram]) -> None:
    """Check that all ranks are called as the manifest specifies, and as each original is, at the sizes it accepts.

    Raises:
        Unsound: a rank has other keys, or another order of them, other ranges of sizes, or other assertions.
    """
    for rank, each in enumerate(ranks):
        found = calling_of(each.program, each.guards)
        for what, said in CALLING.items():
            has, wanted = getattr(found, what), getattr(manifest.calling, what)
            if has != wanted:
                raise Unsound(None, f"rank {rank} {said} {has}, and the manifest says {wanted}")
    for original in originals:
        compare_calling(ranks[0].program, original)


def compare_calling(program: ExportedProgram, original: ExportedProgram) -> None:
    """Check that a rank's arguments and results have the structure of the original's.

    Raises:
        Unsound: keys or their order differ.
    """
    theirs, ours = original.call_spec, program.call_spec
    takes, gives = ours.in_spec, ours.out_spec
    if takes != theirs.in_spec:
        raise Unsound(None, f"the ranks take {_arguments(takes)}, and the original {_arguments(theirs.in_spec)}")
    if gives not in (theirs.out_spec, theirs.out_spec and plain_outputs(theirs.out_spec)[0]):
        raise Unsound(None, f"the ranks return {_names(gives)}, and the original {_names(theirs.out_spec)}")


def _arguments(spec: TreeSpec | None) -> str:
    """Return the names in a tree of (args, kwargs)."""
    names = tree_names(spec) if spec is not None else []
    return ", ".join(f"args{name[1:]}" if name.startswith("0.") else name[2:] for name in names) or "nothing"


def _names(spec: TreeSpec | None) -> str:
    return ", ".join(tree_names(spec)) if spec is not None else "nothing"
