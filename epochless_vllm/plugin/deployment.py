"""A deployment: the processes that one start of the server makes, owned by the process that builds the configuration.

The owner takes the store's lock, computes the base digest and begins an epoch in the journal; the processes it spawns
find the epoch in their environment. Promises that two deployments never share a store, and that a message of an
earlier epoch is recognised. Wraps ``EngineArgs.create_engine_config``, which every way of building an engine passes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from epochless_vllm.durable import FileLock
from epochless_vllm.errors import ConfigurationError, SeamError, StoreError
from epochless_vllm.plugin.logs import logger
from epochless_vllm.plugin.options import KEY, Options, options_of, parse_options
from epochless_vllm.plugin.signer import ensure_key, key_path
from epochless_vllm.store.base_model import BaseSettings, compute_base_digest
from epochless_vllm.store.permissions import make_private_directory, require_private

# "<owner's process id>:<epoch>"; children inherit it, and a process that finds its own id is an owner itself.
EPOCH_VARIABLE = "EPOCHLESS_DEPLOYMENT"

_locks: dict[str, FileLock] = {}


def wrap_engine_args() -> None:
    """Wrap ``EngineArgs.create_engine_config``.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = getattr(EngineArgs, "create_engine_config", None)
    if original is None:
        raise SeamError("EngineArgs has no create_engine_config", target="create_engine_config")
    if getattr(original, "_epochless", False):
        return

    def create_engine_config(self: Any, *arguments: Any, **keywords: Any) -> Any:
        options = options_of(self.additional_config)
        if options is None:
            return original(self, *arguments, **keywords)
        require_patch()
        set_defaults(self, options)
        config = original(self, *arguments, **keywords)
        begin_deployment(config, options)
        return config

    create_engine_config._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    EngineArgs.create_engine_config = create_engine_config


def require_patch() -> None:
    """Refuse to start on an engine that does not call us: nothing else would notice.

    Raises:
        SeamError: the engine is unpatched, or patched otherwise.
    """
    from epochless_vllm.plugin.seams import check_patch

    check_patch()


def set_defaults(engine_args: Any, options: Options) -> None:
    """Size the engine for live revisions where the operator did not.

    ``max_cpu_loras`` bounds live revisions: the kept ones, one draining and one being prepared. ``max_loras`` bounds
    the revisions of one step.

    Raises:
        ConfigurationError: an environment variable asks for what Epochless does not cover.
    """
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        raise ConfigurationError(
            "VLLM_USE_V2_MODEL_RUNNER=1: the V2 runner was not run with Epochless yet; unset it", flag="v2_model_runner"
        )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    engine_args.enable_lora = True
    if engine_args.async_scheduling is None:
        engine_args.async_scheduling = False
    if engine_args.max_cpu_loras is None:
        keep = options.keep if options.keep is not None else 14
        if engine_args.max_loras == type(engine_args).max_loras:
            engine_args.max_loras = min(keep + 1, 4)
        engine_args.max_cpu_loras = max(keep + 2, engine_args.max_loras)


def begin_deployment(config: Any, options: Options) -> None:
    """Complete the options in a VllmConfig, and begin an epoch unless a parent process did.

    Raises:
        StoreLockedError: another server holds the store.
        ConfigurationError: the base digest cannot be computed, or the store is not the server's own.
    """
    store = Path(options.store)
    take_store(store)
    owner, _, _ = os.environ.get(EPOCH_VARIABLE, "").partition(":")
    owns = owner in ("", str(os.getpid())) or options.store in _locks
    if owns and options.store not in _locks:
        _locks[options.store] = FileLock(store / "lock", purpose="vLLM server")
    model = config.model_config
    settings = BaseSettings(
        dtype=str(model.dtype),
        quantization=str(model.quantization),
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        overrides=repr(sorted((model.hf_overrides or {}).items())) if isinstance(model.hf_overrides, dict) else "",
        load_format="dummy" if str(config.load_config.load_format) == "dummy" else "files",
    ).encode()
    base_digest = compute_base_digest(model.model, settings, mode=options.base_digest_mode, cache_directory=store)
    complete = {**options.encode(), "base_digest": base_digest}
    config.additional_config = {**config.additional_config, KEY: parse_options(complete).encode()}
    if owns:
        signer = ensure_key(options)
        logger.info("receipts are signed with %s by key %s", key_path(options), signer.keyid)
        os.environ[EPOCH_VARIABLE] = f"{os.getpid()}:{_begin_epoch(store)}"


def take_store(store: Path) -> None:
    """Make the store's directory if it is missing, and require that nobody but its owner may change it.

    Raises:
        ConfigurationError: it cannot be made or read, or its group or everybody may write there: what the journal says
            could then be anybody's.
    """
    try:
        make_private_directory(store)
        require_private(store)
    except StoreError as error:
        raise ConfigurationError(f"--epochless-store {error.message}", flag="store", **error.fields) from error


def _begin_epoch(store: Path) -> int:
    from epochless_vllm.publication.journal import Journal
    from epochless_vllm.store.revisions import RevisionStore

    RevisionStore(store).clear_incoming()  # an ingest that a crash cut short left its files there
    journal = Journal(store / "journal.sqlite")
    try:
        return journal.begin_epoch()
    finally:
        journal.close()
