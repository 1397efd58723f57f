"""From a YAML file to a `JobSpec`: defaults < file < overlays < environment < `--set`."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from pliant.errors import SpecError
from pliant.spec.job import JobSpec

ENV_PREFIX = "PLIANT__"

Tree = dict[str, Any]


def load_spec(
    path: str | Path,
    overlays: Iterable[str | Path] = (),
    environ: Mapping[str, str] = os.environ,
    settings: Iterable[str] = (),
) -> JobSpec:
    """The job that `path` describes, changed by what is laid over it.

    `settings` are `training.lr=1e-4` pairs; variables such as `PLIANT__TRAINING__LR` mean the same.
    Raises `SpecError` where a layer cannot be read or the result is not a job.
    """
    tree = read_yaml(Path(path))
    for overlay in overlays:
        tree = merge(tree, read_yaml(Path(overlay)))
    for variable, text in sorted(environ.items()):
        if variable.startswith(ENV_PREFIX):
            keys = variable.removeprefix(ENV_PREFIX).lower().split("__")
            tree = merge(tree, _nest(keys, _parse(text, variable)))
    for setting in settings:
        tree = merge(tree, _read_setting(setting))
    return build_spec(tree, origin=str(path))


def build_spec(tree: Tree, origin: str) -> JobSpec:
    """A validated spec; every fault is named by its dotted key."""
    try:
        return JobSpec.model_validate(tree)
    except ValidationError as error:
        faults = [_sentence(fault) for fault in error.errors()]
        raise SpecError(f"{origin}: " + "\n".join(faults), faults=faults) from None


def read_yaml(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"There is no file {path}. Name an existing job spec.", path=path) from None
    except IsADirectoryError:
        raise SpecError(f"{path} is a directory. Name a YAML file in it.", path=path) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8 text. A job spec is YAML.", path=path) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise SpecError(f"{path}{place}: {problem}. A job spec is YAML.", path=path) from None
    if not isinstance(tree, dict):
        raise SpecError(f"{path} holds no mapping. A job spec starts with `name:`.", path=path)
    return tree


def merge(base: Tree, over: Tree) -> Tree:
    """`over` laid on `base`: mappings merge, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _read_setting(setting: str) -> Tree:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise SpecError(
            f"--set {setting!r} is not KEY=VALUE. Write, for example, training.lr=1e-4."
        )
    return _nest(key.strip().split("."), _parse(text, f"--set {key}"))


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SpecError(f"{origin}: {text!r} is not a YAML value. Quote it.") from None


def _nest(keys: list[str], value: Any) -> Tree:
    for key in reversed(keys):
        value = {key: value}
    return value


def _sentence(fault: Any) -> str:
    path = [part for part in fault["loc"] if isinstance(part, (str, int))]
    key = ".".join(str(part) for part in path)
    if fault["type"] == "extra_forbidden":
        return f"{key} is not a key of a job spec.{_did_you_mean(path)}"
    if fault["type"] == "missing":
        return f"{key} is missing."
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{key or 'the spec'} {message}."
    return f"{key} is {fault['input']!r}. {message}."


def _did_you_mean(path: list[str | int]) -> str:
    known = sorted(_fields_at(path[:-1]))
    name = str(path[-1])
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {'.'.join([*map(str, path[:-1]), close[0]])}?"
    elsewhere = [dotted for dotted in all_keys() if dotted.split(".")[-1] == name]
    if elsewhere:
        return f" Did you mean {elsewhere[0]}?"
    return f" Known here: {', '.join(known)}."


def _fields_at(path: list[str | int]) -> list[str]:
    section: type[BaseModel] | None = JobSpec
    for part in path:
        if section is None or isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        section = _section_of(field.annotation) if field else None
    return list(section.model_fields) if section else []


def all_keys(section: type[BaseModel] = JobSpec, prefix: str = "") -> list[str]:
    """Every dotted key of a job spec."""
    keys = []
    for name, field in section.model_fields.items():
        below = _section_of(field.annotation)
        keys.append(prefix + name)
        if below is not None:
            keys += all_keys(below, f"{prefix}{name}.")
    return keys


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
