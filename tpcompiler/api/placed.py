"""Place programs within the memory of a rank, as all that compares meshes does."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tpcompiler.ir.mesh import Mesh
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.parallel.converted_program import ConvertedProgram
from tpcompiler.parallel.pipeline import convert_programs
from tpcompiler.solver.estimate import Memory, measure_memory
from tpcompiler.solver.report import TooLarge
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Aim


class Placed(NamedTuple):
    """Programs as they are placed, the least memory of the first rank, and the searches by their kind."""

    found: Solution
    made: Mapping[str, ConvertedProgram]
    least: Memory
    searches: Counter[str]


def place_within(conversions: Mapping[str, Conversion], mesh: Mesh, aim: Aim, limit: int) -> Placed:
    """Place programs on a mesh without a limit; if that is too large for the first rank, within the limit if possible.

    Raises:
        ShardingError, UnsupportedError: no placement suits the mesh.
    """
    over = {name: dataclasses.replace(each, mesh=mesh) for name, each in conversions.items()}
    found, made = convert_programs(over, aim)
    least, searches = measure_memory(found), Counter(found.searches)
    if least.total > limit:
        try:
            found, made = convert_programs(over, dataclasses.replace(aim, limit=limit))
            least = measure_memory(found)
            searches.update(found.searches)
        except TooLarge as error:
            least = error.least
            searches.update(error.searches)
    return Placed(found, made, least, searches)
