"""Descriptions of machines, and limits on what a rank holds."""

from __future__ import annotations

import os

from tests.bad_input.row import Row, text
from tpcompiler.cost.machine_file import shipped_machines

CONVERT = "tpcompiler convert model.pt2 --tp 2 --plan auto -o new"
RATES = "flops: 1.0e+15\nmemory_bandwidth: 3.0e+12\nmemory: 8.0e+10\n"
NUMBER = "give a number above 0, such as 4.5e+11 (YAML wants the sign)"
KNOWN = f"give {', '.join(shipped_machines())}, or the path of a YAML file"
LINKS = "links:\n- {latency: 0.0, bandwidth: 4.0e+11}\n"


def _machine(what: str, content: str, *said: str) -> Row:
    return Row(what, f"{CONVERT} --machine m.yaml", *said, spoil=text("m.yaml", content))


MACHINES = [
    Row(
        "no such machine",
        f"{CONVERT} --machine h1000",
        "machine 'h1000' cannot be read: No such file or directory",
        KNOWN,
    ),
    _machine(
        "no YAML",
        "flops: [",
        "machine 'm.yaml' line 1 cannot be read: not YAML: while parsing a flow node, expected the node content, but found "
        "'<stream end>'",
        "correct the quotes, brackets and indentation",
    ),
    _machine(
        "a number of 400 digits",
        RATES.replace("1.0e+15", "1" * 400) + LINKS,
        f"machine m.yaml: flops is '{'1' * 59}... (402 characters)",
        NUMBER,
    ),
    _machine(
        "a number to the base 60",
        RATES.replace("1.0e+15", "190:20:30") + LINKS,
        "machine m.yaml: flops is '190:20:30'",
        NUMBER,
    ),
    _machine(
        "a number without an end",
        RATES.replace("1.0e+15", "1.0e+400") + LINKS,
        "machine m.yaml: flops is inf",
        NUMBER,
    ),
    _machine(
        "nesting without an end",
        RATES + "links: " + 5000 * "[",
        "machine 'm.yaml' line 4 cannot be read: not YAML: it is nested too deeply",
        "correct the quotes, brackets and indentation",
    ),
    _machine(
        "aliases, a few of which stand for gigabytes",
        "a: &a [x, x]\nb: &b [*a, *a]\n" + RATES + LINKS,
        "machine 'm.yaml' line 1 cannot be read: YAML anchors and aliases (& and *) are not allowed",
        'quote a name that begins with *, such as "*.up": colwise',
    ),
    _machine(
        "a name twice",
        RATES + RATES + LINKS,
        "machine 'm.yaml' line 4 cannot be read: 'flops' is written already in line 1",
        "remove one of the two",
    ),
    Row(
        "a machine that never ends",
        f"{CONVERT} --machine /dev/zero",
        "machine '/dev/zero' cannot be read: it is a pipe or a device",
        KNOWN,
    ),
    Row(
        "a machine that nobody writes",
        f"{CONVERT} --machine m.yaml",
        "machine 'm.yaml' cannot be read: it is a pipe or a device",
        KNOWN,
        spoil=lambda patch: os.mkfifo("m.yaml"),
    ),
    _machine(
        "an unknown name",
        RATES + LINKS + "watts: 700\n",
        "machine m.yaml: unknown 'watts'",
        "use flops, memory_bandwidth, memory, product, attention, other, view, cache_bandwidth, fuses, rows, dtypes, host, "
        "nodes, links, symm_mem, collectives, base",
    ),
    _machine(
        "a number that is text",
        RATES.replace("1.0e+15", "1e15") + LINKS,
        "machine m.yaml: flops is '1e15'",
        "give a number above 0, such as 4.5e+11 (YAML wants the sign)",
    ),
    _machine(
        "an impossible number",
        RATES.replace("3.0e+12", "-3.0e+12") + LINKS,
        "machine m.yaml: memory_bandwidth is -3000000000000.0",
        "give a number above 0, such as 4.5e+11 (YAML wants the sign)",
    ),
    _machine(
        "a latency below nothing",
        RATES + LINKS + "- {collective: all_reduce, latency: -1.0e-6, bandwidth: 4.0e+11}\n",
        "machine m.yaml, links[1]: latency is -1e-06",
        "give a number from 0, such as 4.5e+11 (YAML wants the sign)",
    ),
    _machine(
        "a floor below nothing",
        RATES + "product: -1.0e-6\n" + LINKS,
        "machine m.yaml: product is -1e-06",
        "give a number from 0, such as 4.5e+11 (YAML wants the sign)",
    ),
    _machine(
        "a compiler that there may be",
        RATES + LINKS + "fuses: maybe\n",
        "machine m.yaml: fuses is 'maybe'",
        "give true or false",
    ),
    _machine(
        "a base that there is not",
        "base: h1000\n",
        "machine m.yaml: base is 'h1000'",
        f"use one of {', '.join(shipped_machines())}",
    ),
    _machine(
        "rates of a dtype that has none",
        RATES + LINKS + "dtypes: {int4: {flops: 1.0e+15}}\n",
        "machine m.yaml: dtypes are {'int4': {'flops': 1000000000000000.0}}",
        "give some of flops, memory_bandwidth, product for some of int8, int8_weights, float8, float8_weights",
    ),
    _machine(
        "nodes of no ranks",
        RATES + LINKS + "nodes: {ranks_per_node: 0, links: []}\n",
        "machine m.yaml, nodes are {'ranks_per_node': 0, 'links': []}",
        "give ranks_per_node from 1, and links",
    ),
    Row(
        "calls that are no numbers",
        "tpcompiler convert model.pt2 --tp 2 --plan auto -o new --calls prefill",
        "Invalid value for --calls: 'prefill' does not give programs numbers, as prefill=1,decode=256 does",
        "tpcompiler convert --help lists the options",
    ),
    Row(
        "calls of another program",
        "tpcompiler convert model.pt2 --tp 2 --plan auto -o new --calls prefill=1",
        "--calls are {'prefill': 1.0}, and the programs are one",
        "give each of several programs a number above 0: prefill=1,decode=256",
    ),
    _machine(
        "collectives that nothing makes",
        RATES + LINKS + "collectives: mpi\n",
        "machine m.yaml: collectives are 'mpi'",
        "use one of auto, nccl, symm_mem",
    ),
    _machine(
        "an unknown collective",
        RATES + LINKS + "- {collective: gossip, latency: 0.0, bandwidth: 4.0e+11}\n",
        "machine m.yaml, links[1] is for 'gossip' of 0 ranks",
        "use one of all_reduce, all_gather, reduce_scatter, all_to_all, and a number of ranks from 2",
    ),
    _machine(
        "no link for all",
        RATES + "links:\n- {ranks: 8, latency: 0.0, bandwidth: 4.0e+11}\n",
        "machine m.yaml: no link is for all kinds and numbers of ranks",
        "add one without collective and ranks",
    ),
]
