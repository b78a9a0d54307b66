"""The inputs file: safetensors with one tensor per tensor input, under the input's name. No pickles.

`inspect` prints the names. Inputs that were constants at export (None, bools, numbers) are not in the file: the program
contains them. An outputs file has the same form, with the names of the outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, TensorArgument

from tpcompiler._torch import TreeSpec, aten, input_values, tree_flatten, tree_unflatten, user_inputs
from tpcompiler.errors import InputsError, explaining, reason
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.records import BoundaryRecord
from tpcompiler.runtime.target import refuse_full_disk, replacing

LARGEST_HEADER = 10_000_000  # bytes: every tensor in the header is created before any check


def read_inputs(path: str | os.PathLike[str], program: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read `(args, kwargs)` for the program from an inputs file.

    Raises:
        InputsError: it is not a safetensors file, or a tensor is missing, unknown, or of another shape or dtype.
    """
    return arrange_inputs(read_tensors(path), program, str(path))


def read_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of an inputs file by name.

    Raises:
        InputsError: it is not a safetensors file.
    """
    try:
        with Opened(Path(path)) as file:  # not mapped: truncating a mapped file kills the process
            content = file.read() or b""
        if (size := int.from_bytes(content[:8], "little")) > LARGEST_HEADER and size < len(content):
            raise ValueError(f"its header has {size:,} bytes, and {LARGEST_HEADER:,} are enough for all inputs")
        return load(content)
    except FileNotFoundError as error:
        raise InputsError(f"inputs file {path} does not exist", help="give the path of a safetensors file") from error
    except OSError as error:
        problem = "is a directory" if os.path.isdir(path) else f"cannot be read: {reason(error)}"
        raise InputsError(f"inputs file {path} {problem}", help="give the path of a safetensors file") from error
    except KeyError as error:
        raise InputsError(
            f"{path} has tensors of dtype {error}, which torch does not read", help="write them in another dtype"
        ) from error
    except (SafetensorError, ValueError, RuntimeError, OverflowError, TypeError) as error:  # for invalid sizes
        raise InputsError(
            f"{path} is not a safetensors file: {reason(error)}",
            help="write it with safetensors.torch.save_file({name: tensor}, path)",
        ) from error


def arrange_inputs(
    tensors: Mapping[str, torch.Tensor], program: ExportedProgram, where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrange named tensors as the `(args, kwargs)` of the program; `where` names their origin in errors.

    Raises:
        InputsError: a tensor is missing, unknown, or of another shape or dtype.
    """
    specs = user_inputs(program)
    values = input_values(program)
    names = [spec.arg.name for spec in specs if isinstance(spec.arg, TensorArgument)]
    if unknown := sorted(set(tensors) - set(names)):
        raise InputsError(
            f"{where}: the program has no input {unknown[0]!r}", help=f"its inputs are {', '.join(names)}"
        )
    flat: list[Any] = []
    for spec in specs:
        if isinstance(spec.arg, ConstantArgument):
            flat.append(spec.arg.value)
        elif spec.arg.name not in tensors:
            raise InputsError(f"{where}: input {spec.arg.name!r} is missing", help=f"its inputs are {', '.join(names)}")
        else:
            check_tensor(spec.arg.name, tensors[spec.arg.name], values[spec.arg.name], f"{where}: ")
            flat.append(tensors[spec.arg.name].to(values[spec.arg.name].device.type))  # the current device of its type
    if program.call_spec.in_spec is None:
        return tuple(flat), {}
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
    return args, kwargs


def keywords_of(spec: TreeSpec) -> list[str]:
    """Return the names of the keyword arguments, in the order of the flat arguments."""
    names = spec.child(1).context if hasattr(spec, "child") else spec.children_specs[1].context
    return list(names)


