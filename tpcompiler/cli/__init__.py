"""The command line, a file for each group of commands."""

from tpcompiler.cli.app import main as main
from tpcompiler.cli.options import app as app
