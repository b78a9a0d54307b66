"""`python -m tests.zoo [NAME ...]`: the table of the zoo's models, all or those named."""

from __future__ import annotations

import sys

from tests.zoo.table import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
