"""From a YAML file to a `JobSpec`: defaults < file < overlays < environment < `--set`."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

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
            tree = merge(tree, _read_variable(variable, text))
    for setting in settings:
        tree = merge(tree, _read_setting(setting))
    return build_spec(tree, origin=str(path))


def build_spec(tree: Tree, origin: str) -> JobSpec:
    """A validated spec; every fault is named by its dotted key."""
    try:
        return JobSpec.model_validate(tree)
    except ValidationError as error:
        faults = _sentences(error.errors())
        raise SpecError(f"{origin}: " + "\n".join(faults), faults=faults) from None


def read_yaml(path: Path) -> Tree:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
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
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.", path=path) from None
    except ValueError as error:  # a date or number that is none: YAML reads 2024-13-45 as a date
        raise SpecError(f"{path}: {error}. Quote what is meant as text.", path=path) from None
    if not isinstance(tree, dict):
        raise SpecError(f"{path} holds no mapping. A job spec starts with `name:`.", path=path)
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def merge(base: Tree, over: Tree) -> Tree:
    """`over` laid on `base`: mappings merge, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _read_variable(variable: str, text: str) -> Tree:
    section, *names = variable.removeprefix(ENV_PREFIX).split("__")
    if section.lower() == "env" and names:  # a variable itself, which tells capitals apart
        keys = ["env", "__".join(names)]
    else:
        keys = [section.lower(), *map(str.lower, names)]
    return _nest(keys, _value(keys, text, variable))


def _read_setting(setting: str) -> Tree:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise SpecError(
            f"--set {setting!r} is not KEY=VALUE. Write, for example, training.lr=1e-4."
        )
    keys = key.strip().split(".")
    return _nest(keys, _value(keys, text, f"--set {key}"))


def _value(keys: list[str], text: str, origin: str) -> Any:
    """YAML, but for a variable of `env`, which is text: 03 and 12:30 are to stay what they are."""
    if keys[0] == "env" and len(keys) > 1:
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise SpecError(f"{origin}: {text!r} is not a YAML value. Quote it.") from None


def _nest(keys: list[str], value: Any) -> Tree:
    for key in reversed(keys):
        value = {key: value}
    return value


def _sentences(faults: Iterable[Any]) -> list[str]:
    """One for each key; where a key has alternatives, pydantic reports a fault for each of them."""
    found: dict[str, str] = {}
    for fault in faults:
        path = _without_alternative(fault["loc"])
        key = ".".join(map(str, path))
        if key not in found:
            found[key] = _sentence(fault, key, path)
        else:
            found[key] += f" Or: {_message(fault)}."
    return list(found.values())


def _without_alternative(loc: tuple[str | int, ...]) -> list[str | int]:
    """A location without the part that names the tried alternative, such as `list[str]`."""
    section: type[BaseModel] | None = JobSpec
    for depth, part in enumerate(loc):
        field = section.model_fields.get(str(part)) if section else None
        if field is not None:
            section = section_of(field.annotation)
            alternatives = [kind for kind in get_args(field.annotation) if kind is not type(None)]
            is_union = get_origin(field.annotation) in (Union, UnionType)
            if section is None and is_union and len(alternatives) > 1:
                return [*loc[: depth + 1], *loc[depth + 2 :]]
    return list(loc)


def _sentence(fault: Any, key: str, path: list[str | int]) -> str:
    if fault["type"] == "extra_forbidden":
        return f"{key} is not a key of a job spec.{_did_you_mean(path)}"
    if fault["type"] == "missing":
        return f"{key} is missing."
    if fault["type"] == "value_error":
        return f"{key or 'the spec'} {_message(fault)}."
    return f"{key} is {fault['input']!r}. {_message(fault)}."


def _message(fault: Any) -> str:
    return str(fault["msg"]).removeprefix("Value error, ")


def _did_you_mean(path: list[str | int]) -> str:
    """A slip of the pen, else the same name in another section, else whatever is similar here."""
    known = sorted(_fields_at(path[:-1]))
    name = str(path[-1])
    here = ".".join(map(str, path[:-1]))
    similar = [f"{here}.{key}".lstrip(".") for key in difflib.get_close_matches(name, known, n=1)]
    slip = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    elsewhere = [dotted for dotted in all_keys() if dotted.split(".")[-1] == name]
    meant = similar if slip else elsewhere + similar
    if meant:
        return f" Did you mean {meant[0]}?"
    return f" Known here: {', '.join(known)}."


def _fields_at(path: list[str | int]) -> list[str]:
    section: type[BaseModel] | None = JobSpec
    for part in path:
        if section is None or isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        section = section_of(field.annotation) if field else None
    return list(section.model_fields) if section else []


def all_keys(section: type[BaseModel] = JobSpec, prefix: str = "") -> list[str]:
    """Every dotted key of a job spec."""
    keys = []
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        keys.append(prefix + name)
        if below is not None:
            keys += all_keys(below, f"{prefix}{name}.")
    return keys


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, or holds a list of; None for a plain value."""
    candidates = (annotation, *get_args(annotation))
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
