"""The options of a deployment: command-line flags, and ``additional_config["epochless"]`` where no flags exist.

Promises that every option is checked in one place, with the flag named in the refusal. Knows no engine state; the
dictionary form is what travels to every process of the deployment.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from epochless_vllm.errors import ConfigurationError

KEY = "epochless"
ATTEST = ("none", "summary", "receipt")
MIXED_ROWS = ("grouped", "stock")
BASE_DIGEST = ("full", "fast")
DEFAULT_KEEP = 4
DEFAULT_RECEIPTS_BYTES = 1 << 30
DEFAULT_RECEIPTS_AGE_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Options:
    """Validated options.

    Attributes:
        store: absolute directory of the store.
        attest: what a response carries when its request does not say: ``none``, ``summary`` or ``receipt``.
        keep: live revisions per policy beyond which the oldest is retired; None keeps all.
        import_root: directory that adapters given by path must be in; None allows any path.
        require_revision: refuse requests that name the base model.
        signing_key: file of the Ed25519 private key; None makes one in the store.
        receipts_bytes: receipts kept for ``GET /v1/receipts``, in bytes of all together; 0 keeps none.
        receipts_age: seconds after which a kept receipt is dropped.
        mixed_rows: ``grouped`` or ``stock`` LoRA operations on CPU.
        base_digest_mode: ``full`` hashes every weight byte, ``fast`` a sample per shard.
        base_digest: filled in at start; never an option of the user's.
    """

    store: str
    attest: str = "none"
    keep: int | None = DEFAULT_KEEP
    import_root: str | None = None
    require_revision: bool = False
    signing_key: str | None = None
    receipts_bytes: int = DEFAULT_RECEIPTS_BYTES
    receipts_age: int = DEFAULT_RECEIPTS_AGE_S
    mixed_rows: str = "grouped"
    base_digest_mode: str = "full"
    base_digest: str | None = None

    def encode(self) -> dict[str, Any]:
        """Return the JSON form kept in ``additional_config``."""
        return asdict(self)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def parse_options(value: object) -> Options:
    """Return checked options from the dictionary form.

    Raises:
        ConfigurationError: a key is unknown, missing or out of range.
    """
    if not isinstance(value, dict):
        raise _refusal("epochless", "must be an object with at least the key 'store'")
    known = {item.name for item in fields(Options)}
    if unknown := sorted(set(value) - known):
        raise _refusal(unknown[0], f"is not an option; known: {', '.join(sorted(known))}")
    if not _is_path(value.get("store")):
        raise _refusal("store", "name a directory for revisions and the journal")
    for key, allowed in (("attest", ATTEST), ("mixed_rows", MIXED_ROWS), ("base_digest_mode", BASE_DIGEST)):
        if key in value and value[key] not in allowed:
            raise _refusal(key, f"must be one of {', '.join(allowed)}")
    keep = value.get("keep", DEFAULT_KEEP)
    if keep is not None and (type(keep) is not int or not 1 <= keep <= 4096):
        raise _refusal("keep", "must be an integer from 1 to 4096, or null to keep all")
    import_root = value.get("import_root")
    if import_root is not None and not (_is_path(import_root) and Path(import_root).is_dir()):
        raise _refusal("import_root", f"{import_root!a} is not a directory; name one that exists")
    if type(value.get("require_revision", False)) is not bool:
        raise _refusal("require_revision", "must be true or false")
    for key, least in (("receipts_bytes", 0), ("receipts_age", 1)):
        if key in value and (type(value[key]) is not int or not least <= value[key] < 1 << 53):
            raise _refusal(key, f"must be an integer of at least {least}")
    if value.get("signing_key") is not None and not _is_path(value["signing_key"]):
        raise _refusal("signing_key", "name the file of an Ed25519 private key in PEM")
    if value.get("attest", "none") != "none" and value.get("mixed_rows") == "stock":
        raise _refusal("attest", "not with --epochless-mixed-rows stock, which may sample base rows by an adapter")
    if value.get("signing_key") is not None:
        value = {**value, "signing_key": str(Path(value["signing_key"]).absolute())}
    return Options(**{**value, "store": str(Path(value["store"]).absolute())})


def options_of(additional_config: object) -> Options | None:
    """Return the options inside an engine's ``additional_config``, or None when Epochless is off."""
    if not isinstance(additional_config, dict) or KEY not in additional_config:
        return None
    return parse_options(additional_config[KEY])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm serve`` in a group of their own; a second call does nothing."""
    if any("--enable-epochless" in action.option_strings for action in parser._actions):
        return
    group = parser.add_argument_group("Epochless", "Live LoRA revisions: publish without pause, pin, attest.")
    group.add_argument("--enable-epochless", action="store_true", default=False, help="Serve live revisions.")
    group.add_argument("--epochless-store", metavar="DIR", help="Directory for revisions and the journal (required).")
    group.add_argument("--epochless-attest", choices=ATTEST, help="What responses carry by default (none).")
    group.add_argument(
        "--epochless-keep", metavar="N", help=f"Live revisions kept per policy, or 'all' (default {DEFAULT_KEEP})."
    )
    group.add_argument("--epochless-import-root", metavar="DIR", help="Adapters given by path must be inside.")
    group.add_argument(
        "--epochless-require-revision",
        action="store_true",
        default=False,
        help="Refuse requests that name the base model.",
    )
    group.add_argument("--epochless-signing-key", metavar="FILE", help="Ed25519 private key (PEM) for receipts.")
    group.add_argument("--epochless-receipts-bytes", type=int, metavar="N", help="Receipts kept, in bytes (1 GiB).")
    group.add_argument("--epochless-receipts-age", type=int, metavar="SECONDS", help="... and for how long (7 days).")
    group.add_argument("--epochless-mixed-rows", choices=MIXED_ROWS, help="LoRA operations on CPU (default grouped).")
    group.add_argument(
        "--epochless-base-digest", choices=BASE_DIGEST, help="Hash all weight bytes, or a sample (default full)."
    )


def fold_flags(args: argparse.Namespace) -> None:
    """Move parsed flags into ``args.additional_config["epochless"]``.

    Raises:
        ConfigurationError: a flag is malformed, or given without ``--enable-epochless``.
    """
    given = {
        "store": getattr(args, "epochless_store", None),
        "attest": getattr(args, "epochless_attest", None),
        "keep": getattr(args, "epochless_keep", None),
        "import_root": getattr(args, "epochless_import_root", None),
        "require_revision": getattr(args, "epochless_require_revision", None) or None,
        "signing_key": getattr(args, "epochless_signing_key", None),
        "receipts_bytes": getattr(args, "epochless_receipts_bytes", None),
        "receipts_age": getattr(args, "epochless_receipts_age", None),
        "mixed_rows": getattr(args, "epochless_mixed_rows", None),
        "base_digest_mode": getattr(args, "epochless_base_digest", None),
    }
    options = {key: value for key, value in given.items() if value is not None}
    if not getattr(args, "enable_epochless", False):
        if options:
            raise _refusal(next(iter(options)), "is given without --enable-epochless; add that flag")
        return
    if "keep" in options:
        options["keep"] = _parse_keep(options["keep"])
    if args.additional_config is None:
        args.additional_config = {}
    args.additional_config = {**args.additional_config, KEY: parse_options(options).encode()}


def _parse_keep(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isascii() or not text.isdigit():
        raise _refusal("keep", "must be an integer of at least 1, or 'all'")
    return int(text)


def _refusal(key: str, detail: str) -> ConfigurationError:
    flag = {"base_digest_mode": "base-digest"}.get(key, key.replace("_", "-"))
    return ConfigurationError(f"--epochless-{flag} ({KEY}.{key}): {detail}", flag=key)
