"""Run the fast tests on the versions of torch and Python that this project says it runs on, and write docs/compat.md.

    python -m tools.compat [VERSION ... | python3.N ...]

Only the rows of these versions are written again, with the date. Each torch is unpacked below build/compat and put in
front of the environment that runs this; of the other Pythons, those on the path get an environment of their own there,
for the pinned torch. Where pip has no CPU build of a version, its plain wheel is taken, which cannot be imported
without CUDA's libraries: stubs stand in for them, every function of which fails. Where stubs cannot be made (that takes
gcc and readelf), or torch does not start with them, nothing is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from datetime import date
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

from tools.measured import measured_line

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "compat.md"
VERSIONS = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
HERE = "{}.{}".format(*sys.version_info)
CONSTRAINTS = ROOT / "constraints.txt"
HEAD = """\
# Versions

{line}

tpcompiler runs on torch 2.11 to 2.15 and Python 3.10 or newer. With a newer torch it prints a warning and continues.
`make compat` writes this page: it runs the fast tests (`make test`) on each version that is available without CUDA's
packages, on Linux, x86_64. Stubs for CUDA's libraries let the plain wheel of torch run on a machine without them.

| torch | Python | build | result | on |
|---|---|---|---|---|
"""


class Case(NamedTuple):
    torch: str
    python: str

    @property
    def part(self) -> str:
        return f"{self.torch} {self.python}"

    @property
    def word(self) -> str:
        return self.torch if self.python == HERE else f"python{self.python}"


Result = tuple[str, str, bool]  # the build, what the tests said, and whether that is right


def fetch(case: Case) -> tuple[Path, str] | None:
    """The wheel of a version, and which build it is; None where pip finds none."""
    WORK.mkdir(parents=True, exist_ok=True)
    for build, wanted in (("CPU", f"{case.torch}+cpu"), ("plain", case.torch)):
        folder = WORK / f"{case.torch}-{build}-{case.python}"
        if not list(folder.glob("*.whl")):
            only = ["--no-deps", "--only-binary", ":all:", "--python-version", case.python]
            words = ["pip", "download", "--quiet", *only, "--dest", str(folder), f"torch=={wanted}"]
            subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        if wheels := list(folder.glob("*.whl")):
            return wheels[0], build
    return None


def unpack(wheel: Path) -> Path:
    folder = wheel.parent / "site"
    if not (folder / "torch" / "version.py").exists():
        shutil.rmtree(folder, ignore_errors=True)
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def read_elf(library: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, str(library)], capture_output=True, text=True, check=True).stdout


def make_stubs(site: Path) -> Path:
    """A folder of libraries with every symbol that torch's want of libraries that are not here.

    Raises:
        OSError, CalledProcessError: no compiler, or no readelf.
    """
    folder = site / "stubs"
    if folder.exists():
        return folder
    libraries = [path for path in (site / "torch" / "lib").glob("*.so*") if not path.is_symlink()]
    known = {path.name for path in (site / "torch" / "lib").iterdir()}
    known |= set(
        re.findall(r"^\s+(\S+) \(", subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout, re.M)
    )
    needs = {path: set(re.findall(r"NEEDED.*\[(.*?)\]", read_elf(path, "-d"))) - known for path in libraries}
    missing = set().union(*needs.values())
    symbol = re.compile(r"^\s+\d+: \S+\s+\S+\s+\S+\s+\S+\s+\S+\s+(\S+)\s+([\w$.]+)(?:@+([\w.]+))?", re.MULTILINE)
    symbols = {path: symbol.findall(read_elf(path, "--dyn-syms")) for path in libraries}
    defined = {name for found in symbols.values() for where, name, _ in found if where != "UND"}
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # library -> version -> symbols
    for path in (path for path in libraries if needs[path]):
        owners, owner = {}, ""
        for file, version in re.findall(r"File: (\S+)|Name: (\S+)", read_elf(path, "-V")):
            owner = file or owner
            owners[version] = owner
        for where, name, version in symbols[path]:
            if where == "UND" and name not in defined and (owners.get(version) in missing or not version):
                for library in [owners[version]] if version else needs[path]:
                    if version or re.match(r"(cu|nv|nccl|__cuda)", name, re.IGNORECASE):
                        wanted[library][version].add(name)
    made = folder.with_name("stubs.new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for library in missing:
        names = sorted(set().union(*wanted[library].values())) if library in wanted else []
        code = ".text\n" + "".join(f".globl {name}\n.type {name},@function\n{name}:\n" for name in names)
        (made / "stub.s").write_text(code + " mov $35, %eax\n ret\n")  # 35: the driver does not suffice
        words = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library}"]
        if nodes := {version: names for version, names in wanted[library].items() if version}:
            text = "".join(f"{v} {{ global: {' '.join(f'{n};' for n in sorted(ns))} }};\n" for v, ns in nodes.items())
            (made / "stub.map").write_text(text)
            words.append(f"-Wl,--version-script,{made / 'stub.map'}")
        subprocess.run([*words, "-o", str(made / library), str(made / "stub.s")], check=True, capture_output=True)
    return made.rename(folder)


def make_environment(python: str, site: Path) -> str:
    """The interpreter of an environment with all that the tests need but torch, which is at `site`.

    Raises:
        FileNotFoundError: no such interpreter on the path.
        CalledProcessError: what it needs cannot be installed.
    """
    if python == HERE:
        return sys.executable
    folder = WORK / f"python{python}"
    made = folder / "bin" / "python"
    if not (folder / "done").exists():
        subprocess.run([f"python{python}", "-m", "venv", "--clear", str(folder)], check=True)
        (metadata,) = site.glob("torch-*.dist-info/METADATA")  # of torch's, all but CUDA's, which name a platform
        needs = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        own = [each for each in requires("tpcompiler") or () if re.search(r"^[^;]*$|\W(test|hf)\W$", each)]
        needs += [each.partition(";")[0] for each in own if not re.match("torch|tpcompiler", each)]
        subprocess.run([str(made), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *needs], check=True)
        (folder / "done").touch()
    return str(made)


def run_tests(case: Case, python: str, site: Path, build: str) -> Result | None:
    """None where this torch does not start."""
    stubs = None
    if build == "plain":
        try:
            stubs = make_stubs(site)
        except (OSError, subprocess.CalledProcessError):
            return None
    here = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    here |= {"LD_LIBRARY_PATH": str(stubs)} if stubs else {}
    started = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], env=here, capture_output=True, text=True
    )
    if not started.stdout.startswith(case.torch):
        return None
    words = ["pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow and not guide", "-p", "no:cacheprovider"]
    log = WORK / f"{case.torch}-{case.python}.log"
    with log.open("w") as printed:
        done = subprocess.run(
            [python, "-W", "ignore", "-m", *words], cwd=ROOT, env=here, stdout=printed, stderr=subprocess.STDOUT
        )
    found = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*?) in ", log.read_text(), re.MULTILINE)
    said = f"plain wheel, stubs for CUDA's {len(list(stubs.glob('*.so*')))} libraries" if stubs else "CPU build"
    return said, found[-1] if found else f"exit code {done.returncode}", done.returncode == 0


def tried(case: Case) -> Result:
    print(f"torch {case.torch}, Python {case.python}", file=sys.stderr, flush=True)
    found = fetch(case)
    if found is None:
        return "none that pip finds", "not run", True
    wheel, build = found
    site = unpack(wheel)
    try:
        python = make_environment(case.python, site)
    except FileNotFoundError:
        return build, f"not run: no python{case.python} on the path", True
    return run_tests(case, python, site, build) or (build, "not run: it does not start here", False)


def cases() -> list[Case]:
    """Every version of torch on this Python, and the pinned torch on every other Python."""
    pinned = re.search(r"^torch==(.+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    return [Case(version, "3.11") for version in VERSIONS] + [
        Case(pinned[1], python) for python in PYTHONS if python != "3.11"
    ]


def render(cells: dict[str, str]) -> str:
    """Return the page of these rows: their cells after the versions, by part."""
    rows = [case for case in cases() if case.part in cells]
    return HEAD.format(line=measured_line("make compat")) + "".join(
        f"| {case.torch} | {case.python} | {cells[case.part]} |\n" for case in rows
    )


def read_cells(text: str) -> dict[str, str]:
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| (.*) \|$", text, re.MULTILINE)
    return {f"{version} {python}": cells for version, python, cells in rows}


def main() -> int:
    right = True
    for case in (case for case in cases() if case.word in (sys.argv[1:] or [case.word])):
        build, result, ok = tried(case)
        right &= ok
        cells = read_cells(PAGE.read_text(encoding="utf-8"))
        cells[case.part] = f"{build} | {result} | {date.today()}"
        PAGE.write_text(render(cells), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
