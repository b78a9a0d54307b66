"""A loaded module has one mode: that of its export."""

from __future__ import annotations

from typing import Any

from tpcompiler.errors import UnsupportedError

MODE = "the program has the mode, train or eval, in which the model was exported"
TWO = "export the model in each mode, convert both programs together, and load them: they share parameters"


def refuse_mode(*_: Any) -> Any:
    """Refuse `train` and `eval` of a loaded module.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"a loaded module cannot be set to train or eval: {MODE}", help=TWO)