def flatten_inputs(program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Flatten the user's arguments into the program's order, with keyword arguments reordered.

    Raises:
        InputsError: the number, structure, shape or type of the arguments differs from the program's.
    """
    spec = program.call_spec.in_spec
    if spec is None:
        return list(args)
    flat = put_in_order(spec, [each.arg.name for each in user_inputs(program)], args, kwargs)
    _check_inputs(program, flat)
    return flat


def refuse_excluded(guard: str) -> None:
    """Refuse inputs that fail an assertion of the export, such as "n != 1"; nothing for an empty one.

    Raises:
        InputsError: the export excludes these inputs.
    """
    if guard:
        raise InputsError(
            f"the program does not take these inputs: the export assumed that {guard}",
            help="give inputs of which that holds, or export once more with an example of the others",
        )


def structure_check(program: ExportedProgram) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], None]:
    """Return a forward pre-hook that raises InputsError for arguments of another structure, before torch does."""
    spec = program.call_spec.in_spec
    inputs, names = [each.arg.name for each in user_inputs(program)], set(keywords_of(spec)) if spec else set()

    def check(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            plain = all(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values()))
            if spec and (not plain or kwargs.keys() != names or len(args) + len(kwargs) != spec.num_leaves):
                put_in_order(spec, inputs, args, kwargs)

    return check


def put_in_order(spec: TreeSpec, inputs: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Flatten arguments as a program's pytree has them; `inputs` are their names in that order.

    Raises:
        InputsError: the number or the structure of the arguments differs.
    """
    names = keywords_of(spec)
    if wrong := [
        *(f"keyword argument {name!r} is missing" for name in names if name not in kwargs),
        *(f"it has no keyword argument {name!r}" for name in kwargs if name not in names),
    ]:
        args, _ = tree_unflatten(list(inputs), spec)
        positional = [each if isinstance(each, str) else f"a {type(each).__name__}" for each in args]
        call = ", ".join([*positional, *(f"{name}=..." for name in names)])
        raise InputsError(
            f"the program was called with wrong arguments: {'; '.join(wrong)}", help=f"call it as ({call})"
        )
    _, given = tree_flatten((tuple(args), dict(kwargs)))
    if given.num_leaves != spec.num_leaves:
        raise InputsError(
            f"the program takes {spec.num_leaves} inputs, got {given.num_leaves}",
            help=f"pass what it was exported with: {', '.join(inputs)}",
        )
    problem = "the arguments have another structure than the program takes"
    with explaining(problem, "pass what it was exported with", ValueError, raised=InputsError):
        flat: list[Any] = spec.flatten_up_to((tuple(args), dict(kwargs)))  # matches dicts by key, in any order
    return flat


def _check_inputs(program: ExportedProgram, flat: Sequence[Any]) -> None:
    values = input_values(program)
    specs = user_inputs(program)
    for spec, given in zip(specs, flat, strict=True):
        name, expected = spec.arg.name, values.get(spec.arg.name)
        if isinstance(spec.arg, ConstantArgument):
            check_fixed(name, given, spec.arg.value)
        elif isinstance(expected, torch.Tensor) and isinstance(given, torch.Tensor):
            check_tensor(name, given, expected)
        elif isinstance(expected, torch.Tensor) or type(given) is not _python_type(expected):
            kind = "Tensor" if isinstance(expected, torch.Tensor) else _python_type(expected).__name__
            raise InputsError(
                f"input {name!r} is of type {type(given).__name__}, the program takes one of type {kind}",
                help="pass what it was exported with",
            )


def check_fixed(name: str, given: Any, value: Any) -> None:
    """Check an argument that is a constant of the program.

    Raises:
        InputsError: it is another.
    """
    is_float = isinstance(value, (float, complex))  # which are themselves if they are nan, or 0.0 and not -0.0
    if type(given) is not type(value) or (repr(given) != repr(value) if is_float else given != value):
        shown = "a tensor" if isinstance(given, torch.Tensor) else repr(given)
        raise InputsError(
            f"input {name!r} is {shown}, the program was exported with {value!r}",
            help="pass the same value, or export again: it is a constant of the program",
        )


def fixed_arguments(program: ExportedProgram) -> dict[str, Any]:
    """Return the arguments that are constants of the program."""
    arguments = [spec.arg for spec in user_inputs(program)]
    return {arg.name: arg.value for arg in arguments if isinstance(arg, ConstantArgument)}


def _python_type(value: Any) -> type:
    symbolic = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return symbolic.get(type(value), type(value))


def named_inputs(program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the user's tensors by the names of the program's inputs.

    Raises:
        InputsError: as `flatten_inputs`.
    """
    specs = user_inputs(program)
    flat = flatten_inputs(program, args, kwargs)
    return {spec.arg.name: v for spec, v in zip(specs, flat, strict=True) if isinstance(v, torch.Tensor)}


def check_values(given: Mapping[str, torch.Tensor], inputs: Sequence[BoundaryRecord]) -> None:
    """Check that inputs of indices are in their range; on a GPU with an assertion that the host does not wait for.

    Args:
        inputs: as `Manifest.inputs`.

    Raises:
        InputsError: a value is out of range, such as a position beyond a cache.
    """
    for row in inputs:
        value = given.get(row.name)
        if row.values is None or value is None or not value.numel():
            continue
        least, most = row.values
        if value.device.type != "cpu":
            text = f"input {row.name!r} has a value outside of {least} to {most}"
            aten._assert_async.msg(((value >= least) & (value <= most)).all(), text)
            continue
        low, high = (int(end) for end in value.aminmax())
        if low < least or high > most:
            raise InputsError(
                f"input {row.name!r} has the value {low if low < least else high}, and may have {least} to {most}",
                help="give values in that range, or export the model for more",
            )


def check_tensor(name: str, given: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    """Compare an input with the program's (fake) value for it; dynamic sizes may be anything.

    A size that was exported as dynamic, and that the export found to be one number, must be that number.

    Raises:
        InputsError: the shape or dtype differs; `where` precedes the message.
    """
    sizes = [size if isinstance(size, int) else size.node.maybe_as_int() for size in expected.shape]
    same = given.ndim == expected.ndim and all(
        size is None or size == got for got, size in zip(given.shape, sizes, strict=True)
    )
    if not same or given.dtype != expected.dtype:
        raise InputsError(
            f"{where}input {name!r} is {given.dtype} {list(given.shape)}, the program takes {expected.dtype} "
            f"[{', '.join(str(s) for s in expected.shape)}]",
            help="give a tensor of that dtype and shape",
        )


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    # Clones: safetensors rejects two names of one memory.
    written = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    help = "check the folder, the free space and the permissions"
    with explaining(f"cannot write {path}", help, OSError, SafetensorError), replacing(Path(path)) as temporary:
        refuse_full_disk(temporary, sum(tensor.nbytes for tensor in written.values()))
        if temporary == Path(path):  # a device or a pipe, which safetensors would replace by a new file
            temporary.write_bytes(save(written))
        else:
            save_file(written, temporary)
