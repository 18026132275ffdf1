"""The header parser against well-formed files, every stated reason, and files written to break it.

Oracles: the writer in tests/adapters.py and the Rust parser of the safetensors library.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import InspectError
from epochless_vllm.store.safetensors import (
    ITEM_BYTES,
    MAX_REMEMBERED_BYTES,
    MAX_TENSORS,
    REASONS,
    TensorRecord,
    encode_header,
    lay_out,
    parse_header,
    read_header,
)
from tests.adapters import MINUTE, encode_safetensors, make_tensors


def parse_file(payload: bytes) -> list[TensorRecord]:
    """Parse a whole file as the store does, header length first."""
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        piece = payload[position : position + count]
        position += len(piece)
        return piece

    return read_header(read, len(payload))[0]


def with_header(header: bytes | str, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def one(value: str, name: str = "a", data: int = 4) -> bytes:
    return with_header(f'{{"{name}":{value}}}', bytes(data))


VALID = encode_safetensors(
    {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones((1, 2), dtype=np.float32)},
    metadata={"format": "pt"},
)

REFUSED: list[tuple[str, str, bytes]] = [
    ("empty file", "truncated", b""),
    ("seven bytes", "truncated", bytes(7)),
    ("header longer than the file", "truncated", struct.pack("<Q", 100) + b"{}"),
    ("zero header", "header_length", bytes(8)),
    ("header of 2**64 - 1", "header_length", b"\xff" * 8 + b"{}"),
    ("header of 10 GB", "header_length", struct.pack("<Q", 10 << 30) + b"{}"),
    ("header with the sign bit", "header_length", struct.pack("<Q", 1 << 63) + b"{}"),
    ("not UTF-8", "header_text", with_header(b'{"a\xff":1}')),
    ("UTF-16", "header_text", with_header('{"a":{}}'.encode("utf-16"))),
    ("byte order mark", "header_syntax", with_header("\ufeff{}")),
    ("lone surrogate", "header_text", one(entry(), name="\\ud800")),
    ("leading space", "header_syntax", with_header(" {}")),
    ("an array", "header_syntax", with_header("[]")),
    ("unfinished object", "header_syntax", with_header("{")),
    ("unfinished string", "header_syntax", with_header('{"a')),
    ("control character in a string", "header_syntax", with_header(b'{"a\x00":1}')),
    ("bad escape", "header_syntax", with_header('{"\\q":1}')),
    ("second object", "header_syntax", with_header("{}{}")),
    ("newline after the object", "header_syntax", with_header("{}\n")),
    ("trailing comma", "header_syntax", with_header('{"a":' + entry() + ",}", bytes(4))),
    ("single quotes", "header_syntax", with_header("{'a':1}")),
    ("tensor is a number", "header_syntax", one("4")),
    ("tensor is null", "header_syntax", one("null")),
    ("nesting bomb", "header_syntax", with_header('{"a":' + "[" * 100_000)),
    ("object bomb", "unknown_field", with_header('{"a":' * 50_000)),
    ("metadata is a list", "header_syntax", with_header('{"__metadata__":[]}')),
    ("metadata value is a number", "header_syntax", with_header('{"__metadata__":{"a":1}}')),
    ("metadata value nests", "header_syntax", with_header('{"__metadata__":{"a":{"b":"c"}}}')),
    ("tensor named twice", "duplicate_key", with_header(f'{{"a":{entry()},"a":{entry(offsets="[4,8]")}}}', bytes(8))),
    ("same name by escape", "duplicate_key", with_header(f'{{"a":{entry()},"\\u0061":{entry()}}}', bytes(4))),
    ("field twice", "duplicate_key", one('{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}')),
    ("metadata twice", "duplicate_key", with_header('{"__metadata__":{},"__metadata__":{}}')),
    ("metadata key twice", "duplicate_key", with_header('{"__metadata__":{"a":"1","a":"2"}}')),
    ("unknown field", "unknown_field", one('{"dtype":"F32","shape":[1],"data_offsets":[0,4],"scale":1}')),
    ("no dtype", "missing_field", one('{"shape":[1],"data_offsets":[0,4]}')),
    ("no shape", "missing_field", one('{"dtype":"F32","data_offsets":[0,4]}')),
    ("no offsets", "missing_field", one('{"dtype":"F32","shape":[1]}')),
    ("empty entry", "missing_field", one("{}")),
    ("negative size", "not_integer", one(entry(shape="[-1]"))),
    ("float size", "not_integer", one(entry(shape="[1.0]"))),
    ("exponent", "not_integer", one(entry(shape="[1e0]"))),
    ("boolean size", "not_integer", one(entry(shape="[true]"))),
    ("text size", "not_integer", one(entry(shape='["1"]'))),
    ("leading zero", "not_integer", one(entry(shape="[01]"))),
    ("nested size", "not_integer", one(entry(shape="[[1]]"))),
    ("full-width digit", "not_integer", one(entry(shape="[\uff11]"))),
    ("NaN size", "not_integer", one(entry(shape="[NaN]"))),
    ("float offset", "not_integer", one(entry(offsets="[0,4.0]"))),
    ("size of 2**63", "overflow", one(entry(shape=f"[{1 << 63}]"))),
    ("size of 5000 digits", "overflow", one(entry(shape=f"[{'9' * 5000}]"))),
    ("product overflows", "overflow", one(entry(shape=f"[{1 << 32},{1 << 31}]"))),
    ("bytes overflow, items do not", "overflow", one(entry(shape=f"[{1 << 61}]"))),
    ("product wraps to the right size", "overflow", one(entry(dtype="U8", shape=f"[{1 << 62},4,1]", offsets="[0,0]"))),
    ("empty with a huge dimension", "overflow", one(entry(shape=f"[0,{1 << 62}]", offsets="[0,0]"), data=0)),
    ("empty with huge dimensions", "overflow", one(entry(shape=f"[{1 << 40},0,{1 << 40}]", offsets="[0,0]"), data=0)),
    ("offset of 2**64 - 1", "overflow", one(entry(offsets=f"[0,{(1 << 64) - 1}]"))),
    ("empty tensor at 2**63", "overflow", one(entry("U8", "[0]", f"[{1 << 63},{1 << 63}]"))),
    ("unknown dtype", "dtype", one(entry(dtype="F33"))),
    ("dtype in lower case", "dtype", one(entry(dtype="f32"))),
    ("empty name", "name", one(entry(), name="")),
    ("NUL in the name", "name", one(entry(), name="a\\u0000b")),
    ("space in the name", "name", one(entry(), name="a b")),
    ("look-alike name", "name", one(entry(), name="\u0430")),
    ("zero-width name", "name", one(entry(), name="a\u200b")),
    ("long name", "name", one(entry(), name="a" * 513)),
    ("nine dimensions", "dimensions", one(entry(shape="[1,1,1,1,1,1,1,1,1]"))),
    (
        "too many tensors",
        "too_many_tensors",
        with_header(
            "{"
            + ",".join(f'"{i}":{entry(dtype="U8", shape="[0]", offsets="[0,0]")}' for i in range(MAX_TENSORS + 1))
            + "}"
        ),
    ),
    ("shape needs more", "byte_length", one(entry(shape="[2]"))),
    ("shape needs less", "byte_length", one(entry(shape="[0]"))),
    ("scalar of eight bytes", "byte_length", one(entry(shape="[]", offsets="[0,8]"), data=8)),
    ("offsets swapped", "offsets", one(entry(offsets="[4,0]"))),
    ("one offset", "offsets", one(entry(offsets="[0]"))),
    ("three offsets", "offsets", one(entry(offsets="[0,4,8]"))),
    ("no offsets in the array", "offsets", one(entry(offsets="[]"))),
    ("overlap", "overlap", with_header(f'{{"a":{entry()},"b":{entry(offsets="[2,6]")}}}', bytes(6))),
    ("same bytes twice", "overlap", with_header(f'{{"a":{entry()},"b":{entry()}}}', bytes(4))),
    ("hole at the start", "hole", one(entry(offsets="[4,8]"), data=8)),
    ("hole between", "hole", with_header(f'{{"a":{entry()},"b":{entry(offsets="[8,12]")}}}', bytes(12))),
    ("data end early", "truncated", one(entry(), data=3)),
    ("offsets far beyond the file", "truncated", one(entry(shape=f"[{1 << 40}]", offsets=f"[0,{1 << 42}]"))),
    ("a byte after the data", "trailing_bytes", one(entry(), data=5)),
    ("data without tensors", "trailing_bytes", with_header("{}", b"x")),
]


@pytest.mark.parametrize(("reason", "payload"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_malformed_file_is_refused_with_its_own_reason(reason: str, payload: bytes) -> None:
    with pytest.raises(InspectError) as caught:
        parse_file(payload)
    assert caught.value.fields["reason"] == reason


def test_every_reason_has_a_case() -> None:
    assert {reason for _, reason, _ in REFUSED} == REASONS


def test_valid_file_gives_its_tensors_in_the_order_of_the_data() -> None:
    assert parse_file(VALID) == [
        TensorRecord("a.weight", "F32", (2, 3), 0, 24),
        TensorRecord("b.weight", "F32", (1, 2), 24, 32),
    ]


def test_spacing_key_order_escapes_and_padding_do_not_change_the_records() -> None:
    spaced = (
        '{ "b.weight" :\n{"shape":[1 ,2],"dtype" : "F32",\t"data_offsets":[24,32]},'
        '"\\u0061.weight":{"data_offsets":[0,24],"dtype":"F32","shape":[2,3]},"__metadata__":{"x":"\\"{"}}   '
    )
    assert parse_file(with_header(spaced, bytes(32))) == parse_file(VALID)


def test_an_empty_tensor_may_stand_where_another_begins_in_either_order() -> None:
    empty, full = f'"e":{entry(shape="[0]", offsets="[0,0]")}', f'"f":{entry()}'
    for members in ((empty, full), (full, empty)):
        records = parse_file(with_header("{" + ",".join(members) + "}", bytes(4)))
        assert [record.name for record in records] == ["e", "f"]


def test_scalars_and_empty_tensors_of_a_base_model_are_read() -> None:
    header = f'{{"s":{entry(shape="[]")},"e":{entry(shape="[0,7]", offsets="[4,4]")}}}'
    assert [record.shape for record in parse_file(with_header(header, bytes(4)))] == [(), (0, 7)]


names = st.text(st.sampled_from("abcXYZ019._-/"), min_size=1, max_size=20)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
float_tensors = st.tuples(st.sampled_from(["F64", "F32", "F16", "BF16"]), shapes)


@given(
    st.dictionaries(names, st.tuples(st.sampled_from(["F64", "F32", "F16", "BF16"]), shapes), max_size=8), st.randoms()
)
def test_what_the_writer_wrote_is_what_the_parser_reads(
    tensors: dict[str, tuple[str, tuple[int, ...]]], random
) -> None:
    order = list(tensors)
    random.shuffle(order)
    payload = encode_safetensors(
        {name: np.zeros(shape) for name, (_, shape) in tensors.items()},
        dtypes={name: dtype for name, (dtype, _) in tensors.items()},
        order=order,
    )
    records = parse_file(payload)
    assert {record.name: (record.dtype, record.shape) for record in records} == tensors
    assert sum(record.byte_length for record in records) == (records[-1].end if records else 0)


@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=8))
def test_canonical_header_is_read_back_aligned_and_independent_of_order(tensors) -> None:
    listed = [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    layout = lay_out(listed)
    header = encode_header(layout)
    assert lay_out(listed[::-1]) == layout
    assert len(header) % 8 == 0
    assert all(record.begin % ITEM_BYTES[record.dtype] == 0 for record in layout)
    assert {*parse_file(header + bytes(layout[-1].end))} == {*layout}


def rust_records(payload: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Return what the safetensors library reads, or None where it refuses."""
    try:
        read = safetensors.deserialize(payload)
    except safetensors.SafetensorError:
        return None
    return {name: (value["dtype"], tuple(value["shape"]), bytes(value["data"])) for name, value in read}


