"""An object store in memory that fails now and then, for pyarrow and fsspec to open."""

from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """`flaky://`: its next operations fail with the errors in `errors`, one each."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    errors: ClassVar[list[OSError]] = []
    opened: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        self.opened.append(f"{mode} {path}")
        if self.errors:
            raise self.errors.pop(0)
        return super()._open(path, mode, **how)


fsspec.register_implementation("flaky", Flaky)
