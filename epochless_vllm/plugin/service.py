"""Publication as one front-end process sees it: what admission, the routes and the in-process API all call.

``resolve`` runs on the owning thread and is fast: a counter check and a dictionary. Everything that writes is
synchronous and belongs in a thread of its own. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from epochless_vllm.errors import InvalidRequestError, RevisionRequiredError, UnknownRevisionError
from epochless_vllm.plugin.background import short_turns
from epochless_vllm.plugin.descriptions import describe_policies, describe_revision
from epochless_vllm.plugin.expectations import RegisteredExpectation
from epochless_vllm.plugin.finite import find_non_finite
from epochless_vllm.plugin.options import Options, options_of
from epochless_vllm.plugin.ranks import EngineRanks, Transport
from epochless_vllm.protocol.names import parse_policy, split_versioned
from epochless_vllm.protocol.publication import Publication, State
from epochless_vllm.protocol.resolution import find_pinned, parse_constraint, resolve_model, unknown_model
from epochless_vllm.publication.coordinator import Coordinator, Draining, Published
from epochless_vllm.publication.journal import Journal, JournalView
from epochless_vllm.store.base_modules import read_base_modules
from epochless_vllm.store.revisions import Ingested, RevisionStore, Watch

_current: PublicationService | None = None


def current_service() -> PublicationService | None:
    """Return this process's service, or None before it started or without Epochless."""
    return _current


