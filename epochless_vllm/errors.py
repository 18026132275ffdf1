"""The whole error tree of Epochless on one screen.

Every error carries its facts as attributes, a stable ``code`` for machines, the HTTP ``status`` a front end
answers with, and a message that ends in what the reader can do. Knows nothing of the rooms that raise.
"""

from __future__ import annotations

from typing import Any


class EpochlessError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: stable machine-readable name, the same across releases.
        status: HTTP status of the answer that carries this error.
        fields: the facts, JSON-encodable.
    """

    code = "epochless_error"
    status = 500

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def describe(self) -> dict[str, Any]:
        """Return ``{code, message, **fields}`` for JSON answers."""
        return {"code": self.code, "message": self.message, **self.fields}


# Requests


class InvalidRequestError(EpochlessError):
    """A field of a request is malformed; ``field`` names it."""

    code, status = "invalid_request", 400

    def __init__(self, message: str, *, field: str, **fields: Any) -> None:
        super().__init__(message, field=field, **fields)


class RevisionRequiredError(InvalidRequestError):
    """The server requires a revision and the request names the base model."""

    code = "revision_required"


class UploadTooLargeError(InvalidRequestError):
    """A part of an upload is larger than an adapter's may be; ``limit`` is in bytes."""

    code, status = "upload_too_large", 413


class BodyTooSlowError(InvalidRequestError):
    """A request's body stopped, or trickles in."""

    code, status = "body_too_slow", 408


class UploadsBusyError(EpochlessError):
    """As many uploads are arriving as this front end takes at once."""

    code, status = "uploads_busy", 503


class UnauthorizedError(EpochlessError):
    """The request carries none of the server's API keys."""

    code, status = "unauthorized", 401


class UnknownRevisionError(EpochlessError):
    """No policy, step or revision of that name was ever committed here."""

    code, status = "unknown_revision", 404


class RetiredRevisionError(EpochlessError):
    """The named revision was committed and has been retired."""

    code, status = "retired_revision", 410


class QuarantinedRevisionError(EpochlessError):
    """A rank failed to activate the revision; it serves nobody until republished."""

    code, status = "quarantined_revision", 503


class UnknownReceiptError(EpochlessError):
    """No receipt of that id or request is kept here: it never was, or it was dropped by size or age."""

    code, status = "unknown_receipt", 404


class SamplingFailedError(EpochlessError):
    """No token could be drawn for a choice: its logits are not finite, or all of them are masked."""

    code = "sampling_failed"


class TokenRowsError(EpochlessError):
    """The rows beside a response's tokens are missing, or name an adapter they may not name."""

    code = "token_rows"


# Conflicts


class ConflictError(EpochlessError):
    """The request contradicts the committed state."""

    code, status = "conflict", 409


class AmbiguousRevisionError(ConflictError):
    """A digest prefix names more than one live revision; ``candidates`` lists them."""

    code = "ambiguous_revision"


class StepConflictError(ConflictError):
    """The policy already has other content under that step."""

    code = "step_conflict"


class CapacityError(ConflictError):
    """The registry is full and nothing can be retired; ``holders`` says who holds it."""

    code = "registry_full"


class HeadRetirementError(ConflictError):
    """The head cannot be retired while older revisions of its policy are live."""

    code = "head_retirement"


class WeightVersionNotReadyError(ConflictError):
    """The requested ``min_version`` or ``exact_version`` is not the applied one."""

    code = "WeightVersionNotReady"


# Adapters


class RefusedAdapterError(EpochlessError):
    """The adapter cannot be served exactly as written; nothing was changed."""

    code, status = "refused_adapter", 422


class InspectError(RefusedAdapterError):
    """A file is not a well-formed safetensors or PEFT file; ``reason`` is a stable word."""

    code = "inspect_failed"

    def __init__(self, message: str, *, reason: str, **fields: Any) -> None:
        super().__init__(message, reason=reason, **fields)


class AdapterConfigError(RefusedAdapterError):
    """A key of adapter_config.json changes the mathematics and is not supported; ``field`` names it."""

    code = "adapter_config_refused"

    def __init__(self, message: str, *, field: str, **fields: Any) -> None:
        super().__init__(message, field=field, **fields)


