"""Golden receipts of format v1: ``python -m tests.verify.golden`` writes them, tests only read them.

Once released, these bytes verify forever and are encoded to the same bytes forever; a change here is a new format.
"""

from __future__ import annotations

import json
from pathlib import Path

from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.protocol.disclosure import make_disclosure
from epochless_vllm.protocol.header import SEEDED
from epochless_vllm.protocol.receipts import ABORT, STOP, Receipt
from epochless_vllm.protocol.records import FORCED, MASKED
from epochless_vllm.protocol.spans import CONTINUE
from epochless_vllm.protocol.stream import encode_stream
from epochless_vllm.protocol.verbose import encode_verbose
from tests.protocol.receipt_factory import GREEDY, NONCE, NUCLEUS, SIGNER, STOP_TOKEN, entry, make_header, make_receipt

FOLDER = Path(__file__).parents[1] / "vectors" / "receipts" / "v1"
FORMATS = {"json": encode_verbose, "compact": encode_compact, "stream": encode_stream}


def golden_receipts() -> dict[str, Receipt]:
    return {
        "example": make_receipt(3),
        "unseeded": make_receipt(70),
        "seeded_stop": make_receipt(9, header=make_header(draw_kind=SEEDED), finish_reason=STOP, last_token=STOP_TOKEN),
        "greedy": make_receipt(66, header=make_header(max_tokens=66, sampler=GREEDY)),
        "filtered_masked_forced": make_receipt(
            12,
            header=make_header(max_tokens=12, sampler=NUCLEUS),
            flags=[(3, MASKED), (6, FORCED), (7, 0)],
        ),
        "continued": make_receipt(
            68,
            header=make_header(on_publish=CONTINUE, max_tokens=68),
            moves=((5, entry("revision-b", 8)), (66, entry("revision-c", 9))),
        ),
        "aborted_before_the_first_token": make_receipt(0, header=make_header(), finish_reason=ABORT),
    }


def regenerate(folder: Path = FOLDER) -> None:
    """Write every golden file into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    receipts = golden_receipts()
    for name, receipt in receipts.items():
        for suffix, encode in FORMATS.items():
            (folder / f"{name}.{suffix}").write_bytes(encode(receipt))
    (folder / "unseeded_token_65.disclosure").write_bytes(make_disclosure(receipts["unseeded"], 65).encode())
    index = {
        "nonce": NONCE,
        "public_key": SIGNER.public_key.hex(),
        "receipts": {
            name: {"receipt_id": receipt.receipt_id, "root": receipt.final.root.hex(), "tokens": receipt.final.tokens}
            for name, receipt in receipts.items()
        },
    }
    (folder / "index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    regenerate()
