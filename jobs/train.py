"""The entry point for `ray job submit`: `python jobs/train.py SPEC [options of pliant run]`."""

import sys

from pliant.cli.main import entry

entry(["run", *sys.argv[1:]])
