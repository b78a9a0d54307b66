"""Rows of the table: what asks the search before anything is converted."""

from __future__ import annotations

from tests.bad_input.row import Row, text

PLAN = "tpcompiler plan model.pt2 --tp 2"

SEARCHES = [
    Row(
        "a plan in part that fits nothing",
        f"{PLAN} --plan part.yaml",
        "plan entry 'haed' matches nothing",
        "use a name of the program, such as 'head'",
        'asked by: part.yaml line 1 ("haed": "replicate")',
        spoil=text("part.yaml", "haed: replicate\n"),
    ),
    Row(
        "one layer left to the search",
        "tpcompiler convert model.pt2 --tp 2 --plan part.yaml -o new",
        "plan entry 'head' is 'auto', which is for '**' alone",
        'write "**": auto, which leaves to the search what no other entry names',
        'asked by: part.yaml line 1 ("head": "auto")',
        spoil=text("part.yaml", "head: auto\n"),
    ),
    Row(
        "a plan that cannot be written",
        f"{PLAN} -o none/plan.yaml",
        "cannot write none/plan.yaml: No such file or directory",
        "choose another file",
    ),
    Row(
        "no amount of memory",
        f"{PLAN} --memory 24XB",
        "'24XB' is no number of bytes",
        "write 24GB, 22.5GiB, or bytes",
    ),
    Row(
        "an amount of memory without its unit",
        f"{PLAN} --memory 24",
        "a rank's memory of 24 is 24 bytes",
        "did you mean 24GB?",
    ),
    Row(
        "less memory than any placement takes",
        f"{PLAN} --memory 0.001MB",
        "a rank would hold 1.62 kB: weights 1.22 kB, caches 0 B, activations 400 B at the peak ('relu_1'); that is 624 B more "
        "than the limit of 1 kB. The largest weights there are 'layers.0.down.weight' 256 B, 'layers.0.up.weight' 256 B, "
        "'layers.1.down.weight' 256 B",
        "use more ranks, or a limit of at least 1624 bytes",
    ),
    Row(
        "less memory than any degree takes",
        "tpcompiler plan model.pt2 --memory 0.0001MB",
        "no mesh that was tried fits: on tp=16, rank 0 would hold 744 B: weights 344 B, caches 0 B, activations 400 B at the peak "
        "('add_1'); that is 644 B more than the limit of 100 B",
        "use a limit of at least 744 bytes",
    ),
    Row(
        "a mesh that says what is tried",
        "tpcompiler plan model.pt2 --other-axes dp=2,tp=2",
        "the degrees of tp are tried, and none is given",
        "give the other axes, such as dp=2",
    ),
    Row(
        "a machine that cannot be written",
        "tpcompiler calibrate -o none/here.yaml",
        "cannot write none/here.yaml: No such file or directory",
        "choose another file",
    ),
    Row(
        "a machine of one process",
        "tpcompiler calibrate --processes 1 -o here.yaml",
        "Invalid value for --processes: a link needs at least 2 processes",
        "tpcompiler calibrate --help lists the options",
    ),
]
