"""What strangers hand to this package, each with the errors that may answer it: files, receipts, answers, patches."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from epochless_vllm.cli.tiny_model import byte_tokenizer
from epochless_vllm.errors import (
    AdapterConfigError,
    InspectError,
    ModelRefusedError,
    PatchError,
    ReceiptError,
    TokenizerError,
)
from epochless_vllm.patch.diff import parse_patch
from epochless_vllm.reference.config import config_from_document
from epochless_vllm.reference.tokenizer import tokenizer_from_bytes
from epochless_vllm.store.adapters import inspect_parts
from epochless_vllm.store.documents import parse_document
from epochless_vllm.store.safetensors import read_header
from epochless_vllm.verify import verify_receipt
from epochless_vllm.verify.answer import attested_choices
from tests.adapters import MINUTE, encode_safetensors, make_config, make_tensors
from tests.fuzz.fuzzer import Target
from tests.reference.cases import SHAPES

ROOT = Path(__file__).parents[2]
RECEIPTS = ROOT / "tests" / "vectors" / "receipts" / "v1"
TENSORS = make_tensors(shape=MINUTE)
ADAPTER = encode_safetensors(TENSORS)
JSON_WORDS = (b'":', b"{", b"}", b"[", b"]", b",", b"null", b"true", b"NaN", b"1e999", b'"\\u0000"', b"-0", b'"', b" ")


def _header(data: bytes) -> Any:
    return read_header(io.BytesIO(data).read, len(data))


def _adapter_config(data: bytes) -> Any:
    return inspect_parts(parse_document(data, subject="adapter_config.json"), *PARSED)


PARSED = _header(ADAPTER)


def _adapter_header(data: bytes) -> Any:
    records, begin = _header(data)
    document = make_config(targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    return inspect_parts(document, records, begin)


def _model_config(data: bytes) -> Any:
    config = config_from_document(parse_document(data, subject="config.json"))
    return config.rope.table(8, 4) if config.layers < 64 else None


def _tokenizer(data: bytes) -> Any:
    tokenizer = tokenizer_from_bytes(data)
    return tokenizer.decode(tokenizer.encode("a text, 12"))


def _receipts(*suffixes: str) -> list[bytes]:
    return [path.read_bytes() for suffix in suffixes for path in sorted(RECEIPTS.glob(f"*.{suffix}"))]


def _answers() -> list[bytes]:
    import base64

    receipt = base64.b64encode((RECEIPTS / "example.compact").read_bytes()).decode()
    choice = {
        "index": 0,
        "text": "x",
        "token_ids": [1, 2],
        "finish_reason": "length",
        "epochless": {"receipt": receipt},
    }
    whole = {"id": "cmpl-1", "choices": [choice]}
    chunk = {"choices": [{"index": 0, "token_ids": [1], "epochless": {"frames": receipt}}]}
    return [json.dumps(whole).encode(), b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"]


def _patch(data: bytes) -> Any:
    seam = re.search(rb"^Seam: ([a-z-]+)$", data, re.MULTILINE)  # a patch's file is named after it
    return parse_patch(f"{seam[1].decode()}.patch" if seam else "seam.patch", data)


def _patches() -> list[bytes]:
    return sorted((path.read_bytes() for path in (ROOT / "patches").rglob("*.patch")), key=len)[:4]


def _small_tokenizer() -> bytes:
    document = byte_tokenizer()
    document["model"]["merges"] = [["t", "e"]]  # type: ignore[index]
    document["model"]["vocab"] |= {"te": 258}  # type: ignore[index]
    return json.dumps(document).encode()


TARGETS = {
    target.name: target
    for target in (
        Target(
            "safetensors", _adapter_header, (InspectError, AdapterConfigError),
            lambda: [ADAPTER, encode_safetensors({"a": np.zeros((2, 3), np.float32)}, metadata={"format": "pt"})],
            (*JSON_WORDS, b'"dtype":"F32"', b'"shape":[1]', b'"data_offsets":[0,4]', b"__metadata__", b"lora_A"),
        ),
        Target(
            "adapter-config", _adapter_config, (InspectError, AdapterConfigError),
            lambda: [json.dumps(make_config()).encode(), json.dumps(make_config(use_rslora=True)).encode()],
            (*JSON_WORDS, b'"rank_pattern":{"q_proj":2}', b'"alpha_pattern"', b'"use_dora"', b"(.*)+$"),
        ),
        Target(
            "model-config", _model_config, (InspectError, ModelRefusedError),
            lambda: [json.dumps(shape.config()).encode() for shape in SHAPES.values()],
            (*JSON_WORDS, b'"rope_scaling"', b'"rope_type":"yarn"', b'"factor"', b'"head_dim"', b"1e-320", b"Infinity"),
        ),
        Target(
            "tokenizer", _tokenizer, (TokenizerError,), lambda: [_small_tokenizer()],
            (*JSON_WORDS, b'"merges"', b'"added_tokens"', b'"normalizer"', b'"Split"', b'"Regex"', b"(?i:", b"\\p{L}"),
        ),
        Target("receipt-json", verify_receipt, (ReceiptError,), lambda: _receipts("json"), JSON_WORDS),
        Target("receipt-compact", verify_receipt, (ReceiptError,), lambda: _receipts("compact"), (b"EPc1", b"{}")),
        Target("receipt-stream", verify_receipt, (ReceiptError,), lambda: _receipts("stream"), (b"EPs1", b"{}")),
        Target("answer", attested_choices, (ReceiptError,), _answers, (b"data: ", b"[DONE]", *JSON_WORDS)),
        Target(
            "patch", _patch, (PatchError,), _patches,
            (b"@@ -1,2 +1,2 @@", b"--- a/", b"+++ b/", b"diff --git ", b"index ", b"\r\n", b"\\ No newline"),
        ),
    )
}  # fmt: skip
