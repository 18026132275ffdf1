"""The signing key: made once, read by every process, and refused where it cannot be trusted."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from epochless_vllm.cli.verify import read_public_key
from epochless_vllm.errors import ConfigurationError
from epochless_vllm.plugin.options import Options
from epochless_vllm.plugin.signer import ensure_key, key_path, load_signer
from epochless_vllm.verify.ed25519 import verify_ed25519


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    options = Options(store=str(tmp_path))
    made = ensure_key(options)
    assert stat.S_IMODE(key_path(options).stat().st_mode) == 0o600
    for other in (ensure_key(options), load_signer(options)):
        assert other.keyid == made.keyid
        # Our own verifier shares no code with the library that signs.
        verify_ed25519(made.public_key, b"message", other.sign(b"message"))


def test_the_public_key_is_what_the_verifier_reads(tmp_path: Path) -> None:
    signer = ensure_key(Options(store=str(tmp_path)))
    (tmp_path / "public.pem").write_bytes(signer.public_pem)
    assert read_public_key(str(tmp_path / "public.pem")) == signer.public_key


def test_the_operators_key_is_used_and_none_is_made(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    key = Ed25519PrivateKey.generate()
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    file.chmod(0o400)
    store = tmp_path / "store"
    store.mkdir()
    signer = ensure_key(Options(store=str(store), signing_key=str(file)))
    assert signer.public_key == key.public_key().public_bytes_raw()
    assert list(store.iterdir()) == []


def test_a_key_made_by_openssl_is_read(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(file)], check=True, capture_output=True)
    file.chmod(0o600)
    load_signer(Options(store=str(tmp_path), signing_key=str(file)))


def _pem(key: object, password: bytes | None = None) -> bytes:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)  # type: ignore[attr-defined,no-any-return]


def test_an_untrustworthy_key_is_refused_with_the_remedy(tmp_path: Path) -> None:
    good = _pem(Ed25519PrivateKey.generate())
    for content, mode, remedy in (
        (None, 0, "readable PEM"),
        (good, 0o640, "chmod 600"),
        (good, 0o604, "chmod 600"),
        (b"", 0o600, "openssl genpkey"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", 0o600, "openssl genpkey"),
        (_pem(generate_private_key(SECP256R1())), 0o600, "not an Ed25519 key"),
        (_pem(Ed25519PrivateKey.generate(), b"secret"), 0o600, "unencrypted"),
    ):
        file = tmp_path / "key.pem"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
            file.chmod(mode)
        with pytest.raises(ConfigurationError, match=remedy) as caught:
            load_signer(Options(store=str(tmp_path), signing_key=str(file)))
        assert caught.value.fields["flag"] == "signing_key"
        assert str(file) in str(caught.value)


def test_a_directory_or_a_pipe_is_no_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "."):
        with pytest.raises(ConfigurationError):
            load_signer(Options(store=str(tmp_path), signing_key=str(tmp_path / name)))
