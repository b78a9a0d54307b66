"""The command line, a file for each group of commands."""

from tpcompiler.cli.commands import main as main
from tpcompiler.cli.options import app as app
