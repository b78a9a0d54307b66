"""Plans: the layers and parameters that a user wants sharded, each with a style. A dict, or a YAML or JSON file."""

from tpcompiler.plan.file import SEARCHES
from tpcompiler.plan.plan import Plan, PlanEntry
from tpcompiler.plan.share import join_plans, share_plan
from tpcompiler.plan.styles import Style

__all__ = ["SEARCHES", "Plan", "PlanEntry", "Style", "join_plans", "share_plan"]
