"""Translation validation of written programs: fold each back into the single-device program that it claims to share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import quiet_torch
from tpcompiler.artifact.program import ArtifactProgram, find_state_apart, stages_by_whole
from tpcompiler.errors import ArtifactError, InternalError, TpCompilerError, one_line, reason
from tpcompiler.ir import edit
from tpcompiler.ir.buckets import take_apart
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.shares import mesh_of
from tpcompiler.judge.sound.agreement import check_agreement, check_alike
from tpcompiler.judge.sound.bodies import check_body
from tpcompiler.judge.sound.boundary import check_calls, check_outputs
from tpcompiler.judge.sound.changes import ChangeRunner
from tpcompiler.judge.sound.collectives import check_collectives
from tpcompiler.judge.sound.folded import Folded, Results, folded
from tpcompiler.judge.sound.model import check_model
from tpcompiler.judge.sound.moves import check_changes
from tpcompiler.judge.sound.ops import check_ops
from tpcompiler.judge.sound.region import row_of
from tpcompiler.judge.sound.stages import check_stages
from tpcompiler.judge.sound.state import check_numbers, check_shared, check_state, check_symmetric
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.judge.sound.written import WrittenRank, read_ranks
from tpcompiler.runtime.artifact import MODEL, Manifest, lacks_weights, misfit_of, rank_file
from tpcompiler.runtime.records import Record
from tpcompiler.terminal.tables import Shown


class CheckReport(Record, Shown, frozen=True, omit_defaults=False):
    """The verdict of a check."""

    ok: bool  # true if all holds
    counts: dict[str, int]  # how much was checked, by kind
    findings: list[str]  # the first violation of each kind of check
    weights_compared: bool = False  # true if the weights were compared with a model's

    def __str__(self) -> str:
        checked = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        return "\n".join(
            [f"{'sound' if self.ok else 'NOT SOUND'}: {checked}", *(f"  {one_line(each)}" for each in self.findings)]
        )


@collector_rests()
def check_artifact(
    artifact: Mapping[str, ArtifactProgram],
    *,
    originals: Mapping[str, ExportedProgram],
    prepare: Callable[[ExportedProgram], ExportedProgram],
    canonical: Callable[[ExportedProgram], CanonicalProgram],
) -> CheckReport:
    """Check the programs of an artifact; with the single-device program of one, by name, also its weights.

    `prepare` turns a program for any device into one whose ops can be evaluated here. `canonical` brings the model in
    the artifact into the form that ranks fold to.

    Raises:
        ArtifactError: a file is missing, damaged or, without trust, could run code.
    """
    manifests = {name: program.manifest for name, program in artifact.items()}
    models = {name: canonical(program.original()) for name, program in artifact.items()}
    programs, reports = {}, {}
    for name, program in artifact.items():
        programs[name] = read_ranks(program, prepare)
        siblings = program.beside()
        reports[name] = check_programs(programs[name], manifests[name], originals.get(name), siblings, models[name])
    if len(artifact) == 1:
        return reports.popitem()[1]
    findings = [f"{name}: {finding}" for name, report in reports.items() for finding in report.findings]
    handed = 0
    if misfit := misfit_of(manifests):
        findings.append(misfit)
    else:
        with _noting(findings, None):
            check_shared(programs, manifests)
        findings += [apart] if (apart := find_state_apart(artifact)) else []
        for stages in stages_by_whole(artifact).values():
            with _noting(findings, None):
                whole = stages[0].whole_program()
                handed += _count_handed_over(stages, models, canonical(whole) if whole is not None else None)
    counts = sum((Counter(report.counts) for report in reports.values()), Counter())
    counts.update({"values handed over": handed} if handed else {})
    return CheckReport(not findings, dict(counts), findings, bool(originals))


def _count_handed_over(
    stages: Sequence[ArtifactProgram], models: Mapping[str, CanonicalProgram], whole: CanonicalProgram | None
) -> int:
    """Check that the stages of a program are the whole that the first has; return the number of values between them."""
    if whole is None:
        raise Unsound(None, f"{stages[0].title} lacks the program that was cut into stages")
    parts = [(each.manifest.stage, models[each.name]) for each in stages]
    return check_stages([(record, program) for record, program in parts if record], whole)


def read_proved_model(
    program: ArtifactProgram,
    *,
    prepare: Callable[[ExportedProgram], ExportedProgram],
    canonical: Callable[[ExportedProgram], CanonicalProgram],
) -> ExportedProgram:
    """Return the single-device program, if it is the one that all ranks fold to.

    Raises:
        ArtifactError: as `check_artifact`; the ranks fold to another program, or to none.
    """
    original, ranks = program.original(), read_ranks(program, prepare)
    findings: list[str] = []
    with quiet_torch():
        _check_folds(ranks, program.manifest, canonical(original), findings, Counter())
    if findings:
        raise ArtifactError(
            f"{program.title}: {MODEL} is not what the ranks run: {findings[0]}",
            help="copy the artifact again, or convert the model again",
        )
    return original


def check_programs(
    ranks: Sequence[WrittenRank],
    manifest: Manifest,
    original: ExportedProgram | None = None,
    siblings: Mapping[str, Manifest] | None = None,
    model: CanonicalProgram | None = None,
) -> CheckReport:
    """Check the programs of all ranks against their claims and the manifest.

    Each rank's graph is folded back: its changes of sharding are left out, and the calls that compute a share of one
    call are replaced by that call. All ranks must fold to the same program. The ops' rules prove that a rank computes
    its share, by a call or by the rule's body; changes, which are not ops, are run. Source of the idea: Pnueli, Siegel
    and Singerman, "Translation validation", TACAS 1998.

    Args:
        original: the single-device program, whose weights are compared with the ranks' shares.
        siblings: the manifests of other programs that store tensors of this one.
        model: the model in the artifact, in canonical form, to which all ranks must fold.
    """
    mesh = mesh_of(manifest)
    findings: list[str] = []
    counts = Counter({"ranks": len(ranks), "graphs": len({id(each.program) for each in ranks})})
    if len(ranks) != mesh.world_size:
        return CheckReport(False, dict(counts), [f"there are {len(ranks)} programs for {mesh.world_size} ranks"])
    with quiet_torch():  # it logs calls that fail, which are findings here
        _check_folds(ranks, manifest, model, findings, counts)
    with _noting(findings, None):
        check_collectives([each.program for each in ranks], manifest)
        counts.update(collectives=sum(edit.is_collective(node) for node in ranks[0].program.graph.nodes))
    kept = model.source if model is not None else None
    models = [each for each in (original, kept) if each is not None]
    with _noting(findings, None):
        check_calls(ranks, manifest, models)
    with _noting(findings, None):
        if not lacks_weights(manifest):
            check_numbers(ranks, manifest)
    with _noting(findings, None):
        check_symmetric(ranks, manifest)
    with _noting(findings, None):
        check_state(ranks, manifest, mesh, models, siblings or {})
        counts["tensors without values" if lacks_weights(manifest) else "tensors"] = len(manifest.tensors)
    return CheckReport(not findings, dict(counts), findings, original is not None)


def _check_folds(
    ranks: Sequence[WrittenRank],
    manifest: Manifest,
    model: CanonicalProgram | None,
    findings: list[str],
    counts: Counter[str],
) -> None:
    """Check that every rank's program is a share of one program, and that this is the model."""
    apart = {id(each.program): take_apart(each.program) for each in ranks}
    ranks = [replace(each, program=apart[id(each.program)]) for each in ranks]
    programs = _folded(ranks, manifest, mesh_of(manifest), findings, counts)
    if len(programs) < len(ranks):
        return
    with _noting(findings, None):
        check_agreement(programs)
        _check_regions(programs, [row_of(manifest, rank) for rank in range(len(ranks))], findings, counts)
    counts.update(ops=len(programs[0].ops))
    if not findings:
        with _noting(findings, None):
            check_alike(programs)
    if model is not None and not findings:
        with _noting(findings, None, programs):
            if believed := check_model(programs[0], model):
                counts["pieces that cannot be compared here"] = believed


