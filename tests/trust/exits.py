"""`python -m tests.trust.exits [N]`: of N worlds for each way out, how many do not end with 0 on every rank.

With `--fresh` every rank is an interpreter of its own from the start; otherwise it is a fork of one that has imported torch,
which takes a fifth of the time.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.runtime.exits import (
    ABORTED,
    DESTROY,
    IN_THE_CALLERS_GROUP,
    LOAD,
    TORCH_ALONE,
    UNMENDED,
    Template,
    ended_badly,
    idle_gloo,
    never_switch,
    run_script,
    write_artifact,
)
from tests.trust.long_runs import Figure

WITH_LOAD = {
    "load": LOAD,
    "load, destroy": LOAD + DESTROY,
    "load in the caller's group": IN_THE_CALLERS_GROUP,
}
WITH_TORCH = {"torch alone, as the README says": TORCH_ALONE + DESTROY}
CONTROLS = {"CONTROL, no mend": UNMENDED, "CONTROL, no mend, destroy": UNMENDED + DESTROY}
PROVOKED: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "threads never switched": never_switch,
    "gloo's threads idle": idle_gloo,
}


def exits(count: int, fresh: bool = False) -> Figure:
    """So many worlds of two gloo processes for each way out, in turn; the controls must abort at least once."""
    arms = {
        f"{name}; {how}": (name, PROVOKED[how](script))
        for (name, script), how in itertools.product({**WITH_LOAD, **WITH_TORCH, **CONTROLS}.items(), PROVOKED)
        if name not in CONTROLS or how == "gloo's threads idle"
    }
    bad: Counter[str] = Counter()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_artifact(directory)
        with Template(directory, "import tpcompiler; tpcompiler.load") as load, Template(directory, "") as torch:
            for turn in range(1, count + 1):
                for arm, (name, script) in arms.items():
                    run = partial(run_script, directory) if fresh else load.run if name in WITH_LOAD else torch.run
                    try:
                        ended = run(script)
                    except AssertionError as hung:
                        bad[arm] += 1
                        said.append(f"{arm}: {hung}")
                        continue
                    if name in CONTROLS:
                        bad[arm] += any(ABORTED in text for text in ended.printed)
                    elif ended_badly(ended):
                        bad[arm] += 1
                        last = [(text.splitlines() or [""])[-1] for text in ended.printed]
                        said.append(f"{arm}: exit codes {ended.codes}, {last}")
                print(f"{turn} of {count}: {', '.join(str(bad[arm]) for arm in arms)} ended badly", file=sys.stderr)
    controls = [arm for arm, (name, _) in arms.items() if name in CONTROLS]
    wrong, control = (sum(bad[arm] for arm in arms if (arm in controls) == among) for among in (False, True))
    figure = (
        f"{len(arms) - len(controls)} ways out, {count} worlds each: {wrong} ended badly; "
        f"{control} of {count * len(controls)} without the mend"
    )
    rows = [f"  {bad[arm]:3} of {count}: {arm}" for arm in arms]
    return Figure("the way out", "\n".join([figure, *rows, *said]), wrong == 0 and control > 0)


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--fresh"]
    found = exits(int(words[0]) if words else 100, "--fresh" in sys.argv)
    print(found.figure)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
