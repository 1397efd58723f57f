"""A small real data set that every machine has: the docstrings of Python's standard library.

The modules are parsed, never imported.
"""

import ast
import inspect
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from pliant.errors import DataError

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write(directory: Path) -> Path:
    """The corpus as a JSONL file in `directory`, made unless it is there; always the same bytes.

    A line is `{"prompt": "json.dumps(obj, *, ...)\\n", "completion": docstring}`. Raises
    `DataError` where this Python has no sources.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    path = directory / f"stdlib-{sys.implementation.name}-{version}.jsonl"
    if path.exists():
        return path
    root = Path(sysconfig.get_path("stdlib"))
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records(root)]
    if not lines:
        raise DataError(
            f"stdlib:// needs the sources of Python's standard library, and {root} has none. Use a "
            "Python installed with its sources, or name data files.",
            path=root,
        )
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text("".join(lines), encoding="utf-8", errors="replace")
    unfinished.replace(path)
    return path


def records(root: Path) -> Iterator[dict[str, str]]:
    """One record per documented class, function and method of the modules below `root`, sorted by
    module and then in the order of the source."""
    for name, path in sorted(_modules(root)):
        for qualified_name, node in _definitions(_parse(path), name):
            docstring = ast.get_docstring(node, clean=False)
            text = inspect.cleandoc(docstring or "").strip()
            if text:
                yield {"prompt": f"{qualified_name}({_signature(node)})\n", "completion": text}


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        for file in files:
            if file.endswith(".py"):
                path = Path(directory, file)
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__"), path


def _parse(path: Path) -> ast.Module:
    """The module's syntax tree; an empty one where a file, such as a template, is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ast.Module(body=[], type_ignores=[])


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Documented]]:
    """Definitions at any depth of classes, `if` and `try`, but none local to a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, name)
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _definitions(child, prefix)


def _signature(node: Documented) -> str:
    if isinstance(node, ast.ClassDef):
        return ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
    return ast.unparse(node.args)
