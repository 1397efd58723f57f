from functools import partial

import pytest

from fakes.checkpoints import commit as commit_checkpoint


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def ledger_root(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture
def commit(root, ledger_root):
    """Commits the checkpoint of a step of a small state and returns its directory."""
    return partial(commit_checkpoint, root, ledger_root)
