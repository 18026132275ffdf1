"""The trainer's side: publish revisions to a server, wait for them, and read the labels of its answers."""

from __future__ import annotations

from epochless_vllm.client.asynchronous import AsyncEpochlessClient
from epochless_vllm.client.client import EpochlessClient
from epochless_vllm.client.labels import request_fields, spans_of, steps_of_tokens
from epochless_vllm.client.peft import publish_model
from epochless_vllm.client.receipts import StreamedReceipts, TokenRecord, receipt_of, token_records

__all__ = [
    "AsyncEpochlessClient",
    "EpochlessClient",
    "StreamedReceipts",
    "TokenRecord",
    "publish_model",
    "receipt_of",
    "request_fields",
    "spans_of",
    "steps_of_tokens",
    "token_records",
]