# Where this parser is stricter than the library, on purpose.
STRICTER = {"duplicate_key", "unknown_field", "name", "overflow", "header_syntax", "dimensions"}


def outcome_agrees_with_library(payload: bytes) -> str:
    """Return ``accepted`` or the reason; assert that nothing is accepted that the library reads otherwise."""
    theirs = rust_records(payload)
    try:
        records = parse_file(payload)
    except InspectError as error:
        reason = error.fields["reason"]
        assert reason in REASONS
        assert theirs is None or reason in STRICTER, (reason, payload)
        return str(reason)
    begin = 8 + int.from_bytes(payload[:8], "little")
    ours = {r.name: (r.dtype, r.shape, payload[begin + r.begin : begin + r.end]) for r in records}
    assert theirs == ours, payload
    return "accepted"


def test_every_prefix_of_a_valid_file_is_refused() -> None:
    for length in range(len(VALID)):
        assert outcome_agrees_with_library(VALID[:length]) in ("truncated", "header_length")


def test_every_single_byte_change_of_a_header_is_refused_or_read_as_the_library_reads_it() -> None:
    header_end = 8 + int.from_bytes(VALID[:8], "little")
    outcomes: Counter[str] = Counter()
    for position in range(header_end):
        for value in range(256):
            if value != VALID[position]:
                changed = bytearray(VALID)
                changed[position] = value
                outcomes[outcome_agrees_with_library(bytes(changed))] += 1
    # Names and metadata may become other text; everything else must be noticed.
    assert outcomes["accepted"] < 0.20 * outcomes.total()
    assert len(outcomes) > 10


