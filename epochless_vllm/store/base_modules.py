"""The linear modules of a base model, as the headers of its checkpoint name them.

Knows only safetensors checkpoints of plain weights: a quantised layer or another format gives no name, and whoever
uses the names concludes nothing from an absence. Reads no weights.
"""

from __future__ import annotations

from pathlib import Path

from epochless_vllm.errors import InspectError
from epochless_vllm.store.safetensors import read_header

_SUFFIX = ".weight"
# The format's own bound: a base model of many experts has a longer header than any adapter.
_MAX_HEADER_BYTES = 100_000_000


def read_base_modules(model: Path | str) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) by module name for every two-dimensional weight of a model directory.

    Embeddings are among them, being stored alike. A directory without safetensors gives an empty answer.

    Raises:
        InspectError: a shard is damaged or cannot be read.
    """
    modules: dict[str, tuple[int, int]] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                records, _ = read_header(file.read, path.stat().st_size, max_header_bytes=_MAX_HEADER_BYTES)
        except OSError as error:
            raise InspectError(f"{path}: cannot be read: {error.strerror}", reason="unreadable") from error
        for record in records:
            if record.name.endswith(_SUFFIX) and len(record.shape) == 2:
                outputs, inputs = record.shape
                modules[record.name.removesuffix(_SUFFIX)] = (outputs, inputs)
    return modules
