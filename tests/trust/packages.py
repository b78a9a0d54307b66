"""`python -m tests.trust.packages [N]`: of N worlds that run a package, how many hang, or end otherwise than they must.

Two gloo processes each, with every kind of collective: from Python, with collectives of the caller's own in between, and
with a rank that dies between two calls; from C++ (where `examples/cpp` can be built), and with a rank that is killed. In
the control Python calls torch's own runner, which holds the GIL.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler
from tests.launch import ROOT, fork_ranks
from tests.runtime import packages
from tests.trust.long_runs import Figure

LONGEST = 60.0  # seconds for a world
CALLS = 20
WORKER = f"""
import os, sys, torch, torch.distributed as dist
import tpcompiler
module = tpcompiler.load(sys.argv[1], compiled=True)
rank, how = dist.get_rank(), sys.argv[2]
values = torch.load(sys.argv[3] + f"/{{rank}}.pt")
wanted = torch.load(sys.argv[3] + f"/{{rank}}.wanted")
if how == "CONTROL":
    from torch._C._aoti import AOTIModelPackageLoader
    runner = AOTIModelPackageLoader(sys.argv[1] + "/compiled.pt2", "model_0", False, 1, -1)
for call in range({CALLS}):
    if how in ("mixed", "CONTROL"):
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", "tp=2:tp"))
    if how == "dies" and rank == 1 and call == 7:
        os._exit(7)
    try:
        made = runner.run(values) if how == "CONTROL" else module(values)
    except tpcompiler.LaunchError:
        os._exit(3 if how == "dies" else 4)
    assert all(torch.equal(one, other) for one, other in zip(made, wanted))
"""
REQUEST = {"inputs": {"ids": [0, 1, 2, 3], "total": [1, 1, 1, 1]}}


def write(folder: Path) -> None:
    """Two packages: every kind of collective, sharded at the boundary, for Python; and one with whole inputs."""
    made = packages.write_changes(folder / "changes")
    packages.write(folder / "every", 2)
    for name in ("changes", "every"):
        report = tpcompiler.open(folder / name).package()[1]
        assert report is not None
        assert report.ok, str(report)
    for rank in range(2):
        module = made.rank_program(rank)
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        torch.manual_seed(rank)
        torch.save([torch.randint(9, value.shape).to(value.dtype) for value in inputs], folder / f"{rank}.pt")
    (folder / "worker.py").write_text(WORKER)
    fork = WORKER.replace("compiled=True", "compiled=False").replace(
        'wanted = torch.load(sys.argv[3] + f"/{rank}.wanted")',
        'torch.save(module(values), sys.argv[3] + f"/{rank}.wanted"); sys.exit()',
    )
    (folder / "plain.py").write_text(fork)
    assert fork_ranks(2, folder / "plain.py", folder / "changes", "plain", folder).codes == (0, 0)


def from_python(folder: Path, how: str, longest: float = LONGEST) -> str:
    """Nothing, or what was not as it must be."""
    try:
        ended = fork_ranks(2, folder / "worker.py", folder / "changes", how, folder, timeout=longest, together=False)
    except AssertionError:
        return "hangs"
    wanted = (3, 7) if how == "dies" else (0, 0)
    return "" if ended.codes == wanted else f"exit codes {ended.codes}: {ended.printed}"


def build(folder: Path) -> Path | None:
    """The runner, or None where it cannot be built."""
    command = ["cmake", "-S", ROOT / "examples" / "cpp", "-B", folder / "build"]
    command.append(f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}")
    if shutil.which("cmake") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    subprocess.run(["cmake", "--build", folder / "build"], capture_output=True, check=True)
    return folder / "build" / "serve"


def from_cpp(folder: Path, runner: Path, *, dies: bool = False) -> str:
    """Nothing, or what was not as it must be."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [
        subprocess.Popen(
            [runner, folder / "every"],
            env={**os.environ, **meet, "RANK": str(rank), "WORLD_SIZE": "2", "TORCH_CPP_LOG_LEVEL": "FATAL"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first = ranks[0]
        assert first.stdin is not None
        assert first.stdout is not None
        lines = []
        for call in range(CALLS):
            if dies and call == 7:
                ranks[1].send_signal(signal.SIGKILL)
                ranks[1].wait()
            try:
                print(json.dumps(REQUEST), file=first.stdin, flush=True)
            except BrokenPipeError:
                break
            if dies and call >= 7:
                break
            lines.append(first.stdout.readline())
        end = time.monotonic() + LONGEST
        first.stdin.close()
        codes = [process.wait(max(end - time.monotonic(), 1)) for process in ranks]
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if not all("error" not in json.loads(line) for line in lines):
        return f"an answer: {lines[0]}"
    if dies:
        return "" if codes == [1, -signal.SIGKILL] else f"exit codes {codes}"
    return "" if codes == [0, 0] and len(lines) == CALLS else f"exit codes {codes}, {len(lines)} answers"


def run_packages(count: int) -> Figure:
    """So many worlds of each kind, in turn; the control must hang at least once."""
    bad: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        runner = build(folder)
        arms: dict[str, Callable[[], str]] = {
            "Python": lambda: from_python(folder, "plain"),
            "Python, other collectives between": lambda: from_python(folder, "mixed"),
            "Python, a rank dies": lambda: from_python(folder, "dies"),
        }
        if runner is not None:
            arms["C++"] = lambda: from_cpp(folder, runner)
            arms["C++, a rank is killed"] = lambda: from_cpp(folder, runner, dies=True)
        said = [] if runner else ["C++: not run, for want of cmake or of the headers (docs/deploy.md)"]
        for turn in range(count):
            for arm, run in arms.items():
                if wrong := run():
                    bad[arm] += 1
                    said.append(f"{arm}: {wrong}")
            print(f"{turn + 1} of {count}: {sum(bad.values())} not as they must be", file=sys.stderr)
        controls = max(count // 20, 3)
        hung = sum(from_python(folder, "CONTROL", 15) == "hangs" for _ in range(controls))
    figure = (
        f"{len(arms)} ways to run a package, {count} worlds each, {CALLS} calls in each: {bad.total()} hung or ended "
        f"otherwise; {hung} of {controls} hung in the control, which holds the GIL"
    )
    return Figure("packages", "\n".join([figure, *said]), not bad)


def main() -> int:
    found = run_packages(int(sys.argv[1]) if sys.argv[1:] else 100)
    print(found.figure)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