class PublicationService:
    """Publishes, resolves and retires on behalf of one front end.

    Attributes:
        options: the deployment's options, base digest included.
        base_digest: digest of the served base model.
        base_names: names the base model is served under.
    """

    def __init__(self, vllm_config: Any, transport: Transport, base_names: frozenset[str]) -> None:
        options = options_of(vllm_config.additional_config)
        assert options is not None
        assert options.base_digest is not None
        self.options: Options = options
        self.base_digest: str = options.base_digest
        self.base_names = base_names
        store = Path(options.store)
        base_modules = read_base_modules(vllm_config.model_config.model)
        self.store = RevisionStore(store, base_modules=base_modules, find_non_finite=find_non_finite)
        self.journal = Journal(store / "journal.sqlite")
        self.view = JournalView(store / "journal.sqlite", after=self.journal)
        self._ranks = EngineRanks(transport, vllm_config, self.store)
        self.coordinator = Coordinator(
            self.store,
            self.journal,
            self._ranks,
            keep=options.keep,
            capacity=vllm_config.lora_config.max_cpu_loras,
        )
        self._resolved: dict[str, Publication] = {}
        self._resolved_state: State | None = None
        self._requests: dict[str, Any] = {}
        self._by_adapter: dict[int, Publication] = {}
        self._indexed = 0

    def state(self) -> State:
        """Return the committed state as of now. Owning thread only."""
        return self.view.current()

    def resolve(self, model: str | None, weight_version: object = None) -> Publication | None:
        """Return the publication a request runs on, or None for the base model. Owning thread only.

        Raises:
            UnknownRevisionError, RetiredRevisionError, QuarantinedRevisionError, ConflictError, InvalidRequestError:
                see protocol/resolution.py.
            RevisionRequiredError: the base model was named and the deployment requires a revision.
        """
        state = self.view.current()
        if state is not self._resolved_state:
            self._resolved.clear()
            self._resolved_state = state
        if weight_version is None and model is not None:
            known = self._resolved.get(model)
            if known is not None:
                return known
        if not model or model in self.base_names:
            return self._resolve_base(weight_version)
        publication = resolve_model(state, model, parse_constraint(weight_version))
        if publication is None:
            raise unknown_model(state, model)
        if weight_version is None:
            self._resolved[model] = publication
        return publication

    def _resolve_base(self, weight_version: object) -> None:
        if weight_version is not None:
            raise InvalidRequestError(
                "weight_version: the base model has no versions; name a policy in `model`", field="weight_version"
            )
        if self.options.require_revision:
            raise RevisionRequiredError(
                "model: this server requires a revision; name a policy, policy@sha256:<hex> or policy-v<step>",
                field="model",
            )

    def publication_of(self, lora_int_id: int, policy: str | None) -> Publication | None:
        """Return the latest publication under an engine id, retired ones included; ``policy``'s own if it has one.

        Owning thread only.
        """
        publications = self.view.current().publications
        for sequence in range(self._indexed + 1, len(publications) + 1):
            self._by_adapter[publications[sequence].lora_int_id] = publications[sequence]
        self._indexed = len(publications)
        latest = self._by_adapter.get(lora_int_id)
        if latest is None or policy is None:
            return latest
        own = publications.of_revision(policy, latest.revision_id)
        return own if own is not None and own.lora_int_id == lora_int_id else latest

    def lora_request(self, publication: Publication) -> Any:
        """Return the engine's request for a publication; the same object for the same revision and policy."""
        from vllm.lora.request import LoRARequest

        key = f"{publication.lora_int_id}:{publication.lora_name}"
        request = self._requests.get(key)
        if request is None:
            if len(self._requests) > 4096:
                self._requests.clear()
            # The path is never read: the ranks hold the adapter before any request can name it.
            path = f"{self.options.store}/revisions/{publication.revision_id.removeprefix('sha256:')}"
            request = LoRARequest(publication.lora_name, publication.lora_int_id, path)
            self._requests[key] = request
        return request

    def publish_directory(self, path: str, lora_name: str, step: int | None = None) -> Published:
        """Publish the PEFT adapter in a local directory under a policy. Blocking.

        Args:
            lora_name: a policy, or ``policy-v<step>`` when ``step`` is None.

        Raises:
            EpochlessError: nothing changed; the message says what to do.
        """
        policy, step = self._policy_and_step(lora_name, step)
        root = Path(self.options.import_root) if self.options.import_root else None
        return self._publish(
            lambda watch: self.store.ingest_directory(
                Path(path), import_root=root, watch=watch, announce=self._ranks.announce
            ),
            policy,
            step,
        )

    def publish_files(self, files: Mapping[str, BinaryIO], policy: str, step: int | None = None) -> Published:
        """Publish uploaded files (``adapter_config.json``, ``adapter_model.safetensors``) under a policy. Blocking.

        Raises:
            EpochlessError: as ``publish_directory``.
        """
        policy, step = self._policy_and_step(policy, step)
        return self._publish(
            lambda watch: self.store.ingest_files(files, watch=watch, announce=self._ranks.announce), policy, step
        )

    def _publish(self, ingest: Callable[[Watch], Ingested], policy: str, step: int | None) -> Published:
        expectation = RegisteredExpectation(self._ranks.dtype)
        with short_turns():
            ingested = ingest(expectation)
            self._ranks.note_expected(ingested.revision_id, expectation.digest_of(ingested.manifest))
        try:
            return self.coordinator.publish(ingested.revision_id, policy, step)
        finally:
            self._ranks.forget_expected(ingested.revision_id)

    def _policy_and_step(self, name: str, step: int | None) -> tuple[str, int | None]:
        parse_policy(name, field="lora_name")
        if step is None and (versioned := split_versioned(name)) is not None:
            name, step = versioned
            parse_policy(name, field="lora_name")
        if name in self.base_names:
            raise InvalidRequestError(
                f"lora_name: {name!r} is the base model's name; publish under another", field="lora_name"
            )
        return name, step

    def retire(self, model: str) -> list[Draining]:
        """Begin to retire all revisions of a policy, or the one a pinned model string names. Blocking.

        Raises:
            UnknownRevisionError, RetiredRevisionError, HeadRetirementError, StorageFullError.
        """
        state = self.journal.refresh()
        if state.publications.knows(model):
            return self.coordinator.retire(model, None)
        publication = find_pinned(state, model)
        if publication is None:
            raise UnknownRevisionError(
                f"The lora adapter '{model}' cannot be found. {unknown_model(state, model).message}", model=model
            )
        return self.coordinator.retire(publication.policy, publication.revision_id)

    def pump(self) -> int:
        """Remove retired revisions that no request holds any more; return how many still drain. Blocking."""
        return self.coordinator.pump_retirements()

    def describe(self, policy: str | None = None) -> dict[str, Any]:
        """Return the policies, their heads and revisions as ``descriptions`` bounds them. Owning thread only.

        Raises:
            UnknownRevisionError: no such policy.
        """
        return {
            "base_digest": self.base_digest,
            "epoch": self.view.current().epoch,
            **describe_policies(self.view.current(), policy),
        }

    def describe_revision(self, policy: str, revision: str) -> dict[str, Any]:
        """Return one revision of a policy by digest, digest prefix or step, also one that ``describe`` only counts.

        Raises:
            UnknownRevisionError: there is none. AmbiguousRevisionError: several begin so.
        """
        return describe_revision(self.view.current(), policy, revision)


def start_service(vllm_config: Any, transport: Transport, base_names: frozenset[str]) -> PublicationService:
    """Make this process's service; a later start replaces it."""
    global _current
    _current = PublicationService(vllm_config, transport, base_names)
    return _current
