"""RFC 8032 vectors, agreement with another implementation, and the encodings a lax verifier lets through."""

from __future__ import annotations

import hashlib
import random

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from epochless_vllm.errors import ReceiptError
from epochless_vllm.verify.ed25519 import verify_ed25519

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493

# RFC 8032, section 7.1: public key, message, signature.
RFC_8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    (  # the message is the SHA-512 of "abc"
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        hashlib.sha512(b"abc").hexdigest(),
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
]
SMALL_ORDER = [  # the eight points of small order, canonical and not
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "0100000000000000000000000000000000000000000000000000000000000080",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


def pair() -> tuple[bytes, Ed25519PrivateKey]:
    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    return private.public_key().public_bytes_raw(), private


def refusal(public_key: bytes, message: bytes, signature: bytes) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify_ed25519(public_key, message, signature)
    return str(caught.value.fields["threat"])


@pytest.mark.parametrize(("public_key", "message", "signature"), RFC_8032)
def test_vectors_of_rfc_8032_verify(public_key: str, message: str, signature: str) -> None:
    text = bytes.fromhex(message)
    assert verify_ed25519(bytes.fromhex(public_key), text, bytes.fromhex(signature)) == text


def test_signatures_of_another_implementation_verify_and_their_damage_does_not() -> None:
    rng = random.Random(8032)
    for length in range(24):
        private = Ed25519PrivateKey.from_private_bytes(rng.randbytes(32))
        public_key, message = private.public_key().public_bytes_raw(), rng.randbytes(length * 11)
        signature = private.sign(message)
        assert verify_ed25519(public_key, message, signature) == message
        damaged = bytearray(signature)
        damaged[rng.randrange(64)] ^= 1 << rng.randrange(8)
        assert refusal(public_key, message, bytes(damaged)) in ("signature", "signature_point", "signature_scalar")
        assert refusal(public_key, message + b"x", signature) == "signature"


def test_scalar_that_is_not_reduced_is_refused() -> None:
    public_key, private = pair()
    signature = private.sign(b"message")
    scalar = int.from_bytes(signature[32:], "little")
    for wrong in (scalar + L, L, 2**256 - 1):
        assert refusal(public_key, b"message", signature[:32] + wrong.to_bytes(32, "little")) == "signature_scalar"


@pytest.mark.parametrize("encoded", SMALL_ORDER)
def test_key_or_commitment_of_small_order_is_refused(encoded: str) -> None:
    # With such a key, any message has a signature: R = s * B - k * A repeats after at most eight tries.
    public_key, private = pair()
    signature = private.sign(b"message")
    point = bytes.fromhex(encoded)
    assert refusal(point, b"message", signature) in ("small_order", "public_key")
    assert refusal(public_key, b"message", point + signature[32:]) in ("small_order", "signature_point")


def test_coordinate_that_is_not_reduced_is_refused() -> None:
    public_key, private = pair()
    signature = private.sign(b"message")
    for y in (P, P + 1, P + 3, 2**255 - 1):
        encoded = y.to_bytes(32, "little")
        assert refusal(encoded, b"message", signature) == "public_key"
        assert refusal(public_key, b"message", encoded + signature[32:]) == "signature_point"


def test_point_off_the_curve_is_refused() -> None:
    public_key, private = pair()
    signature = private.sign(b"message")
    off = next(
        y.to_bytes(32, "little")
        for y in range(2, 50)
        if pow((y * y - 1) * pow(-121665 * pow(121666, -1, P) * y * y + 1, -1, P), (P - 1) // 2, P) == P - 1
    )
    assert refusal(off, b"message", signature) == "public_key"
    assert refusal(public_key, b"message", off + signature[32:]) == "signature_point"


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_key_of_another_length_is_refused(length: int) -> None:
    assert refusal(bytes(length), b"", bytes(64)) == "public_key"


@pytest.mark.parametrize("length", [0, 63, 65])
def test_signature_of_another_length_is_refused(length: int) -> None:
    assert refusal(pair()[0], b"", bytes(length)) == "signature_form"