def xorshift32(seed: int):
    state = seed
    while True:
        state ^= (state << 13) & 0xFFFFFFFF
        state ^= state >> 17
        state ^= (state << 5) & 0xFFFFFFFF
        yield state


def hostile_buffers(count: int):
    """Yield seeded buffers; every second one opens with a plausible header, damaged in up to three places."""
    words = xorshift32(0x9E3779B9)
    header_end = 8 + int.from_bytes(VALID[:8], "little")
    tokens = [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"0",
        b"9" * 25,
        b"-",
        b"\\u0000",
        b"\xff",
        b"true",
        b"1e9",
        b" ",
    ]
    for index in range(count):
        if index % 2:
            length = (index * 37) % 4096
            yield b"".join(struct.pack("<I", next(words)) for _ in range(length // 4 + 1))[:length]
            continue
        buffer = bytearray(VALID)
        for _ in range(next(words) % 4):
            position = next(words) % header_end
            token = tokens[next(words) % len(tokens)]
            choice = next(words) % 3
            if choice == 0:
                buffer[position] = next(words) & 0xFF
            elif choice == 1:
                buffer[position : position + len(token)] = token
            else:
                buffer[position:position] = token
                buffer[:8] = struct.pack("<Q", int.from_bytes(buffer[:8], "little") + len(token))
        yield bytes(buffer)


def test_twenty_thousand_hostile_buffers_give_records_or_an_inspect_error() -> None:
    outcomes: Counter[str] = Counter()
    for buffer in hostile_buffers(20_000):
        outcomes[outcome_agrees_with_library(buffer)] += 1
    assert outcomes.total() == 20_000
    # Both sides of the fence are visited: undamaged buffers are read, damaged ones refused in many ways.
    assert 2_000 < outcomes["accepted"] < 6_000
    assert len(outcomes) >= 12


def test_no_memory_is_taken_on_the_word_of_a_header() -> None:
    header = '{"emb":{"dtype":"F32","shape":[4096,32000],"data_offsets":[0,524288000]}}'
    payload = with_header(header, bytes((64 << 10) - 8 - len(header)))
    assert len(payload) == 64 << 10
    tracemalloc.start()
    try:
        with pytest.raises(InspectError) as caught:
            parse_file(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.fields["reason"] == "truncated"
    assert caught.value.fields["need"] == 524288000
    assert peak < 2 * len(payload)


@pytest.mark.parametrize(
    "body", ["[]," * 300_000, '"k":"v",' * 100_000, "1," * 400_000, '"' + "\\u0061" * 150_000 + '":']
)
def test_parsing_takes_memory_in_proportion_to_the_header(body: str) -> None:
    payload = with_header("{" + body)
    tracemalloc.start()
    try:
        with pytest.raises(InspectError):
            parse_file(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(payload)


def test_header_of_ten_gigabytes_in_a_sparse_file_is_refused_within_an_address_space_limit(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10 << 30) + b"{")
        file.truncate(11 << 30)
    program = (
        "import resource, sys\n"
        "from epochless_vllm.errors import InspectError\n"
        "from epochless_vllm.store.safetensors import read_header\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20),) * 2)\n"
        "file = open(sys.argv[1], 'rb', buffering=0)\n"
        "for limit in (16 << 20, 1 << 40):\n"
        "    file.seek(0)\n"
        "    try:\n"
        "        read_header(file.read, 100 if limit > 1 << 30 else 11 << 30, max_header_bytes=limit)\n"
        "    except InspectError as error:\n"
        "        print(error.fields['reason'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["header_length", "truncated"], "")


def test_stream_that_ends_inside_its_header_is_refused_without_waiting_for_the_rest() -> None:
    pieces = iter([VALID[:8], VALID[8:20], b""])
    with pytest.raises(InspectError) as caught:
        read_header(lambda _: next(pieces), None)
    assert caught.value.fields["reason"] == "truncated"


@pytest.mark.parametrize("excess", [1, 8, 1 << 20])
def test_header_that_would_pass_the_end_of_the_file_is_refused_before_it_is_read(excess: int) -> None:
    requested: list[int] = []

    def read(count: int) -> bytes:
        requested.append(count)
        return struct.pack("<Q", 100 - 8 + excess)

    with pytest.raises(InspectError) as caught:
        read_header(read, 100)
    assert (caught.value.fields["need"], caught.value.fields["have"], requested) == (100 + excess, 100, [8])


def test_header_alone_is_read_when_the_length_of_the_data_is_not_known() -> None:
    length = int.from_bytes(VALID[:8], "little")
    assert parse_header(VALID[8 : 8 + length], None) == parse_file(VALID)


def test_header_seen_before_is_judged_by_the_data_that_follow_this_time() -> None:
    length = int.from_bytes(VALID[:8], "little")
    header, data = VALID[8 : 8 + length], len(VALID) - 8 - length
    wanted = parse_header(header, data)
    for follow, reason in ((data - 1, "truncated"), (data + 1, "trailing_bytes")):
        for _ in range(2):
            with pytest.raises(InspectError) as caught:
                parse_header(header, follow)
            assert caught.value.fields["reason"] == reason
    assert parse_header(header, data) == wanted


def test_header_seen_before_is_not_parsed_again_and_its_list_is_the_callers() -> None:
    length = int.from_bytes(VALID[:8], "little")
    first = parse_header(VALID[8 : 8 + length], None)
    record = first.pop()
    again = parse_header(VALID[8 : 8 + length], None)
    assert again == [*first, record]
    assert again[-1] is record


def test_header_that_is_large_is_not_kept() -> None:
    header = VALID[8 : 8 + int.from_bytes(VALID[:8], "little")].ljust(MAX_REMEMBERED_BYTES + 1)
    assert parse_header(header, None) == parse_file(VALID)
    assert parse_header(header, None)[0] is not parse_header(header, None)[0]


def test_header_of_a_real_adapter_is_read_as_json_reads_it() -> None:
    payload = encode_safetensors(make_tensors(shape=MINUTE), dtype="BF16")
    length = int.from_bytes(payload[:8], "little")
    wanted = json.loads(payload[8 : 8 + length])
    assert {r.name: [r.begin, r.end] for r in parse_file(payload)} == {k: v["data_offsets"] for k, v in wanted.items()}
