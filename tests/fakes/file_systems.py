"""An object store in memory that fails now and then, for pyarrow and fsspec to open."""

from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """`flaky://`: the next openings of files meet what is in `errors`, one each, None for none."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    errors: ClassVar[list[OSError | None]] = []
    opened: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        self.opened.append(f"{mode} {path}")
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        return super()._open(path, mode, **how)


fsspec.register_implementation("flaky", Flaky)