def _folded(
    ranks: Sequence[WrittenRank], manifest: Manifest, mesh: Mesh, findings: list[str], counts: Counter[str]
) -> list[Folded]:
    """Fold and check the program of every rank, op by op; a program of several ranks is checked once."""
    known: dict[int, Folded] = {}
    results: Results = {}
    programs = []
    for rank, each in enumerate(ranks):
        with _noting(findings, rank):
            program = known.get(id(each.program))
            if program is None:
                program = folded(each.program, manifest, mesh, results)
                check_changes(program)
                check_outputs(program, manifest)
            if id(each.program) not in known or not program.is_even:
                with no_new_guards(each.program.graph):
                    if believed := check_ops(program, rank):
                        counts["ops that cannot be run here"] = max(believed, counts["ops that cannot be run here"])
            known[id(each.program)] = program
            programs.append(program)
    return programs


def _check_regions(
    ranks: Sequence[Folded], rows: Sequence[Sequence[int]], findings: list[str], counts: Counter[str]
) -> None:
    """Check that regions, with each rank's numbers, are what they claim."""
    changes = ChangeRunner(ranks, rows)
    for name in dict.fromkeys(name for each in ranks for name in each.regions):
        if not all(name in each.regions for each in ranks):
            findings.append(f"not all ranks have {name}")
            continue
        with _noting(findings, None, ranks):
            if ranks[0].regions[name].call is None:
                changes.check(name)
            else:
                for rank, each in enumerate(ranks):
                    check_body(each, each.regions[name], rank, rows[rank])
            counts.update(regions=1)


@contextmanager
def _noting(findings: list[str], rank: int | None, ranks: Sequence[Folded] = ()) -> Iterator[None]:
    """Record an `Unsound` error as a finding, with file, node and source line; `ranks` may own the node.

    Any other error is a defect of the check, which must be mistaken neither for a sound file nor for an unsound one.
    """
    try:
        yield
    except Unsound as error:
        graph = error.node.graph if error.node is not None else None
        whose = (at for at, each in enumerate(ranks) if each.program.graph is graph)
        findings.append(_where(error.node, next(whose, rank)) + error.text)
    except TpCompilerError as error:
        findings.append(f"{_where(None, rank)}cannot be checked: {error.message}")
    except InternalError:
        raise
    except Exception as error:
        raise InternalError(
            f"{_where(None, rank)}the check failed, and proves nothing: {type(error).__name__}: {reason(error)}",
            help="report this with the artifact, and do not run it unless `verify` finds it equal to the model",
        ) from error


def _where(node: fx.Node | None, rank: int | None) -> str:
    words = [] if rank is None else [rank_file(rank)]
    if node is not None:
        line = edit.source_line(node)
        words.append(f"'{node.name}' ({node.target}{', ' + line if line else ''})")
    return ": ".join(words) + (" " if node is not None else ": " if words else "")
