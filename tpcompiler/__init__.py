"""tpcompiler: export once, run on N devices.

Public names are imported at their first use, so that `import tpcompiler` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpcompiler.runtime.artifact import VERSION as __version__

if TYPE_CHECKING:
    from tpcompiler.api import check as check
    from tpcompiler.api import check_budget as check_budget
    from tpcompiler.api import find_plan as find_plan
    from tpcompiler.api import parallelize as parallelize
    from tpcompiler.api import tensor_parallel_transformation as tensor_parallel_transformation
    from tpcompiler.api.doctor import diagnose as diagnose
    from tpcompiler.api.elastic import merge as merge
    from tpcompiler.api.elastic import reshard as reshard
    from tpcompiler.api.packaging import package as package
    from tpcompiler.api.verify_files import verify_artifact as verify_artifact
    from tpcompiler.api.verify_files import verify_package as verify_package
    from tpcompiler.ask.costs import CostTable as CostTable
    from tpcompiler.ask.costs import cost_artifact as cost_artifact
    from tpcompiler.ask.difference import ArtifactDifference as ArtifactDifference
    from tpcompiler.ask.difference import diff_artifacts as diff_artifacts
    from tpcompiler.ask.explanation import Explanation as Explanation
    from tpcompiler.ask.explanation import explain_artifact as explain_artifact
    from tpcompiler.checkpoint.cut import cut_checkpoint as cut_checkpoint
    from tpcompiler.checkpoint.dtensors import load_state_dict as load_state_dict
    from tpcompiler.checkpoint.dtensors import state_dict as state_dict
    from tpcompiler.checkpoint.load import load as load
    from tpcompiler.ir.mesh import Mesh as Mesh
    from tpcompiler.judge.compare.compare import VerifyReport as VerifyReport
    from tpcompiler.judge.rules.check_rule import RuleCheck as RuleCheck
    from tpcompiler.judge.rules.check_rule import check_rule as check_rule
    from tpcompiler.judge.rules.discover_rule import DiscoveredRule as DiscoveredRule
    from tpcompiler.judge.rules.discover_rule import discover_rule as discover_rule
    from tpcompiler.judge.rules.placements import sound_placements as sound_placements
    from tpcompiler.judge.sound.check import CheckReport as CheckReport
    from tpcompiler.parallel.parallel_program import ParallelProgram as ParallelProgram
    from tpcompiler.parallel.program_set import ProgramSet as ProgramSet
    from tpcompiler.plan import Plan as Plan
    from tpcompiler.rules.notation import RuleText as RuleText
    from tpcompiler.rules.register import register_rule as register_rule
    from tpcompiler.runtime.records import Collective as Collective
    from tpcompiler.runtime.weightless import save_weightless as save_weightless
    from tpcompiler.runtime.weightless import weightless as weightless
    from tpcompiler.views.tensor import visualize_sharding as visualize_sharding

_HOME = {
    "check": "tpcompiler.api",
    "check_budget": "tpcompiler.api",
    "CheckReport": "tpcompiler.judge.sound.check",
    "diagnose": "tpcompiler.api.doctor",
    "find_plan": "tpcompiler.api",
    "parallelize": "tpcompiler.api",
    "tensor_parallel_transformation": "tpcompiler.api",
    "verify_artifact": "tpcompiler.api.verify_files",
    "load": "tpcompiler.checkpoint.load",
    "cut_checkpoint": "tpcompiler.checkpoint.cut",
    "state_dict": "tpcompiler.checkpoint.dtensors",
    "load_state_dict": "tpcompiler.checkpoint.dtensors",
    "package": "tpcompiler.api.packaging",
    "verify_package": "tpcompiler.api.verify_files",
    "reshard": "tpcompiler.api.elastic",
    "merge": "tpcompiler.api.elastic",
    "weightless": "tpcompiler.runtime.weightless",
    "save_weightless": "tpcompiler.runtime.weightless",
    "register_rule": "tpcompiler.rules.register",
    "RuleText": "tpcompiler.rules.notation",
    "cost_artifact": "tpcompiler.ask.costs",
    "CostTable": "tpcompiler.ask.costs",
    "diff_artifacts": "tpcompiler.ask.difference",
    "ArtifactDifference": "tpcompiler.ask.difference",
    "explain_artifact": "tpcompiler.ask.explanation",
    "Explanation": "tpcompiler.ask.explanation",
    "Collective": "tpcompiler.runtime.records",
    "Mesh": "tpcompiler.ir.mesh",
    "ParallelProgram": "tpcompiler.parallel.parallel_program",
    "Plan": "tpcompiler.plan",
    "ProgramSet": "tpcompiler.parallel.program_set",
    "RuleCheck": "tpcompiler.judge.rules.check_rule",
    "VerifyReport": "tpcompiler.judge.compare.compare",
    "check_rule": "tpcompiler.judge.rules.check_rule",
    "DiscoveredRule": "tpcompiler.judge.rules.discover_rule",
    "discover_rule": "tpcompiler.judge.rules.discover_rule",
    "sound_placements": "tpcompiler.judge.rules.placements",
    "visualize_sharding": "tpcompiler.views.tensor",
} | dict.fromkeys(
    (
        "ArtifactError",
        "BudgetError",
        "InputsError",
        "InternalError",
        "LaunchError",
        "MachineError",
        "MeshError",
        "PlanError",
        "ProgramError",
        "RuleError",
        "ShardingError",
        "TpCompilerError",
        "TpCompilerWarning",
        "UnsupportedError",
    ),
    "tpcompiler.errors",
)

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpcompiler' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
