"""An error says the same in the process that shows it as in the one that raised it."""

import copy
import inspect
import pickle

import pytest

from pliant import errors
from pliant.errors import PliantError

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PliantError)
]
EXIT_CODES = {
    "PliantError": 3,
    "UserError": 2,
    "SpecError": 2,
    "DataError": 2,
    "ModelError": 2,
    "CheckpointMismatch": 2,
    "NoSpace": 2,
    "ClusterError": 2,
    "JobError": 3,
    "FilesDamaged": 3,
    "RanksDisagree": 3,
    "TrainingDiverged": 3,
    "TrainingRewinds": 3,
    "Interrupted": 4,
    "NegativeVerdict": 5,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "carry", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_an_error_keeps_its_message_and_facts(kind, carry):
    error = carry(kind("3 of 4 came", found=3, needed=[4], path=None))
    assert type(error) is kind
    assert (str(error), error.message) == ("3 of 4 came", "3 of 4 came")
    assert (error.found, error.needed, error.path) == (3, [4], None)
    assert error.exit_code == kind.exit_code


def test_every_kind_has_its_exit_code():
    assert {kind.__name__: kind.exit_code for kind in KINDS} == EXIT_CODES


@pytest.mark.parametrize("name", EXIT_CODES)
def test_the_tree_in_the_documentation_names_every_kind(name):
    assert f" {name} " in errors.__doc__.replace("\n", " ")


def test_a_fact_that_is_not_there_is_an_attribute_that_is_not_there():
    with pytest.raises(AttributeError, match="step"):
        _ = PliantError("x").step
    assert not hasattr(PliantError.__new__(PliantError), "step")
