"""Rows of the table: unequal shares, and the devices to find them for."""

from __future__ import annotations

from tests.bad_input.row import Row

CONVERT = "tpcompiler convert model.pt2 --plan auto --dry-run"
PLAN = "tpcompiler plan model.pt2"

UNEQUAL = [
    Row(
        "a number of ranks in words",
        f"{CONVERT} --tp two",
        "--tp 'two' is not a number of ranks",
        "write --tp 4, or unequal shares: --tp 2:1:1",
    ),
    Row(
        "shares with the largest behind",
        f"{CONVERT} --tp 1:2",
        "mesh axis 'tp' has the shares 1:2",
        "give one for each rank, the largest first, such as 2:1:1: rank 0 is the largest device",
    ),
    Row(
        "a share of nothing",
        f"{CONVERT} --mesh dp=2,tp=2:0",
        "mesh axis 'tp' has the shares [2, 0]",
        "a share is an integer of at least 1, as in 2:1:1",
    ),
    Row(
        "shares of stages",
        f"{CONVERT} --mesh pp=2:1,tp=2",
        "the stages of pp=2:1,tp=2 have unequal shares",
        "give their number, pp=2, and shares to tp",
    ),
    Row(
        "devices in another order",
        f"{PLAN} --devices 12GB,24GB",
        "the device 24GB may hold 24 GB, more than 12GB before it",
        "give the largest device first: rank 0 has the largest share",
    ),
    Row(
        "a single device",
        f"{PLAN} --devices 12GB",
        "1 device shares nothing",
        "give one for each rank: --devices 24GB,12GB,12GB",
    ),
    Row(
        "devices for a given number of ranks",
        f"{PLAN} --devices 24GB,12GB --tp 2",
        "Invalid value for --devices: leave it out with --tp and --mesh",
        "tpcompiler plan --help lists the options",
    ),
    Row(
        "a limit next to devices that have theirs",
        f"{PLAN} --devices 24GB,12GB --memory 8GB",
        "--memory next to --devices",
        "leave out --memory",
    ),
    Row(
        "devices that hold too little",
        f"{PLAN} --devices 0.2kB,0.1kB",
        "no mesh that was tried fits: on tp=2, rank 1 would hold 1.7 kB; that is 1.6 kB more than the limit of 100 B",
        "use more or larger devices: tpcompiler plan without --devices compares numbers of ranks",
    ),
]
