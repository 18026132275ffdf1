"""Options and flags: each malformed one is refused by its own name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from epochless_vllm.errors import ConfigurationError
from epochless_vllm.plugin.options import KEY, add_flags, fold_flags, options_of, parse_options


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    add_flags(parser)  # the plugin loads once a process, the parser is built more often
    return parser.parse_args(arguments, argparse.Namespace(additional_config=None))


def test_flags_travel_in_additional_config(tmp_path: Path) -> None:
    arguments = parse(
        *("--enable-epochless", "--epochless-store", str(tmp_path / "s"), "--epochless-keep", "7"),
        *("--epochless-require-revision", "--epochless-import-root", str(tmp_path)),
        *("--epochless-receipts-bytes", "0", "--epochless-receipts-age", "60", "--epochless-attest", "summary"),
        *("--epochless-signing-key", "key.pem"),
    )
    fold_flags(arguments)
    options = options_of(arguments.additional_config)
    assert options is not None
    assert (options.receipts_bytes, options.receipts_age, options.attest) == (0, 60, "summary")
    assert options.signing_key == str(Path("key.pem").absolute())
    assert (options.keep, options.require_revision, options.import_root) == (7, True, str(tmp_path))


def test_keep_all_is_no_bound(tmp_path: Path) -> None:
    arguments = parse("--enable-epochless", "--epochless-store", str(tmp_path), "--epochless-keep", "all")
    fold_flags(arguments)
    assert arguments.additional_config[KEY]["keep"] is None


def test_flags_without_the_switch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--enable-epochless"):
        fold_flags(parse("--epochless-store", str(tmp_path)))


def test_no_flags_leave_the_configuration_alone() -> None:
    arguments = parse()
    fold_flags(arguments)
    assert arguments.additional_config is None
    assert options_of({}) is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({}, "store"),
        ({"store": ""}, "store"),
        ({"store": 3}, "store"),
        ({"store": "a\0b"}, "store"),
        ({"store": "s", "import_root": 5}, "import-root"),
        ({"store": "s", "import_root": ""}, "import-root"),
        ({"store": "s", "import_root": "/\0"}, "import-root"),
        ({"store": "s", "signing_key": "a\0b"}, "signing-key"),
        ({"store": "s", "keep": 0}, "keep"),
        ({"store": "s", "keep": True}, "keep"),
        ({"store": "s", "keep": "4"}, "keep"),
        ({"store": "s", "attest": "all"}, "attest"),
        ({"store": "s", "attest": "receipt", "mixed_rows": "stock"}, "attest"),
        ({"store": "s", "receipts_bytes": -1}, "receipts-bytes"),
        ({"store": "s", "receipts_bytes": "1"}, "receipts-bytes"),
        ({"store": "s", "receipts_age": 0}, "receipts-age"),
        ({"store": "s", "receipts_age": True}, "receipts-age"),
        ({"store": "s", "signing_key": ""}, "signing-key"),
        ({"store": "s", "mixed_rows": "fast"}, "mixed-rows"),
        ({"store": "s", "base_digest_mode": "none"}, "base-digest"),
        ({"store": "s", "import_root": "/nonexistent/root"}, "import-root"),
        ({"store": "s", "require_revision": "yes"}, "require-revision"),
        ({"store": "s", "kepe": 4}, "kepe"),
        ("store", "epochless"),
    ],
)
def test_malformed_option_is_refused_by_name(value: object, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--epochless-{name}"):
        parse_options(value)


@pytest.mark.parametrize("text", ["-1", "1.5", "four", "²"])
def test_malformed_keep_flag_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keep"):
        fold_flags(parse("--enable-epochless", "--epochless-store", str(tmp_path), f"--epochless-keep={text}"))
