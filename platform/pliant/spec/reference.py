"""The reference page of the job spec, generated from the fields' own documentation.

`python -m pliant.spec.reference PAGE` writes it.
"""

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pliant.spec.job import JobSpec
from pliant.spec.load import section_of

_HEAD = """# The job spec

One YAML file is one job. Generated from the code by `make docs`; an editor that knows JSON schemas
can use [job-spec.schema.json](job-spec.schema.json).

Layers, each over the one before: defaults, the file, `--overlay` files, environment variables
(`PLIANT__TRAINING__LR=1e-4`), `--set training.lr=1e-4`. A key that does not exist is an error. What
says "auto" is decided before anything starts; `pliant check SPEC` prints the result.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD, _section("", JobSpec)]
    for name, field in JobSpec.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts.append(_section(name, section))
    return "\n".join(parts)


def _section(name: str, section: type[BaseModel]) -> str:
    title = f"## `{name}`" if name else "## Top level"
    summary = _one_line(section.__doc__)
    rows = "\n".join(_rows(section, f"{name}." if name else ""))
    return (
        f"{title}\n\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n"
    )


def _rows(section: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None and prefix:
            kind = "list of" if get_origin(field.annotation) is list else "section"
            rows.append(f"| `{prefix}{name}` | {kind} | | {_one_line(below.__doc__)} |")
            rows += _rows(below, f"{prefix}{name}.")
        elif below is None:
            cells = (_type(field.annotation), _default(field), _one_line(field.description))
            rows.append(f"| `{prefix}{name}` | " + " | ".join(cells) + " |")
    return rows


def _type(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    arguments = get_args(annotation)
    if not arguments:
        return str(getattr(annotation, "__name__", annotation))
    inner = [_type(argument) for argument in arguments if not callable_validator(argument)]
    origin = get_origin(annotation)
    if origin in (list, dict, tuple):
        return f"{origin.__name__} of {', '.join(inner)}"
    return " or ".join(inner)


def callable_validator(argument: Any) -> bool:
    """Whether an argument of `Annotated` is a validator, not a type."""
    return type(argument).__module__.startswith("pydantic")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "" if field.default is None else f"`{field.default}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
