"""The values of a record by the names pliant knows them by; every error says where they lie."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pliant.data.sources import Record
from pliant.errors import DataError

TEXT_PART = "text"


@dataclass(frozen=True)
class Fields:
    """A record, or one message of it."""

    record: Record
    columns: Mapping[str, str]
    """The column that holds a field, where it is called otherwise."""
    shape: str
    where: str

    def column(self, name: str) -> str:
        return self.columns.get(name, name)

    def value(self, name: str) -> Any:
        column = self.column(name)
        try:
            return self.record[column]
        except KeyError:
            raise DataError(
                f"{self.where} has no column {column}, which the shape {self.shape} needs; "
                f"it has {listed(self.record)}. Repair the record, or set data.shape or "
                "data.columns.",
                where=self.where,
                column=column,
            ) from None

    def optional(self, name: str) -> Any:
        """The value, or None where there is none."""
        return self.record.get(self.column(name))

    def text(self, name: str) -> str:
        return self.checked_text(name, self.value(name))

    def optional_text(self, name: str) -> str:
        value = self.optional(name)
        return "" if value is None else self.checked_text(name, value)

    def content(self, name: str) -> str:
        """Text, or a list of text parts, which are joined."""
        value = self.value(name)
        if not isinstance(value, list):
            return self.checked_text(name, value)
        return "".join(self._part(name, part) for part in value)

    def within(self, name: str) -> list["Fields"]:
        """The messages of a chat, each as fields."""
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, value, "a list of messages")
        return [
            replace(self, record=item, where=f"{self.where}, message {number},")
            for number, item in enumerate(value, 1)
        ]

    def wrong(self, name: str, value: Any, needed: str) -> DataError:
        column = self.column(name)
        return DataError(
            f"{self.where} has {column} {shown(value)}, and {needed} was needed. Repair the "
            "record, or set data.shape or data.columns.",
            where=self.where,
            column=column,
        )

    def checked_text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong(name, value, "text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.wrong(name, value, "text without half characters (surrogates)") from None
        return value

    def _part(self, name: str, part: Any) -> str:
        kind = part.get("type", TEXT_PART) if isinstance(part, dict) else None
        if kind != TEXT_PART:
            raise self.wrong(name, part, f"a part of type {TEXT_PART}, the only one that is read,")
        return self.checked_text(name, part.get("text"))


def listed(record: Record) -> str:
    return ", ".join(map(str, record)) or "none"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
