"""A user's own code, named in a spec by its dotted path."""

import importlib
import sys
from pathlib import Path
from typing import Any

from pliant.errors import SpecError


def load_dotted(path: str, key: str) -> Any:
    """The object that `path` ("package.module.name") names; `key` is the spec key that asked.

    The working directory is searched too, as it is by `python -m`. Raises `SpecError`.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise SpecError(f"{key} is {path!r}, which names no module. Write package.module.name.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(
            f"{key} is {path!r}, and {module_name} cannot be imported: {error}. Install it, or "
            "start pliant where it lies.",
            path=path,
        ) from None
    try:
        return getattr(module, name)
    except AttributeError:
        raise SpecError(
            f"{key} is {path!r}, and {module_name} has no {name}. Check the spelling.", path=path
        ) from None
