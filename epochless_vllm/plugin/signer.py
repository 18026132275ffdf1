"""The Ed25519 key that signs receipts: the operator's file, or one made in the store on the first start.

Promises that a key which cannot be trusted (readable by others, of another kind, damaged) stops the start instead of
signing, and that every process of a deployment signs with the same key: the deployment's owner makes it before others
are spawned. Knows no receipts.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from epochless_vllm.durable import write_file_atomic
from epochless_vllm.errors import ConfigurationError
from epochless_vllm.plugin.options import Options
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.envelope import key_id

KEY_NAME = "signing-key.pem"
MAX_KEY_BYTES = 16 << 10
_REMEDY = "make one: openssl genpkey -algorithm ed25519"


class Ed25519Signer:
    """Signs statements.

    Attributes:
        public_key: the raw 32 bytes.
        keyid: their digest, as receipts carry it.
    """

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        public = private_key.public_key()
        self.public_key: bytes = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.keyid: Digest = key_id(self.public_key)
        self.public_pem: bytes = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of a message."""
        return self._private_key.sign(message)


def key_path(options: Options) -> Path:
    """Return the file of a deployment's key."""
    return Path(options.signing_key) if options.signing_key is not None else Path(options.store) / KEY_NAME


def ensure_key(options: Options) -> Ed25519Signer:
    """Return the deployment's signer, making a key in the store if the operator names none. The owner's to call.

    Raises:
        ConfigurationError: as ``load_signer``.
        StoreError: a new key cannot be written.
    """
    path = key_path(options)
    if options.signing_key is None and not path.exists():
        private_key = Ed25519PrivateKey.generate()
        encoded = private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_file_atomic(path, encoded, mode=0o600)
    return load_signer(options)


def load_signer(options: Options) -> Ed25519Signer:
    """Return the deployment's signer.

    Raises:
        ConfigurationError: the file is missing, open to others, or holds no unencrypted Ed25519 private key.
    """
    path = key_path(options)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _refusal(path, "not a plain file; give a PEM file")
            if stat.S_IMODE(mode) & 0o077:
                raise _refusal(path, f"others may use it (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}")
            content = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}; name a readable PEM file") from error
    try:
        private_key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        raise _refusal(path, f"not an unencrypted PEM private key; {_REMEDY}") from error
    if not isinstance(private_key, Ed25519PrivateKey):
        raise _refusal(path, f"not an Ed25519 key; {_REMEDY}")
    return Ed25519Signer(private_key)


def _refusal(path: Path, detail: str) -> ConfigurationError:
    return ConfigurationError(f"--epochless-signing-key {path}: {detail}", flag="signing_key")
