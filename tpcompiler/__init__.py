"""tpcompiler: export once, run on N devices.

Public names are imported at their first use, so that `import tpcompiler` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpcompiler.errors import ArtifactError as ArtifactError
from tpcompiler.errors import BudgetError as BudgetError
from tpcompiler.errors import InputsError as InputsError
from tpcompiler.errors import InternalError as InternalError
from tpcompiler.errors import LaunchError as LaunchError
from tpcompiler.errors import MachineError as MachineError
from tpcompiler.errors import MeshError as MeshError
from tpcompiler.errors import PlanError as PlanError
from tpcompiler.errors import ProgramError as ProgramError
from tpcompiler.errors import RuleError as RuleError
from tpcompiler.errors import ShardingError as ShardingError
from tpcompiler.errors import TpCompilerError as TpCompilerError
from tpcompiler.errors import TpCompilerWarning as TpCompilerWarning
from tpcompiler.errors import UnsupportedError as UnsupportedError
from tpcompiler.runtime.artifact import VERSION as __version__

if TYPE_CHECKING:
    from tpcompiler.api import find_plan as find_plan
    from tpcompiler.api import parallelize as parallelize
    from tpcompiler.api import tensor_parallel_transformation as tensor_parallel_transformation
    from tpcompiler.api.diagnose import diagnose as diagnose
    from tpcompiler.api.parallel_program import ParallelProgram as ParallelProgram
    from tpcompiler.api.parallel_program import open as open
    from tpcompiler.api.redistribute import redistribute as redistribute
    from tpcompiler.api.training import export_training as export_training
    from tpcompiler.checkpoint.load import load as load
    from tpcompiler.ir.mesh import Mesh as Mesh
    from tpcompiler.judge.rules.check_rule import check_rule as check_rule
    from tpcompiler.judge.rules.discover_rule import discover_rule as discover_rule
    from tpcompiler.judge.rules.placements import sound_placements as sound_placements
    from tpcompiler.plan.plan import Plan as Plan
    from tpcompiler.rules.notation import RuleText as RuleText
    from tpcompiler.rules.register import register_rule as register_rule
    from tpcompiler.runtime.handover import join_handover as join_handover
    from tpcompiler.runtime.weightless import save_weightless as save_weightless
    from tpcompiler.runtime.weightless import weightless as weightless

_HOME = {
    "parallelize": "tpcompiler.api",
    "open": "tpcompiler.api.parallel_program",
    "ParallelProgram": "tpcompiler.api.parallel_program",
    "load": "tpcompiler.checkpoint.load",
    "join_handover": "tpcompiler.runtime.handover",
    "export_training": "tpcompiler.api.training",
    "redistribute": "tpcompiler.api.redistribute",
    "find_plan": "tpcompiler.api",
    "diagnose": "tpcompiler.api.diagnose",
    "tensor_parallel_transformation": "tpcompiler.api",
    "Plan": "tpcompiler.plan.plan",
    "Mesh": "tpcompiler.ir.mesh",
    "weightless": "tpcompiler.runtime.weightless",
    "save_weightless": "tpcompiler.runtime.weightless",
    "register_rule": "tpcompiler.rules.register",
    "RuleText": "tpcompiler.rules.notation",
    "check_rule": "tpcompiler.judge.rules.check_rule",
    "discover_rule": "tpcompiler.judge.rules.discover_rule",
    "sound_placements": "tpcompiler.judge.rules.placements",
}
__all__ = [*_HOME, "__version__", *(name for name in globals() if name.endswith(("Error", "Warning")))]

if not TYPE_CHECKING:  # there, a name that does not exist is an error

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'tpcompiler' has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
