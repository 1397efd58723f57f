"""What every section of a job spec has in common."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]


class Section(BaseModel):
    """A frozen section; unknown keys are errors. A field's docstring is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


def _number(value: object) -> object:
    """`"8"` and `8`, `"1e-4"` and `1e-4` mean the same number (YAML 1.1 reads 1e-4 as a string).

    YAML also reads `on` and `yes` as true, which is not the number 1.
    """
    if isinstance(value, bool):
        raise ValueError(f"is {str(value).lower()}, and a number is needed. Write one")
    if not isinstance(value, str):
        return value
    text = value.strip().replace("_", "")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return value


def _whole(value: object) -> object:
    """As `_number`; a float without a fraction, such as 5e8, is a whole number."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
One = Annotated[Literal[1], BeforeValidator(_whole)]
ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)]
IntOrAuto = Annotated[int | Auto, BeforeValidator(_whole)]
