"""The folder `platform/` must never hide the standard library's module of that name."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("statement", ["import platform", "import pliant, platform"])
def test_platform_is_the_standard_library_from_the_root_of_the_repository(statement):
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        f"{statement}\n"
        "print(platform.__file__); platform.python_version()"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert Path(shown.stdout.strip()).name == "platform.py"
    assert not Path(shown.stdout.strip()).is_relative_to(REPOSITORY / "platform")


def test_the_folder_is_no_package():
    assert not (REPOSITORY / "platform" / "__init__.py").exists()
    assert (REPOSITORY / "platform" / "pliant" / "__init__.py").exists()
