"""Writes rows.json, shared vectors of the sampler, from the pure Python reference alone.

    python -m tests.vectors.sampler.make_rows

Logits are the hexadecimal bits of float32 values, so that NaN, infinities and both zeros keep theirs.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from epochless_vllm.reference import philox, sampler_plain
from tests.sampling.cases import batches


def main() -> None:
    cases = []
    for batch in batches(seed=2026, rows=160, rows_per_batch=1, vocabularies=(1, 5, 16, 40)):
        key, position = [int(word) for word in batch.keys[0]], int(batch.positions[0])
        record = sampler_plain.sample_row(batch.logits[0].tolist(), batch.config, philox.draw(tuple(key), position))
        cases.append(
            {
                "sampler": batch.config.describe(),
                "logits": [f"{bits:08x}" for bits in batch.logits[0].view(np.uint32)],
                "key": key,
                "position": position,
                "expected": vars(record),
            }
        )
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    Path(__file__).with_name("rows.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
