"""Count the bytes that a step of decoding moves: `python -m tools.decode_bytes [MODEL_TYPE ...] [--write]`.

Twenty architectures of transformers with the heads of a real model, 16 of queries to 4 of keys where the architecture
has groups, are exported with `tpcompiler export --prefill-decode` without weights: one layer, one row, a cache of 2,048
tokens. Each decode program is counted by the model of kernels that predicts seconds (`tpcompiler/cost/kernels.py`), for
a GPU: as the model repeats heads, and as `convert` writes it. The least is every weight, chosen expert, cache and
result once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch.export import ExportedProgram

from tools.hf_models import ROWS, Row
from tools.measured import LINE, measured_line
from tpcompiler.cost.kernels import LOOKUPS, find_kernels
from tpcompiler.frontend.exporting import export_prefill_and_decode
from tpcompiler.frontend.plain_weights import drop_replaced, unwrap_subclasses
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.text import op_name
from tpcompiler.passes._kernels import bytes_in_memory, read_again
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.regions.group_queries import ATTENTION, group_queries
from tpcompiler.plan.plan import Plan
from tpcompiler.terminal.printed import format_bytes

PAGE = Path(__file__).parents[1] / "docs" / "decoding.md"
ROOM, SMALLEST = 2048, 0.005  # tokens; the share of the least that an op of the last column moves
NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "phi", "phi3", "starcoder2", "stablelm"),
    *("cohere", "granite", "glm4", "smollm3", "gpt_neox", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
)
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": ROOM,
    "moe_intermediate_size": 512,
}
LATENT = {"num_key_value_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64}
LATENT |= {"qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 64}


class Moved(NamedTuple):
    """Bytes of one step.

    Attributes:
        repeats: as the model is written.
        now: as it is converted.
        least: of weights, caches and results once.
        more: op -> what its calls move, except stored weights and caches.
    """

    repeats: float
    now: float
    least: float
    more: Counter[str]


def measure(row: Row) -> Moved:
    """Export a model without weights, and count."""
    sizes = {**row.sizes, **{name: size for name, size in SIZES.items() if name in row.sizes}}
    sizes |= LATENT if "kv_lora_rank" in row.sizes else {}
    with tempfile.TemporaryDirectory() as directory:
        config = row._replace(sizes=sizes).config()
        config.architectures = [_class_name(row)]
        config.save_pretrained(directory)
        program = export_prefill_and_decode(directory, batch=1, length=16, max_length=ROOM)["decode"].program
    planned = _planned(program)
    written = group_queries(planned, "cuda")
    repeats, now = (dict(_moves(each)) for each in (planned, written))
    more = Counter[str]()
    for (name, is_stored), count in now.items():
        more[name] += 0 if is_stored else round(count)
    return Moved(sum(repeats.values()), sum(now.values()), _least(written), more)


def _class_name(row: Row) -> str:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM._model_mapping[type(row.config())]
    return str(model.__name__)


def _planned(program: ExportedProgram) -> PlannedProgram:
    plain, _ = drop_replaced(unwrap_subclasses(program))
    return apply_plan(canonicalize(plain), Plan(), Mesh.of(1), None, None)


def _moves(program: PlannedProgram) -> Iterator[tuple[tuple[str, bool], float]]:
    """Yield (op, True for a stored operand) with the bytes that all its calls move."""
    total = dict[tuple[str, bool], float]()
    caches = {value for value, _ in program.written()}
    for node, kernel in find_kernels(program.graph).items():
        operands = edit.operands(node)
        values = [*map(edit.fake, operands), *edit.outputs(node)]
        held = [_source(operand) in caches for operand in operands] + [False] * len(edit.outputs(node))
        for share, stored, is_cache, value in zip(kernel.moves, kernel.stored, held, values, strict=bool(kernel.moves)):
            place = op_name(node), stored or is_cache
            total[place] = total.get(place, 0.0) + share * bytes_in_memory(value)
        if node.target is ATTENTION:
            place = op_name(node), False
            total[place] = total.get(place, 0.0) + read_again(node, "cuda")
    yield from total.items()


def _least(program: PlannedProgram) -> float:
    """Return the bytes of what a step has to read and write: weights, caches, the tokens added to them, and results."""
    written = {name for _, name in program.mutations()}
    kernels, names = find_kernels(program.graph), dict(program.leaves())
    read = dict[str, float]()  # of each leaf, by the call that reads most of it
    for node, kernel in kernels.items():
        for at, (share, operand) in enumerate(zip(kernel.moves, edit.operands(node), strict=False)):
            source = _source(operand)
            if source in names:
                chosen = at == 0 and op_name(node) in LOOKUPS  # rows of an embedding, or experts
                size = bytes_in_memory(edit.fake(node)) if chosen else share * bytes_in_memory(edit.fake(source))
                read[names[source]] = max(read.get(names[source], 0.0), size)
    for node, fqn in names.items():
        if fqn in written:
            read[fqn] = bytes_in_memory(edit.fake(node))
    values: Any = program.output.args[0]
    results = values[len(list(program.mutations())) :]
    return sum(read.values()) + sum(bytes_in_memory(edit.fake(value)) for value in results)


def _source(value: Any) -> Any:
    """Return the placeholder that a value is a view of, or the value."""
    while value.op == "call_function" and getattr(value.target, "is_view", False) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value


def table(found: dict[str, Moved]) -> str:
    lines = [
        "| architecture | as it repeats | as converted | least | beyond the least, by op |",
        "|---|---|---|---|---|",
    ]
    for name, moved in found.items():
        most = [(op, count) for op, count in moved.more.most_common(3) if count > SMALLEST * moved.least]
        ops = ", ".join(f"{op} {format_bytes(round(count))}" for op, count in most)
        counts = (format_bytes(round(count)) for count in moved[:3])
        lines.append(f"| {name} | {' | '.join(counts)} | {ops or '-'} |")
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=NAMES)
    options.add_argument("--write", action="store_true", help="write the rows into docs/decoding.md")
    asked = options.parse_args()
    rows = {row.model_type: row for row in ROWS}
    found = dict[str, Moved]()
    for name in asked.names:
        found[name] = measure(rows[name])
        print(table({name: found[name]}).splitlines()[-1], flush=True)
    if asked.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition("| architecture |")
        after = rest.partition("\n\n")[2]
        head = LINE.sub(measured_line("python -m tools.decode_bytes --write"), head, count=1)
        PAGE.write_text(head + table(found) + ("\n\n" + after if after else "\n"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
