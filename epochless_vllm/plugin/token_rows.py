"""The row that rides beside each token from the sampler to the response, and what its bits mean.

A row is five int64: ``[lora_int_id, lo, w, flags, kept]``. ``lora_int_id`` is the adapter the step ran the row with, 0
for the base model; ``lo``, ``w`` and ``kept`` are of 2**32, as ``sampling.Sampled`` has them; ``kept`` is 0 unless the
row is filtered. Knows neither engine nor receipts.
"""

from __future__ import annotations

from epochless_vllm.protocol import records

LORA, LO, W, FLAGS, KEPT = range(5)
COLUMNS = 5

GREEDY = 1  # the likeliest token: lo = 0, w = 2**32, no draw
FILTERED = 2  # the sampler has top-k, top-p or min-p
RESTRICTED = 4  # a grammar, allowed tokens, a thinking budget or a custom processor: not replayable from the request
FAILED = 1 << 8  # no token could be drawn; the request ends here, and no receipt sees the row


def record_flags(flags: int) -> int:
    """Return a receipt's record flags for a row's; that a row is greedy is said by its sampler there.

    Raises:
        ValueError: the row failed.
    """
    if flags & FAILED:
        raise ValueError("a failed row has no record")
    return (records.FILTERED if flags & FILTERED else 0) | (records.MASKED if flags & RESTRICTED else 0)
