"""`python -m pliant`."""

from pliant.cli.main import entry

entry()
