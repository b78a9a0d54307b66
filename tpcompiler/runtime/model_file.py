"""Read a .pt2 file, or explain what the file is instead."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, SymBoolArgument, SymFloatArgument, SymIntArgument

from tpcompiler._torch import (
    RETURNED_KINDS,
    FakeTensor,
    all_tensors,
    is_registered_class,
    keystr,
    quiet_torch,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_unflatten,
    user_inputs,
)
from tpcompiler.errors import ArtifactError, explaining, option, reason
from tpcompiler.runtime.hub import WRITE_MODEL, refuse_hub_directory, refuse_missing_model
from tpcompiler.runtime.inputs import keywords_of
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.pt2 import MODEL, Pt2
from tpcompiler.runtime.pt2_check import bare_inputs, find_dicts, find_texts
from tpcompiler.runtime.python_code import WRITE, find_difference
from tpcompiler.runtime.weightless import empty_hollow

MOST_CLASSES = 8
MOST_REPEATED = 1 << 26  # bytes
KNOWN_MODULES = re.compile(r"transformers\.(modeling_outputs|cache_utils|models\.(\w+)\.modeling_\2)")
KNOWN_OPS = {  # namespace of ops -> the module that registers them
    "transformers": "transformers.integrations.moe",
    "torchao": "torchao.quantization",
}
ARCHIVES = {  # an entry -> the kind of archive that has it
    r"^data/aotinductor/": "an AOTInductor package: compiled code, not a .pt2 with a graph",
    r"^constants\.pkl$|^code/": "a TorchScript archive (torch.jit.save), not a .pt2",
    r"^data\.pkl$": "a pickle of something else (torch.save of weights or a module), not a .pt2",
    "": "a zip archive of something else, not a .pt2",
}
NUMBERS = (SymIntArgument, SymFloatArgument, SymBoolArgument)
CACHES = "transformers.cache_utils"
EXPORTERS = "transformers.exporters.exporter_dynamo"
PLAIN_PARTS = {"tensor", "sym", "dtype", "device", "size", "items"}  # of a cache in a file of these exporters
EXPORT_SUPPORT = "transformers.integrations.executorch"


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register classes of outputs or custom ops for a file.

    Raises:
        ArtifactError: a module cannot be imported.
    """
    for name in names:
        try:
            with _working_directory(name.partition(".")[0]):
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a module's code may raise anything
            raise ArtifactError(
                f"cannot import {name}: {type(error).__name__}: {reason(error)}",
                help="give the dotted name of a module that python can import here",
            ) from error


def import_known_modules(data: Any) -> None:
    """Import the modules of transformers and torchao that a program's JSON names: classes of its inputs, and ops.

    Nothing else is imported because a file names it: other classes and ops need `--import`.
    """
    texts = list(find_texts(data))
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):  # torch names the problem
        trees = [json.loads(text) for key, _, text in texts if key in ("in_spec", "out_spec")]
        specs = [part for part in find_dicts(trees) if "children_spec" in part]
        classes = {tuple(str(each["type"]).rpartition(".")[::2]) for each in specs}
        for module, name in sorted(each for each in classes if KNOWN_MODULES.fullmatch(each[0]))[:MOST_CLASSES]:
            if _import_installed(module) and name == "DynamicCache" and not is_registered_class(f"{module}.{name}"):
                importlib.import_module(EXPORT_SUPPORT).register_dynamic_cache_export_support()
        _register_caches([each for each in specs if str(each["type"]).startswith(f"{CACHES}:")])
    for namespace, module in KNOWN_OPS.items():
        if any(text.startswith(f"torch.ops.{namespace}.") for _, _, text in texts):
            _import_installed(module)


