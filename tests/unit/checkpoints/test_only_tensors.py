"""A checkpoint holds tensors and JSON; nothing that reads or writes one can unpickle."""

import ast
from pathlib import Path

import pytest

import pliant

PACKAGE = Path(pliant.__file__).parent
MODULES = [
    *sorted((PACKAGE / "checkpoints").glob("*.py")),
    *(PACKAGE / "training" / f"{name}.py" for name in ("state", "commit", "holders", "export")),
    PACKAGE / "cli" / "checkpoints.py",
]
PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def unpicklers(source):
    """What of `source` could unpickle a file: modules, and functions of torch and numpy."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in PICKLERS)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in PICKLERS:
                yield node.module
            elif node.module in ("torch", "numpy"):
                yield from (f"{node.module}.{a.name}" for a in node.names if a.name == "load")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("torch.load", "np.load", "numpy.load"):
                yield name


@pytest.mark.parametrize("path", [p for p in MODULES if p.exists()], ids=lambda path: path.stem)
def test_nothing_that_reads_a_checkpoint_can_unpickle(path):
    assert list(unpicklers(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "def f():\n    import torch\n    return torch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_what_unpickles_would_be_found(source):
    assert list(unpicklers(source))
