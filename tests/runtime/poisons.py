"""Ways to make a .pt2 run code: each changes the entries of a sound file so that it would write a marker."""

from __future__ import annotations

import collections
import importlib.util
import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.pt2_archive import constants as archive_constants

from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.model_file import read_model

MODEL = "models/model.json"
EXAMPLES = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
Entries = dict[str, bytes]


class Victim(nn.Module):
    """A weight, a constant, a dynamic size, a constant input, a dict of inputs and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mode: str, given: dict[str, torch.Tensor]) -> Any:
        made = collections.defaultdict(list)
        made["y"] = self.inner(x).relu() + given["key"] + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return made


ARGS = (torch.ones(3, 4), "fast", {"key": torch.ones(4)})


def save_victim(path: Path) -> None:
    sizes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "mode": None, "given": {"key": None}}
    torch.export.save(torch.export.export(Victim(), ARGS, dynamic_shapes=sizes), path)


def entries_of(path: Path) -> Entries:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_entries(path: Path, entries: Entries) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"model/{name}", content)


class Fire:
    """Unpickled, it writes the marker and becomes the value of an expression."""

    def __init__(self, marker: Path, value: str = "None") -> None:
        self.text = f"({code(marker)}, {value})[1]"

    def __reduce__(self) -> Any:
        return eval, (self.text,)


def saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def code(marker: Path) -> str:
    """An expression, without the double quotes that JSON in JSON would need more care for."""
    return f"open('{marker}','w').close()"


def text(entries: Entries, old: str, new: str, entry: str = MODEL) -> None:
    """Replace a piece of JSON; both are as they stand in the file."""
    assert old in entries[entry].decode()
    entries[entry] = entries[entry].decode().replace(old, new).encode()


def changed(entries: Entries, entry: str, change: Callable[[Any], None]) -> None:
    data = json.loads(entries[entry])
    change(data)
    entries[entry] = json.dumps(data).encode()


def signature(data: Any) -> dict[str, Any]:
    found: dict[str, Any] = data["graph_module"]["module_call_graph"][0]["signature"]
    return found


def pickled_examples(entries: Entries, marker: Path) -> None:
    entries[EXAMPLES] = saved(((Fire(marker, "__import__('torch').ones(3, 8)"), torch.ones(4)), {}))


def pickled_weight(entries: Entries, marker: Path) -> None:
    entries["data/weights/weight_0"] = saved(Fire(marker))
    changed(entries, WEIGHTS, lambda data: next(iter(data["config"].values())).update(use_pickle=True))


def pickled_constant(entries: Entries, marker: Path) -> None:
    entries["data/constants/tensor_0"] = saved(Fire(marker))
    changed(entries, CONSTANTS, lambda data: next(iter(data["config"].values())).update(use_pickle=True))


def opaque_constant(entries: Entries, marker: Path) -> None:
    entries["data/constants/opaque_obj_0"] = pickle.dumps(Fire(marker))
    row = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    changed(entries, CONSTANTS, lambda data: data["config"].update(c=row))


def renamed_constant(entries: Entries, marker: Path) -> None:
    """Listed as if it were no pickle: torch goes by the entry's name, and wants whole floats of it."""
    entries["data/constants/opaque_obj_0"] = pickle.dumps(Fire(marker)).ljust(1000)
    meta = json.loads(entries[CONSTANTS])["config"]
    row = {**next(iter(meta.values())), "path_name": "opaque_obj_0"}
    changed(entries, CONSTANTS, lambda data: data["config"].update(c=row))


def older_weights(entries: Entries, marker: Path) -> None:
    entries["data/weights/model.pt"] = saved({"w": Fire(marker)})


def older_constants(entries: Entries, marker: Path) -> None:
    entries["data/constants/model.pt"] = saved({"c": Fire(marker)})


def sympy_expression(entries: Entries, marker: Path) -> None:
    size(entries, code(marker))


def hidden_expression(entries: Entries, marker: Path) -> None:
    """In a tensor with the name of a field whose texts are free."""
    sympy_expression(entries, marker)
    text(entries, '"x"', '"metadata"')


def joined_expression(entries: Entries, marker: Path) -> None:
    """Without a string in it: from characters."""
    sympy_expression(entries, marker)
    spelled = "+".join(f"chr({ord(letter)})" for letter in code(marker))
    text(entries, json.dumps(code(marker)), json.dumps(f"eval({spelled})"))


def name_of_an_input(entries: Entries, marker: Path) -> None:
    text(entries, '"given_key"', json.dumps(f"given_key, evil={code(marker)}"))


def name_of_a_weight(entries: Entries, marker: Path) -> None:
    evil = json.dumps(f"""inner." + str(open('{marker}','w')) + "weight""")
    text(entries, '"inner.weight"', evil)
    text(entries, '"inner.weight"', evil, WEIGHTS)


def name_of_an_argument(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: signature(data).update(forward_arg_names=["x", "mode", "given=1"]))


