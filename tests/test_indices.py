"""Computed indices of a dim that is cut: beyond it all ranks raise, as the single device does, and up to it none does."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import force_setattr
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.launch import fork_ranks
from tests.long import some
from tests.runtime.commands import call as run_command
from tests.sound import findings
from tests.trust.damage import Artifact
from tpcompiler.errors import InputsError
from tpcompiler.ir import edit
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.rules.index_range import ASSERT
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.program_files import open_program
from tpcompiler.runtime.rank_file import read_rank

ROWS = 11  # over two ranks and over three never even
Use = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _columns(i: torch.Tensor) -> torch.Tensor:
    return i.unsqueeze(-1).expand(-1, 3)


OPS: dict[str, Use] = {  # of a table [ROWS, 3], two indices, and two rows
    "embedding": lambda t, i, s: F.embedding(i, t),
    "embedding, padded": lambda t, i, s: F.embedding(i, t, padding_idx=0),
    "embedding_bag": lambda t, i, s: F.embedding_bag(i.view(1, 2), t, mode="sum"),
    "embedding_bag, padded": lambda t, i, s: F.embedding_bag(i.view(1, 2), t, mode="mean", padding_idx=2),
    "index": lambda t, i, s: t[i],
    "index of two dims": lambda t, i, s: t[i, torch.tensor([0, 2])],
    "index_put": lambda t, i, s: t.index_put((i,), s),
    "index_put, added": lambda t, i, s: t.index_put((i,), s, accumulate=True),
    "index_select": lambda t, i, s: t.index_select(0, i),
    "index_copy": lambda t, i, s: t.index_copy(0, i, s),
    "index_copy of a row": lambda t, i, s: t.index_copy(0, i[1:], s[:1]),
    "index_add": lambda t, i, s: t.index_add(0, i, s),
    "index_reduce": lambda t, i, s: t.index_reduce(0, i, s, "amax"),
    "index_fill": lambda t, i, s: t.index_fill(0, i, 2.0),
    "gather": lambda t, i, s: t.gather(0, _columns(i)),
    "scatter": lambda t, i, s: t.scatter(0, _columns(i), s),
    "scatter of a number": lambda t, i, s: t.scatter(0, _columns(i), 2.0),
    "scatter, multiplied": lambda t, i, s: t.scatter(0, _columns(i), s, reduce="multiply"),
    "scatter_add": lambda t, i, s: t.scatter_add(0, _columns(i), s),
    "scatter_reduce": lambda t, i, s: t.scatter_reduce(0, _columns(i), s, "amin"),
    "take": lambda t, i, s: torch.take(t[:, 0], i),
    "cross_entropy": lambda t, i, s: F.cross_entropy(t.T[:2], i, ignore_index=-1),
    "nll_loss": lambda t, i, s: F.nll_loss(t.T[:2], i),
}
# In range for every op; negative, which some take; and beyond on either side. -100 is ignored by losses.
LAST = (ROWS - 1, ROWS, -1, -ROWS, -ROWS - 1, -100)


class Table(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, 3))
        self.use = use

    def forward(self, i: torch.Tensor, s: torch.Tensor) -> Any:
        return self.use(self.table, i + 1, s)


def call(last: int, second: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([second, last]) - 1, torch.ones(2, 3)


@cache
def exported(name: str) -> ExportedProgram:
    torch.manual_seed(0)
    return export(Table(OPS[name]), call(1))


def raises(program: ExportedProgram, args: Sequence[torch.Tensor]) -> bool:
    try:
        program.module()(*args)
    except (IndexError, RuntimeError):
        return True
    return False


@cache
def find_raising(name: str) -> dict[int, bool]:
    """True for each last index of which the single device raises."""
    return {last: raises(exported(name), call(last)) for last in LAST}


def asserts(program: ExportedProgram) -> int:
    return sum(node.target is ASSERT for node in edit.calls(program.graph))


MESHES = [  # mesh, placement of the table, of the indices
    ({"tp": 2}, "S(0)", "R"),
    ({"tp": 3}, "S(0)", "R"),
    ({"dp": 2, "tp": 2}, {"tp": "S(0)"}, {"dp": "S(0)"}),
    ({"dp": 2, "tp": 2}, {"dp": "S(0)", "tp": "S(0)"}, "R"),
]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("mesh", "table", "indices"), MESHES, ids=["even", "uneven", "indices cut", "two axes"])
def test_all_ranks_raise_where_the_single_device_does(name: str, mesh: Any, table: Any, indices: Any) -> None:
    program = exported(name)
    made = tpcompiler.parallelize(program, mesh, {"table": table}, inputs={"i": indices})
    ranks = range(made.world_size)
    is_op_whole = any(sent.kind == "all_to_all" for sent in made.collectives())  # of some of the samples: it raises
    assert {asserts(made.rank_program(rank)) for rank in ranks} == {0 if is_op_whole else 1}
    outside = r"index -?\d+ is out of bounds" if is_op_whole else ": an index is outside of"
    raised = 0
    for last, is_refused in find_raising(name).items():
        if not is_refused:
            assert made.verify(call(last)).ok
            continue
        raised += 1
        with pytest.raises(InputsError, match=rf"all ranks raise too: .*{outside}"):
            made.verify(call(last))
    assert raised >= 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["embedding", "index_put", "scatter_add"])
def test_without_checks_no_rank_raises(name: str) -> None:
    """Negative control."""
    made = tpcompiler.parallelize(exported(name), 2, {"table": "S(0)"}, check_indices=False)
    assert {asserts(made.rank_program(rank)) for rank in range(2)} == {0}
    report = made.verify(call(ROWS))
    assert not report.ok
    assert "and no rank does" in str(report)


def test_a_rank_whose_part_is_right_answers() -> None:
    made = tpcompiler.parallelize(exported("index"), 2, {}, inputs={"i": "S(0)"}, outputs=["S(0)"])
    assert not made.collectives()
    with pytest.raises(InputsError, match="; rank 1 raises too: index 11 is out of bounds"):
        made.verify(call(ROWS))


def test_the_message_says_which_op_dim_and_line() -> None:
    made = tpcompiler.parallelize(exported("embedding"), 2, {"table": "S(0)"})
    (node,) = made.rank_program(0).graph.find_nodes(op="call_function", target=ASSERT)
    assert node.args[1].startswith("embedding: an index is outside of [0, 10], in a dim of size 11 (test_indices.py:")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "use",
    [
        lambda m, i, x: m.table[i.clamp(0, ROWS - 1)],
        lambda m, i, x: m.table[i % ROWS],
        lambda m, i, x: m.table[torch.arange(2, 5)],
        lambda m, i, x: m.table[x.topk(2, 1).indices],
        lambda m, i, x: m.table[x.argmax(1)],
        lambda m, i, x: F.embedding(x.sort(1).indices, m.table),
        lambda m, i, x: torch.take_along_dim(m.table, i.unsqueeze(-1), 0),  # which counts on from the start
        lambda m, i, x: F.embedding(i, m.table),  # `load` compares it
        lambda m, i, x: F.embedding(i.unsqueeze(0), m.table) + m.table[i],
    ],
)
def test_what_cannot_be_beyond_is_not_asserted(use: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(ROWS, 3))

        def forward(self, i: torch.Tensor, x: torch.Tensor) -> Any:
            return use(self, i, x)

    program = export(Model(), (torch.tensor([1, 2]), torch.randn(4, ROWS)))
    made = tpcompiler.parallelize(program, 2, {"table": "S(0)"})
    assert "embedding" in str(made.rank_program(0).graph) or "masked_fill" in str(made.rank_program(0).graph)
    assert asserts(made.rank_program(0)) == 0
    assert made.verify((torch.tensor([1, 2]), torch.randn(4, ROWS))).ok
    assert check_programs(read_ranks(made.only), made.manifest()).ok


def test_one_assert_for_one_index_and_the_wider_one_before_the_narrower() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.randn(ROWS, 3)), nn.Parameter(torch.randn(ROWS, 3))
            self.small = nn.Parameter(torch.randn(ROWS - 2, 3))

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            j = i + 1
            return F.embedding(j, self.one) + F.embedding(j, self.two) + self.two[j] + F.embedding(j, self.small)

    made = tpcompiler.parallelize(export(Model(), (torch.tensor([1, 2]),)), 2, dict.fromkeys(("*",), "S(0)"))
    found = made.rank_program(0).graph.find_nodes(op="call_function", target=ASSERT)
    assert [node.args[1].partition(", in")[0].rpartition("of ")[2] for node in found] == ["[0, 10]", "[0, 8]"]
    assert check_programs(read_ranks(made.only), made.manifest()).ok


def exported_again(program: ExportedProgram) -> ExportedProgram:
    return export(program.module(), call(1))


def written_and_read(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        written_and_read,
        exported_again,
        lambda program: program.run_decompositions({}),
        lambda program: program.run_decompositions(),
        lambda program: exported_again(program).run_decompositions(),
    ],
    ids=["from a file", "exported again", "functional", "core aten", "exported again, core aten"],
)
def test_what_is_made_of_a_program_keeps_the_assert(change: Callable[[ExportedProgram], ExportedProgram]) -> None:
    made = tpcompiler.parallelize(exported("gather"), 2, {"table": "S(0)"})
    programs = [change(made.rank_program(rank)) for rank in range(2)]
    assert [asserts(program) for program in programs] == [1, 1]
    failed: dict[int, Exception] = {}
    simulate(programs, [call(ROWS)] * 2, failed=failed)
    assert [str(failed[rank]).partition(" [")[0] for rank in range(2)] == ["gather: an index is outside of"] * 2
    assert len(simulate(programs, [call(ROWS - 1)] * 2)) == 2


def test_check_notices_an_assert_that_is_gone() -> None:
    made = tpcompiler.parallelize(exported("gather"), 2, {"table": "S(0)"})
    programs = [made.rank_program(rank) for rank in range(2)]
    assert check_programs(Artifact(programs, made.manifest()).written(), made.manifest()).ok
    for program in {id(each.graph): each for each in programs}.values():
        (node,) = program.graph.find_nodes(op="call_function", target=ASSERT)
        edit.erase(node)
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    report = check_programs(Artifact(programs, made.manifest()).written(), made.manifest())
    assert "must assert that positions are in [0, 10]" in str(report)


def test_check_notices_an_assert_of_another_range() -> None:
    made = tpcompiler.parallelize(exported("gather"), 2, {"table": "S(0)"})
    programs = [made.rank_program(rank) for rank in range(2)]
    for program in {id(each.graph): each for each in programs}.values():
        (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar)
        node.args = (node.args[0], ROWS)
        program.graph_module.recompile()
    assert not check_programs(Artifact(programs, made.manifest()).written(), made.manifest()).ok


@pytest.mark.slow
def test_check_notices_an_input_that_load_would_not_compare() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, 3)

        def forward(self, i: torch.Tensor) -> Any:
            return self.table(i)

    made = tpcompiler.parallelize(export(Model(), (torch.tensor([1, 2]),)), 2, {"table": "rowwise"})
    programs = read_ranks(made.only)
    manifest = made.manifest()
    assert check_programs(programs, manifest).ok
    assert manifest.inputs[0].values == [0, ROWS - 1]
    force_setattr(manifest.inputs[0], "values", None)
    assert not check_programs(programs, manifest).ok


@pytest.mark.slow
def test_an_artifact_without_checks_stays_so(tmp_path: Path) -> None:
    torch.export.save(exported("gather"), tmp_path / "model.pt2")
    (tmp_path / "plan.yaml").write_text("table: S(0)\n")
    for at, option in enumerate([(), ("--no-check-indices",)]):
        out, other = tmp_path / f"out{at}", tmp_path / f"other{at}"
        words = ("convert", tmp_path / "model.pt2", "--tp", "2", "--plan", tmp_path / "plan.yaml", "-o", out, *option)
        assert run_command(*words).exit_code == 0
        tpcompiler.open(out).reshard(3, other)
        for each in (out, other):
            assert tpcompiler.open(each).check().ok
            manifest = read_manifest(each)
            assert manifest.asked.check_indices is not bool(option)
            assert asserts(read_rank(open_program(each), 0)) == (not option)


WORKER = """
import json, sys, torch, tpcompiler
from pathlib import Path