class AdapterNotFoundError(EpochlessError):
    """The path given for an adapter does not exist on this server."""

    code, status = "adapter_not_found", 404


class PathRefusedError(EpochlessError):
    """The path is outside the import root, or not a plain file or directory."""

    code, status = "path_refused", 403


# Publication


class PublicationError(EpochlessError):
    """A publication was aborted on every rank; old revisions serve on. ``rank`` and ``reason`` say why."""

    code, status = "publication_aborted", 503


class RankRefusalError(PublicationError):
    """A rank examined the adapter and refused it: retrying the same bytes cannot succeed."""

    code, status = "rank_refused", 422


class ChannelError(EpochlessError):
    """A rank's channel has nobody of ours at its other end, or nobody who answers."""

    code, status = "channel_ended", 503


class DigestMismatchError(EpochlessError):
    """Bytes do not have the digest they were named by."""

    code, status = "digest_mismatch", 500

    def __init__(self, message: str, *, expected: str, actual: str, subject: str) -> None:
        super().__init__(message, expected=expected, actual=actual, subject=subject)


class StaleEpochError(EpochlessError):
    """A message or write carries an epoch lower than the current one."""

    code, status = "stale_epoch", 503


class IllegalTransitionError(EpochlessError):
    """A publication event is not allowed in the current state; a fault of the caller."""

    code = "illegal_transition"


# Storage


class StoreError(EpochlessError):
    """The store cannot do what was asked; ``path`` says where."""

    code = "store_error"


class StorageFullError(StoreError):
    """The disk is full, or refuses writes."""

    code, status = "storage_full", 507


class StoreLockedError(StoreError):
    """Another server holds the store."""

    code, status = "store_locked", 503


class JournalError(StoreError):
    """The journal is damaged or contradicts itself."""

    code = "journal_error"


class UndecidedError(JournalError):
    """The disk failed at commit and the outcome cannot be read back; publishing refuses until restart."""

    code, status = "undecided", 503


# Start-up, patch, canonical bytes


class ConfigurationError(EpochlessError):
    """The server refuses to start as configured; ``flag`` names the option."""

    code = "configuration_refused"


class SeamError(EpochlessError):
    """The engine lacks the target of a seam: it is not the pinned version, or not patched."""

    code = "seam_missing"


class PatchError(EpochlessError):
    """The patch cannot be verified, applied or reverted; ``step`` says where it stopped."""

    code = "patch_refused"


class EncodingError(EpochlessError):
    """Bytes are not the one canonical encoding of a value; ``reason`` is a stable word."""

    code, status = "encoding_refused", 400

    def __init__(self, message: str, *, reason: str, **fields: Any) -> None:
        super().__init__(message, reason=reason, **fields)


class ReceiptError(EpochlessError):
    """A receipt is refused; ``threat`` is the stable code of what it would have got away with."""

    code, status = "receipt_refused", 422

    def __init__(self, message: str, *, threat: str, **fields: Any) -> None:
        super().__init__(message, threat=threat, **fields)


# Clients


class ServerUnreachableError(EpochlessError):
    """The server did not answer; ``url`` says which."""

    code, status = "server_unreachable", 503


class UnexpectedReplyError(EpochlessError):
    """The server answered in words this client does not know: not an Epochless server, or a newer one."""

    code, status = "unexpected_reply", 502


# Audit


class ModelRefusedError(EpochlessError):
    """The reference engine does not compute this model exactly as written; ``field`` names the reason."""

    code, status = "model_refused", 422

    def __init__(self, message: str, *, field: str, **fields: Any) -> None:
        super().__init__(message, field=field, **fields)


class ReplayError(EpochlessError):
    """A sequence cannot be computed: a token outside the vocabulary, or more positions than were provided for."""

    code, status = "replay_refused", 422


class TokenizerError(EpochlessError):
    """A tokenizer.json, a text or a token the tokenizer does not read exactly; ``field`` names the reason."""

    code, status = "tokenizer_refused", 422

    def __init__(self, message: str, *, field: str, **fields: Any) -> None:
        super().__init__(message, field=field, **fields)