def name_of_a_keyword(entries: Entries, marker: Path) -> None:
    def change(data: Any) -> None:
        protocol, spec = json.loads(signature(data)["in_spec"])
        positional, keyword = spec["children_spec"]
        keyword["context"] = json.dumps(["given=1"])
        keyword["children_spec"] = [positional["children_spec"].pop()]
        signature(data).update(in_spec=json.dumps([protocol, spec]), forward_arg_names=None)

    changed(entries, MODEL, change)


def guard(entries: Entries, marker: Path) -> None:
    changed(entries, MODEL, lambda data: data.update(guards_code=[f"{code(marker)} is None"]))


def spelled_out(marker: Path) -> str:
    """Without any quotes."""
    return "eval(" + "+".join(f"chr({ord(letter)})" for letter in code(marker)) + ")"


def guard_that_sympy_evaluates(entries: Entries, marker: Path) -> None:
    """A class below torch that makes an expression of a text."""
    indicator = "torch.fx.experimental.symbolic_shapes.IsNonOverlappingAndDenseIndicator"
    text = f"{indicator}('{spelled_out(marker)}') != 7"
    changed(entries, MODEL, lambda data: data.update(guards_code=[text]))


def guard_with_a_module(entries: Entries, marker: Path) -> None:
    """Without a call of anything but a method whose name a tensor's layout has too."""
    text = f"torch.os.mkdir('{marker}') is None"
    changed(entries, MODEL, lambda data: data.update(guards_code=[text]))


def size(entries: Entries, text: str) -> None:
    def change(data: Any) -> None:
        values = data["graph_module"]["graph"]["tensor_values"]
        next(size for size in values["x"]["sizes"] if "as_expr" in size)["as_expr"]["expr_str"] = text

    changed(entries, MODEL, change)


def call_in_an_exponent(entries: Entries, marker: Path) -> None:
    size(entries, f"2**Rational(1, {spelled_out(marker)})")


def keyword_in_an_exponent(entries: Entries, marker: Path) -> None:
    size(entries, f"2**Integer(2, x={spelled_out(marker)})")


def argument_in_an_exponent(entries: Entries, marker: Path) -> None:
    size(entries, f"2**Float('2', {spelled_out(marker)})")


def option_in_an_exponent(entries: Entries, marker: Path) -> None:
    size(entries, f"2**Float('2', precision={spelled_out(marker)})")


def guard_that_leaves_its_message(entries: Entries, marker: Path) -> None:
    """torch writes the check between double quotes, with the quotes that `ast.unparse` chooses."""
    text = f"1 or L['''+str({code(marker)})+'''] == 1"
    changed(entries, MODEL, lambda data: data.update(guards_code=[text]))


def enum_beside_a_factory(entries: Entries, marker: Path) -> None:
    def change(data: Any) -> None:
        protocol, spec = json.loads(signature(data)["in_spec"])
        context = {"default_factory_module": "builtins", "default_factory_name": "list"}
        context["key"] = {"__enum__": True, "fqn": "poison_module:Kind", "name": "A"}  # type: ignore[assignment]
        spec["children_spec"][0]["children_spec"][2]["context"] = json.dumps(context)
        signature(data).update(in_spec=json.dumps([protocol, spec]))

    changed(entries, MODEL, change)


def constant_input(entries: Entries, marker: Path) -> None:
    text(entries, '{"as_string": "fast"}', json.dumps({"as_string": f"' + str({code(marker)}) + '"}))


def spelled(context: list[Any]) -> str:
    """A pytree's context as it stands in a program's JSON: JSON in JSON in JSON."""
    return json.dumps(json.dumps(json.dumps(context)))[3:-3]


def evil_key(marker: Path) -> str:
    """torch writes the keys of dicts of inputs into messages, between double quotes."""
    return f'"+str(open("{marker}","w"))+"'


def key_of_an_example(entries: Entries, marker: Path) -> None:
    entries[EXAMPLES] = saved(((ARGS[0], "fast", {evil_key(marker): torch.ones(4)}), {}))


def key_of_an_input(entries: Entries, marker: Path) -> None:
    key_of_an_example(entries, marker)
    text(entries, spelled(["key"]), spelled([evil_key(marker)]))


def imported_factory(entries: Entries, marker: Path) -> None:
    text(entries, r"\"builtins\", \"default_factory_name\"", r"\"poison_module\", \"default_factory_name\"")


def imported_enum(entries: Entries, marker: Path) -> None:
    text(entries, spelled(["key"]), spelled([{"__enum__": True, "fqn": "poison_module:Kind", "name": "A"}]))


def relu(data: Any) -> dict[str, Any]:
    return next(node for node in data["graph_module"]["graph"]["nodes"] if "relu" in node["target"])


def python_function(entries: Entries, marker: Path) -> None:
    inputs = [{"name": "path", "arg": {"as_string": str(marker)}, "kind": 1}]
    changed(entries, MODEL, lambda data: relu(data).update(target="torch.os.mkdir", inputs=inputs))


def function_as_argument(entries: Entries, marker: Path) -> None:
    """An op that calls what it is given."""
    arguments: list[dict[str, Any]] = [{"as_operator": "torch.os.mkdir"}, {"as_string": str(marker)}]
    inputs = [{"name": "", "arg": argument, "kind": 1} for argument in arguments]
    node = {"target": "torch.ops.higher_order.wrap", "inputs": inputs, "is_hop_single_tensor_return": True}
    changed(entries, MODEL, lambda data: relu(data).update(node))