here, calls = Path(sys.argv[1]), json.loads(sys.argv[2])
rows = torch.ones(2, 3)
found = {}
for path in sorted(here.glob("*.out")):
    module = tpcompiler.load(path)
    found[path.stem] = []
    for last in calls:
        try:
            module(torch.tensor([0, last]) - 1, rows)
            found[path.stem].append("")
        except Exception as error:
            found[path.stem].append(str(error).splitlines()[0])
(here / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_real_ranks_raise_from_files(tmp_path: Path) -> None:
    chosen = dict(enumerate(some(OPS, 3)))
    for at, name in chosen.items():
        tpcompiler.parallelize(exported(name), 2, {"table": "S(0)"}).save(tmp_path / f"{at}.out")
    (tmp_path / "worker.py").write_text(WORKER)
    ended = fork_ranks(2, tmp_path / "worker.py", tmp_path, json.dumps(LAST))
    assert ended.codes == (0, 0), ended.printed
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for at, name in chosen.items():
        assert [bool(text) for text in first[str(at)]] == list(find_raising(name).values())
        assert all("an index is outside of" in text for text in first[str(at)] if text)


ONE_RAISES = """
import sys, torch, torch.distributed as dist, tpcompiler

module = tpcompiler.load(sys.argv[1])
second = dist.get_rank() // 2  # of the two halves of the indices
module(torch.tensor([second]) - 1, torch.ones(2, 3))
module(torch.tensor([11 * second]) - 1, torch.ones(2, 3))
print("an answer")
"""


@pytest.mark.slow
def test_a_rank_with_its_own_indices_ends_the_others(tmp_path: Path) -> None:
    program = exported("embedding")
    mesh = {"dp": 2, "tp": 2}
    made = tpcompiler.parallelize(program, mesh, {"table": {"tp": "S(0)"}}, inputs={"i": {"dp": "S(0)"}})
    made.save(tmp_path / "out")
    (tmp_path / "worker.py").write_text(ONE_RAISES)
    ended = fork_ranks(4, tmp_path / "worker.py", tmp_path / "out", together=False)
    assert ended.codes == (1, 1, 1, 1), ended.printed
    for rank, text in enumerate(ended.printed):
        own = "RuntimeError: embedding: an index is outside of [0, 10]", "another rank has ended, or did not reach it"
        assert own[rank < 2] in text
    assert "an answer" not in "".join(ended.printed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", [lambda t, i: torch.take(t, i), lambda t, i: t.index_select(0, i), lambda t, i: t[i]])
def test_no_index_at_all(use: Callable[..., Any]) -> None:
    """The check, which draws indices for a body, draws none."""
    args = call(1)
    made = tpcompiler.parallelize(export(Table(lambda t, i, s: use(t, i[:0])), args), 2, {"table": "S(0)"})
    assert made.verify(args).ok
    assert not findings(made)
