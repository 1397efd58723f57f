"""The generated pages are those that the code would generate."""

import json
from pathlib import Path

from pliant.spec import JobSpec
from pliant.spec.load import all_keys
from pliant.spec.reference import page

DOCS = Path(__file__).parents[3] / "docs"


def test_the_reference_page_is_up_to_date_and_has_every_key() -> None:
    text = (DOCS / "job-spec.md").read_text()
    assert text == page()
    for key in all_keys():
        assert f"`{key}`" in text


def test_every_field_has_a_meaning() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.split("|")[-2].strip() == ""] == []


def test_the_schema_for_editors_is_up_to_date() -> None:
    schema = json.loads((DOCS / "job-spec.schema.json").read_text())
    assert schema == json.loads(json.dumps(JobSpec.model_json_schema()))
