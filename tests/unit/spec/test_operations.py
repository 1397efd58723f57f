"""Where checkpoints lie must mean the same on every node, and a recorded spec holds no secret."""

import pytest

from fakes.jobs import tiny_spec
from pliant.errors import SpecError


@pytest.mark.parametrize("place", ["/shared/runs", "s3://bucket/prefix?region=eu", "memory://x"])
def test_a_storage_is_an_absolute_path_or_a_uri(place):
    assert tiny_spec({"checkpoint": {"storage": place}}).checkpoint.storage == place


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("runs", "every node would look for elsewhere. Give an absolute path"),
        ("~/runs", "every node would look for elsewhere"),
        ("s3://key:secret@bucket/x", "holds a login"),
    ],
)
def test_another_storage_is_refused(place, sentence):
    with pytest.raises(SpecError, match=sentence):
        tiny_spec({"checkpoint": {"storage": place}})
