"""Descriptions of machines, and limits on what a rank holds."""

from __future__ import annotations

import os

from tests.bad_input.row import Row, text
from tpcompiler.cost.machine_file import shipped_machines

CONVERT = "tpcompiler convert model.pt2 --tp 2 --plan auto -o new"
RATES = "flops: 1.0e+15\nmemory_bandwidth: 3.0e+12\nmemory: 8.0e+10\n"
SECONDS = "give seconds, such as 6.0e-06"
NUMBER = "give a number such as 4.5e+11 (YAML wants the sign)"
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
        f"machine m.yaml at $.flops: expected float | null, got str ('{'1' * 59}... (402 characters))",
        NUMBER,
    ),
    _machine(
        "a number to the base 60",
        RATES.replace("1.0e+15", "190:20:30") + LINKS,
        "machine m.yaml at $.flops: expected float | null, got str ('190:20:30')",
        NUMBER,
    ),
    _machine(
        "a number without an end",
        RATES.replace("1.0e+15", "1.0e+400") + LINKS,
        "machine m.yaml at $.flops: expected float < 1e+100 (inf)",
        "give FLOP/s, such as 9.9e+14",
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
        "machine m.yaml: object contains unknown field watts",
        "a machine has base, flops, memory_bandwidth, memory, links, product, attention, other, view, fuses, cache_bandwidth, "
        "rows, dtypes, host, symm_mem, collectives, nodes; docs/machines.md has their forms",
    ),
    _machine(
        "a number that is text",
        RATES.replace("1.0e+15", "1e15") + LINKS,
        "machine m.yaml at $.flops: expected float | null, got str ('1e15')",
        NUMBER,
    ),
    _machine(
        "an impossible number",
        RATES.replace("3.0e+12", "-3.0e+12") + LINKS,
        "machine m.yaml at $.memory_bandwidth: expected float >= 100000.0 (-3000000000000.0)",
        "give bytes/s, such as 3.3e+12",
    ),
    _machine(
        "a rate in TFLOP/s",
        RATES.replace("1.0e+15", "719") + LINKS,
        "machine m.yaml at $.flops: expected float >= 1000000.0 (719)",
        "give FLOP/s, such as 9.9e+14",
    ),
    _machine(
        "a link in GB/s",
        RATES + "links:\n- {latency: 2.0e-5, bandwidth: 310}\n",
        "machine m.yaml at $.links[0].bandwidth: expected float >= 100000.0 (310)",
        "give bytes/s, such as 4.5e+11",
    ),
    _machine(
        "a latency in microseconds",
        RATES + "links:\n- {latency: 20, bandwidth: 3.1e+11}\n",
        "machine m.yaml at $.links[0].latency: expected float <= 1.0 (20)",
        "give seconds, such as 6.0e-06",
    ),
    _machine(
        "an unknown name in a link",
        RATES + LINKS + "- {ranks: 8, latancy: 2.0e-5, bandwidth: 3.1e+11}\n",
        "machine m.yaml at $.links[1]: object contains unknown field latancy",
        "a link has latency, bandwidth, hop, collective, ranks; docs/machines.md has their forms",
    ),
    _machine(
        "a latency below nothing",
        RATES + LINKS + "- {collective: all_reduce, latency: -1.0e-6, bandwidth: 4.0e+11}\n",
        "machine m.yaml at $.links[1].latency: expected float >= 0.0 (-1e-06)",
        SECONDS,
    ),
    _machine(
        "a floor below nothing",
        RATES + "product: -1.0e-6\n" + LINKS,
        "machine m.yaml at $.product: expected float >= 0.0 (-1e-06)",
        SECONDS,
    ),
    _machine(
        "a compiler that there may be",
        RATES + LINKS + "fuses: maybe\n",
        "machine m.yaml at $.fuses: invalid enum value 'maybe'",
        "use one of true, false",
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
        "machine m.yaml at key in $.dtypes: invalid enum value 'int4'",
        "use one of int8, int8_weights, float8, float8_weights",
    ),
    _machine(
        "nodes of no ranks",
        RATES + LINKS + "nodes: {ranks_per_node: 0, links: []}\n",
        "machine m.yaml at $.nodes.ranks_per_node: expected int >= 1 (0)",
        "docs/machines.md has the form",
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
        "machine m.yaml at $.collectives: invalid enum value 'mpi'",
        "use one of auto, nccl, symm_mem",
    ),
    _machine(
        "an unknown collective",
        RATES + LINKS + "- {collective: gossip, latency: 0.0, bandwidth: 4.0e+11}\n",
        "machine m.yaml at $.links[1].collective: invalid enum value 'gossip'",
        "use one of all_reduce, all_gather, reduce_scatter, all_to_all",
    ),
    _machine(
        "no link for all",
        RATES + "links:\n- {ranks: 8, latency: 0.0, bandwidth: 4.0e+11}\n",
        "machine m.yaml: no link is for all kinds and numbers of ranks",
        "add one without collective and ranks",
    ),
]