def _register_caches(caches: Sequence[dict[str, Any]]) -> None:
    """Register the caches that files of transformers' exporters take or return.

    Such a file names the classes that a cache is made of, and reading it makes objects of them. So a cache is
    registered only if it holds nothing but caches, layers of caches, and data.
    """
    if not caches or not _import_installed(CACHES) or not _import_installed(EXPORTERS):
        return
    known = {
        f"{CACHES}:{name}": value
        for name, value in vars(sys.modules[CACHES]).items()
        if isinstance(value, type) and value.__module__ == CACHES
    }
    made_of = [part for each in caches for part in find_dicts(json.loads(each["context"])) if "_t" in part]
    if all(part["_t"] in PLAIN_PARTS or (part["_t"] == "obj" and part.get("p") in known) for part in made_of):
        for name in {each["type"] for each in caches} & known.keys():
            sys.modules[EXPORTERS].register_pytree_node(known[name])


def _import_installed(module: str) -> bool:
    """Import a module if its library is installed; if the module fails, torch reports what is missing later."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return False
    with contextlib.suppress(ArtifactError):
        import_modules([module])
    return True


@contextlib.contextmanager
def _working_directory(package: str) -> Iterator[None]:
    """Search the working directory too in the block, if only it has the package: an installed command does not.

    Later imports of an installed module must not find files there.
    """
    here = os.getcwd() if package not in sys.modules and importlib.util.find_spec(package) is None else None
    sys.path += [here] if here else []
    try:
        yield
    finally:
        if here and here in sys.path:  # the module may have changed the path itself
            sys.path.remove(here)


def read_model(path: str | os.PathLike[str], *, trust: bool = False) -> ExportedProgram:
    """Read a file of `torch.export.save`; `import_modules` first imports what it needs.

    `trust` reads it with `torch.export.load` unchecked, which runs code that the file may contain (docs/security.md).

    Raises:
        ArtifactError: there is no such file, it is of another kind or damaged, it needs a module imported or, without
            `trust`, it needs a pickle or could run code.
    """
    with open_model(path, trust=trust) as file:
        program = load_program(file)
        _refuse_repeated(program, file)
        return program


def _refuse_repeated(program: ExportedProgram, file: Pt2) -> None:
    """Raise ArtifactError for a large weight stored as one repeated number: ranks would hold it in full."""
    for name, value in all_tensors(program).items():
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.layout is torch.strided:
            whole, there = value.numel() * value.element_size(), value.untyped_storage().nbytes()
            if whole > MOST_REPEATED and whole > 1000 * there:
                raise ArtifactError(
                    f"{file.path}: {name!r} is {list(value.shape)}, {whole:,} bytes, of which the file holds {there:,}",
                    help="export the model with its weights, or without them (tpcompiler export)",
                )


def load_program(file: Pt2) -> ExportedProgram:
    """Load the program from a file that `open_model` opened."""
    import_known_modules(file.json(MODEL))
    program = file.program()
    empty_hollow(program, file)
    if problem := _strange_calling(program) or _strange_examples(program) or _strange_guards(program):
        raise ArtifactError(f"{file.path}: {problem}", help="export the model again")
    if problem := find_difference(program):
        raise ArtifactError(f"{file.path}: {problem}", help=WRITE)
    return program


@contextlib.contextmanager
def open_model(path: str | os.PathLike[str], *, trust: bool = False) -> Iterator[Pt2]:
    """Open a .pt2 and, without `trust`, check it; the block reads exactly the texts that were checked.

    Raises:
        ArtifactError: as `read_model`; also for any error in the block, which is blamed on the file.
    """
    file = Path(path)
    if os.path.isdir(file):  # unlike pathlib's, it does not raise for a long name or a closed folder
        raise _directory(file)
    refuse_missing_model(file)
    # ValueError: a null character in the path
    with explaining(f"{file} cannot be read", "check the path and the permissions", OSError, ValueError):
        opened = Opened(file)
    with opened, check_pt2(opened, trust=trust) as pt2:
        yield pt2


@contextlib.contextmanager
def check_pt2(file: Opened, *, trust: bool, known: Pt2 | None = None) -> Iterator[Pt2]:
    """Check a file that is already open, as `open_model` does; it must have the program of `known`, which was checked.

    Raises:
        ArtifactError: as `open_model`; the file has another program.
    """
    if problem := _other_than_pt2(file):
        raise ArtifactError(f"{file.path} {problem[0]}", help=problem[1])
    try:
        with quiet_torch() as errors, file.reporting():
            pt2 = Pt2(file, trust)
            if known is not None and pt2.text(MODEL) != known.text(MODEL):
                raise ArtifactError(
                    f"{file.path} has another program than {known.path}", help="copy the artifact again"
                )
            if not trust:
                pt2.check(known=[MODEL] if known is not None else ())
            yield pt2
    except ArtifactError:
        raise
    except Exception as error:  # torch raises any type of error here
        file.refuse_change()
        # With trust, torch.export.load logs the cause, and then raises a general text that points to the log.
        raise _load_error(file.path, errors[-1] if errors else error) from error
    file.refuse_change()


def _strange_calling(program: ExportedProgram) -> str:
    """Describe a missing or inconsistent calling convention: torch loads such a program, and fails in the call."""
    signature, graph = program.graph_signature, program.module_call_graph
    spec = graph[0].signature if graph else None
    if spec is None or spec.in_spec is None or spec.out_spec is None or graph[0].fqn != "":
        return "it does not record the arguments and results of its program"
    if strange := [each.fqn for each in graph if not isinstance(each.fqn, str)]:
        return f"it names a module {strange[0]!r}"
    takes = len(user_inputs(program))
    gives = sum(each.kind in RETURNED_KINDS for each in signature.output_specs)
    if (spec.in_spec.num_leaves, spec.out_spec.num_leaves) != (takes, gives):
        return (
            f"its program should take {spec.in_spec.num_leaves} and return {spec.out_spec.num_leaves} values, "
            f"and the graph takes {takes} and returns {gives}"
        )
    return ""


def _strange_examples(program: ExportedProgram) -> str:
    """Describe invalid example inputs: torch returns any object that the file contains."""
    examples, spec = program.example_inputs, program.call_spec.in_spec
    assert spec is not None
    if examples is None:
        return ""
    try:
        (args, kwargs), names = examples, keywords_of(spec)  # torch derives its input checks from these, in this order
        examples = args, {name: kwargs[name] for name in names}
        values = spec.flatten_up_to(examples)  # looks at no more values than the program takes, however they repeat
        is_other = len(kwargs) > len(names) or not all(map(tree_is_leaf, values)) or tree_flatten(examples)[1] != spec
    except (ValueError, TypeError, LookupError, AttributeError):
        is_other = True
    if is_other:
        return "its example inputs are not the arguments that its program takes"
    for value in values:
        if isinstance(value, torch.Tensor) and (value.is_meta or value.layout is not torch.strided):
            kind = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            return f"its example inputs have a tensor {kind}, without numbers"
    takes = [spec.arg for spec in user_inputs(program)]
    texts = [value for value in values if isinstance(value, (str, bytes))]  # an input check would compute with them
    if texts and not any(isinstance(spec, ConstantArgument) and isinstance(spec.value, str) for spec in takes):
        return f"its example inputs have the text {texts[0][:80]!r}, and its program takes none"
    return ""


def _strange_guards(program: ExportedProgram) -> str:
    """Describe an input check that computes with something other than a number: `*` would repeat a text or a list."""
    call, numbers = program.module_call_graph[0].signature, set[str]()
    assert call is not None
    args, kwargs = tree_unflatten([spec.arg for spec in user_inputs(program)], call.in_spec)
    names = call.forward_arg_names or [f"arg_{at}" for at in range(len(args))]
    roots = dict(zip(names, args, strict=False)) | kwargs if len(names) >= len(args) else {}
    for at, (path, arg) in enumerate(tree_flatten_with_path(roots)[0]):
        if isinstance(arg, NUMBERS) or (isinstance(arg, ConstantArgument) and isinstance(arg.value, int | float)):
            name = f"L{keystr(path)}"  # and as torch writes one of many arguments, `*sizes`
            numbers |= {name, f"L['flat_args'][{at}]", re.sub(r"^L\['(\w+)_(\d+)'\]", r"L['\1'][\2]", name)}
    others = {name for guard in program._guards_code for name in bare_inputs(guard)} - numbers
    return f"it has an input check that computes with {min(others)}, which is not a number" if others else ""


def _directory(file: Path) -> ArtifactError:
    if os.path.isfile(file / "manifest.json"):
        return ArtifactError(
            f"{file} is a directory that tpcompiler wrote", help="give the .pt2 file of the single-device model"
        )
    refuse_hub_directory(file)
    return ArtifactError(f"{file} is a directory", help="give a .pt2 file")


def _other_than_pt2(file: Opened) -> tuple[str, str] | None:
    """Return (what the file seems to be, the remedy), or None if it looks like a .pt2 with an exported program."""
    head = file.read(512)
    file.seek(0)
    if not head.startswith(b"PK"):
        return _other_than_zip(head)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return "is a damaged or truncated .pt2 (a zip archive without its end)", "copy the file again, or export again"
    return _other_archive(names)


def _other_than_zip(head: bytes) -> tuple[str, str]:
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself", "get the file with git lfs pull"
    is_text = False
    with contextlib.suppress(UnicodeDecodeError):
        is_text = head[:256].decode("utf-8").isprintable() or b"\n" in head[:256]
    kinds = {
        "is empty": not head,
        "is a Python pickle, not a .pt2": re.match(rb"\x80[\2-\5]", head),
        "is a safetensors file: weights without a program, not a .pt2": head[8:9] == b"{"
        and int.from_bytes(head[:8], "little") < 1 << 30,
        "is a text file, not a .pt2": is_text,
        "is not a .pt2 (no zip archive)": True,
    }
    kind = next(kind for kind, fits in kinds.items() if fits)
    return kind, WRITE_MODEL if head else f"it is not a .pt2: {WRITE_MODEL}"


def _other_archive(names: Sequence[str]) -> tuple[str, str] | None:
    inside = "\n".join(name.partition("/")[2] for name in names)  # every entry is in one folder named after the archive
    models = sorted(re.findall(r"^models/(.*)\.json$", inside, re.MULTILINE))
    if "model" in models:
        return None
    if models:
        return (
            f"holds exported programs named {', '.join(models)}, and none named 'model'",
            "write a file with one program by torch.export.save(exported_program, path)",
        )
    kind = next(kind for entry, kind in ARCHIVES.items() if re.search(entry, inside, re.MULTILINE))
    return f"is {kind}", WRITE_MODEL


def _load_error(file: Path, cause: BaseException) -> ArtifactError:
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause)
    if match := re.search(r"Deserializing (\S+) in pytree is not registered", text):
        module = match[1].rpartition(".")[0] or "MODULE"
        return ArtifactError(
            f"{file} takes or returns a {match[1]}, a class that is not imported here",
            help=option(f"pass --import {module}", f"import {module} first"),
        )
    if match := re.search(r"failed to resolve torch\.ops\.(\S+) to an operator", text):
        return ArtifactError(
            f"{file} calls the op {match[1]}, which this torch {torch.__version__} does not have",
            help=option("pass --import MODULE with", "import")
            + " the module that registers the op, or export with this version of torch",
        )
    if re.search(r"not compiled with CUDA|Found no NVIDIA driver|torch\.cuda\.is_available\(\) is False", text):
        return ArtifactError(
            f"{file} has tensors on CUDA, which torch does not find here",
            help="read it on a machine with a GPU, or export the model on the CPU and convert with "
            + option("--device cuda", 'device_type="cuda"'),
        )
    return ArtifactError(
        f"{file} cannot be read by torch {torch.__version__}: {reason(cause)}",
        help="copy the file again, or export the model again with this version of torch",
    )