def library(entries: Entries, marker: Path) -> None:
    text(entries, '"torch.ops.aten.relu.default"', '"torch.ops.load_library.__call__"')


def file_op(entries: Entries, marker: Path) -> None:
    text(entries, '"torch.ops.aten.relu.default"', '"torch.ops.aten.save.default"')


def machine_code_op(entries: Entries, marker: Path) -> None:
    text(entries, '"torch.ops.aten.relu.default"', '"torch.ops.higher_order.inline_asm_elementwise"')


def text_for_a_number(entries: Entries, marker: Path) -> None:
    text(entries, '"as_int": 4', json.dumps({"as_int": code(marker)})[1:-1])


def compiled_code(entries: Entries, marker: Path) -> None:
    entries["data/aotinductor/model/model.wrapper.so"] = b"\x7fELF"


OPAQUE = hasattr(archive_constants, "OPAQUE_OBJ_FILENAME_PREFIX")  # torch 2.11 has none
ASSEMBLY = importlib.util.find_spec("torch._higher_order_ops.inline_asm_elementwise") is not None  # nor this
# What to do, whether it then runs where the file is trusted, and what is said of it.
POISONS: list[tuple[Callable[[Entries, Path], None], bool, str]] = [
    (pickled_examples, True, f"{EXAMPLES} needs a pickle that may run code (eval)"),
    (pickled_weight, True, f"{WEIGHTS} has 'inner.weight' as a pickle"),
    (pickled_constant, True, f"{CONSTANTS} has 'lifted_tensor_0' as a pickle"),
    (opaque_constant, OPAQUE, f"{CONSTANTS} has 'c' as a pickle"),
    (renamed_constant, OPAQUE, f"{CONSTANTS} names an entry of another kind: 'opaque_obj_0'"),
    (older_weights, True, "data/weights/model.pt does not belong in a program without pickles"),
    (older_constants, True, "data/constants/model.pt does not belong in a program without pickles"),
    (sympy_expression, True, f"{MODEL} has a size that is not a plain expression: "),
    (hidden_expression, True, f"{MODEL} has a size that is not a plain expression: "),
    (joined_expression, True, f"{MODEL} has a size that is not a plain expression: "),
    (name_of_an_input, True, f"{MODEL} has a name that is not an identifier: "),
    (name_of_a_weight, True, f"{MODEL} has quotes or unprintable characters in a text: "),
    (guard, True, f"{MODEL} has an input check that is not a plain comparison: "),
    (guard_that_sympy_evaluates, True, f"{MODEL} has an input check that is not a plain comparison: "),
    (guard_with_a_module, True, f"{MODEL} has an input check that is not a plain comparison: "),
    (call_in_an_exponent, True, f"{MODEL} has a size that is not a plain expression: "),
    (keyword_in_an_exponent, True, f"{MODEL} has a size that is not a plain expression: "),
    (argument_in_an_exponent, True, f"{MODEL} has a size that is not a plain expression: "),
    (option_in_an_exponent, True, f"{MODEL} has a size that is not a plain expression: "),
    (guard_that_leaves_its_message, True, f"{MODEL} has an input check that is not a plain comparison: "),
    (enum_beside_a_factory, True, f"{MODEL} makes torch import the module 'poison_module'"),
    (constant_input, True, f"{MODEL} has quotes or unprintable characters in a text: "),
    (key_of_an_input, True, f"{MODEL} has quotes or unprintable characters in a text: "),
    (imported_factory, True, f"{MODEL} makes torch import the module 'poison_module'"),
    (imported_enum, True, f"{MODEL} makes torch import the module 'poison_module'"),
    # torch writes these two into a `def`, and this text is no Python there.
    (name_of_an_argument, False, f"{MODEL} has a name that is not an identifier: 'given=1'"),
    (name_of_a_keyword, False, f"{MODEL} has a name that is not an identifier: "),
    # torch's own verifier refuses the first, its printer the second.
    (python_function, False, f"{MODEL} calls something other than an op: 'torch.os.mkdir'"),
    (function_as_argument, False, f"{MODEL} calls something other than an op: 'torch.os.mkdir'"),
    (library, False, f"{MODEL} calls something other than an op: 'torch.ops.load_library.__call__'"),
    (file_op, False, f"{MODEL} calls an op that opens a file or runs code by name: 'torch.ops.aten.save.default'"),
    (text_for_a_number, False, f"{MODEL} has text where none belongs: "),
    (compiled_code, False, "data/aotinductor/model/model.wrapper.so does not belong in a program without pickles"),
]
if ASSEMBLY:
    said = f"{MODEL} calls an op that opens a file or runs code by name: 'torch.ops.higher_order.inli"
    POISONS.append((machine_code_op, False, said))


def zipped(path: Path, entries: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of two entries of one name
        for name, content in entries:
            archive.writestr(name, content)


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as raised:
        read_model(path)
    return str(raised.value)
