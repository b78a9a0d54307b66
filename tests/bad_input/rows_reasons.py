"""Rows of the table: what is asked of an artifact's reasons, differences and costs."""

from __future__ import annotations

import pytest
import torch

from tests.bad_input.row import Row, text
from tests.bad_input.rows_machines import KNOWN
from tests.runtime.models import export_conv
from tpcompiler import parallelize

CONVERT = "tpcompiler convert model.pt2 --tp 2 --plan plan.yaml -o new"
LIMITS = (
    'write "2 all_reduce/layer", "0 fallbacks", "1MB sent" (per rank and call) or "24GB held" (by a rank); kinds are '
    "all_reduce, all_gather, reduce_scatter, all_to_all, collectives, fallbacks"
)
ALLOW = "change the plan (tpcompiler explain gives the reason for each), or allow as much"


def convert_other(patch: pytest.MonkeyPatch) -> None:
    parallelize(export_conv(), 2, {}).save("other")


def convert_dynamic(patch: pytest.MonkeyPatch) -> None:
    dims = {0: torch.export.Dim("rows", min=4, max=64)}
    program = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(6, 4),), dynamic_shapes=(dims,))
    parallelize(program, 2, {}, inputs=["S(0)"]).save("dynamic")


REASONS = [
    Row(
        "a name that is not there",
        "tpcompiler explain out layers.0.down.wieght",
        "out has no node, parameter or collective 'layers.0.down.wieght'",
        "did you mean layers.0.down.weight, layers.1.down.weight, layers.0.up.weight? tpcompiler inspect out --rank 0 lists all",
    ),
    Row(
        "a tensor that is not there",
        "tpcompiler inspect out --tensor layers.0.down.wieght",
        "out has no parameter, buffer, input or output 'layers.0.down.wieght'",
        "did you mean layers.0.down.weight, layers.1.down.weight, layers.0.up.weight?",
    ),
    Row(
        "prices on an unknown machine",
        "tpcompiler explain out linear --machine h1000",
        "machine 'h1000' cannot be read: No such file or directory",
        KNOWN,
    ),
    Row(
        "artifacts of two models",
        "tpcompiler diff out other",
        "two models: parameter 'layers.0.up.weight' is f32[16, 8] in out and none in other",
        "compare artifacts that are made of one model",
        spoil=convert_other,
    ),
    Row(
        "a budget that is no limit",
        f"{CONVERT} --budget 'two all_reduce'",
        "budget 'two all_reduce' is not a limit",
        LIMITS,
    ),
    Row(
        "a size in no unit",
        f"{CONVERT} --budget '24gigs held'",
        "'24gigs' is no number of bytes",
        "write 24GB, 22.5GiB, or bytes",
    ),
    Row(
        "a budget below nothing",
        f"{CONVERT} --budget '-1 sent'",
        "'-1' is no number of bytes",
        "write 24GB, 22.5GiB, or bytes",
    ),
    Row(
        "a budget that is no file",
        f"{CONVERT} --budget none.yaml",
        "budget 'none.yaml' cannot be read: No such file or directory",
        "check the path",
    ),
    Row(
        "a budget that is no list",
        "tpcompiler check out --budget budget.yaml",
        "budget 'budget.yaml' is not a list of limits",
        'write one limit per line: - "0 fallbacks"',
        spoil=text("budget.yaml", "fallbacks: 0\n"),
    ),
    Row(
        "a budget whose text is no YAML",
        "tpcompiler check out --budget budget.yaml",
        "budget 'budget.yaml' line 3 cannot be read: not YAML: while scanning a simple key, could not find expected ':'",
        "correct the quotes, brackets and indentation",
        spoil=text("budget.yaml", "- 0 fallbacks\n'2'\n"),
    ),
    Row(
        "a budget with an unknown kind",
        "tpcompiler check out --budget budget.yaml",
        "budget '2 broadcasts' in 'budget.yaml' is not a limit",
        LIMITS,
        spoil=text("budget.yaml", "- 0 fallbacks\n- 2 broadcasts\n"),
    ),
    Row(
        "a conversion that is over its budget",
        f"{CONVERT} --budget '0 all_reduce/layer' --budget '100 sent' --budget '1kB held'",
        "model.pt2 is over its budget: layers.0 and 1 more like it: 1 all_reduce, 1 more than 0 all_reduce/layer "
        "('all_reduce' in layers.0.down); each rank sends 192 B, 92 B more than 100 B ('all_reduce' in layers.0.down, "
        "'all_reduce_1' in layers.1.down); rank 0 holds 1.3 kB of parameters, buffers and constants, 296 B more "
        "than 1 kB",
        ALLOW,
    ),
    Row(
        "an artifact that is over its budget",
        "tpcompiler check out --budget '1 collectives'",
        "the program is over its budget: 2 collectives, 1 more than 1 collectives ('all_reduce' in layers.0.down, "
        "'all_reduce_1' in layers.1.down)",
        ALLOW,
    ),
    Row(
        "sizes that are no sizes",
        "tpcompiler explain out --at batch=many",
        "Invalid value for --at: 'batch=many' gives no sizes, as batch=8,sequence=4096 does",
        "tpcompiler explain --help lists the options",
    ),
    Row(
        "a size of a program that has none",
        "tpcompiler explain out --at batch=8",
        "the program has no dynamic size 'batch'",
        "all of its sizes are fixed: leave --at out",
    ),
    Row(
        "an unknown size",
        "tpcompiler explain dynamic --at rows=8",
        "the program has no dynamic size 'rows'",
        "its sizes are batch",
        spoil=convert_dynamic,
    ),
    Row(
        "a size out of its range",
        "tpcompiler explain dynamic --at batch=65",
        "batch is 65, and dim 0 of 'input' can be from 4 to 64 in steps of 2",
        "give such a number: --at batch=N",
        spoil=convert_dynamic,
    ),
    Row(
        "a size that the ranks do not divide",
        "tpcompiler explain dynamic --at batch=7",
        "batch is 7, and dim 0 of 'input' can be from 4 to 64 in steps of 2",
        "give such a number: --at batch=N",
        spoil=convert_dynamic,
    ),
    Row(
        "a package whose calls are to be counted",
        "tpcompiler run out --inputs in.safetensors --compiled --count",
        "Invalid value for --count: a package is machine code, whose calls are not seen",
        "tpcompiler run --help lists the options",
    ),
]
