"""Publishing from a trainer that holds a PEFT model, TRL's included.

    publish_model(client, model, policy="policy", step=trainer.state.global_step)

The adapter is saved to a temporary directory and uploaded: trainer and server need share no filesystem. Knows only
``save_pretrained``; peft itself is not imported.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from epochless_vllm.client.client import TENSORS_NAME, EpochlessClient
from epochless_vllm.errors import AdapterNotFoundError
from epochless_vllm.wire import PublishReply


def publish_model(
    client: EpochlessClient, model: Any, *, policy: str, step: int | None = None, adapter_name: str = "default"
) -> PublishReply:
    """Publish an adapter of a PeftModel.

    With several training processes call it in one of them, after gathering a sharded model.

    Raises:
        AdapterNotFoundError: the model saved no adapter of that name.
        EpochlessError: nothing changed on the server.
    """
    with tempfile.TemporaryDirectory(prefix="epochless-publish-") as directory:
        model.save_pretrained(directory, safe_serialization=True, selected_adapters=[adapter_name])
        # PEFT saves "default" at the top and any other adapter in a directory of its name.
        candidates = [Path(directory), Path(directory) / adapter_name]
        saved = next((path for path in candidates if (path / TENSORS_NAME).is_file()), None)
        if saved is None:
            known = sorted(getattr(model, "peft_config", {}))
            raise AdapterNotFoundError(
                f"adapter {adapter_name!r}: the model saved none; it has {known}",
                adapter_name=adapter_name,
            )
        return client.upload(policy, saved, step=step)
