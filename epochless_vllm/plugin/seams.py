"""Installs every seam of an enabled deployment in this process, once.

Each seam is a file of this room named after what it wraps, with ``install``: idempotent, and a SeamError when its
target is missing. Knows which seams exist, not what they do.
"""

from __future__ import annotations

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.options import Options

_installed = False


def install_seams(options: Options) -> None:
    """Install all seams; a second call does nothing.

    Raises:
        SeamError: the engine is unpatched, or lacks a target.
    """
    global _installed
    from epochless_vllm.plugin import orphans

    orphans.install()  # a forked process has the seams of its parent, and not its threads
    if _installed:
        return
    from epochless_vllm.plugin import (
        admission,
        attestation,
        block_keys,
        control,
        core,
        draw_keys,
        exit_status,
        failed_rows,
        fairness,
        labels,
        local_requests,
        metrics,
        preemptions,
        punica,
        recovery,
        routes,
        slots,
        spinning,
        worker,
    )

    check_patch()
    in_engine = (
        worker,
        slots,
        block_keys,
        core,
        control,
        fairness,
        draw_keys,
        attestation,
        failed_rows,
        preemptions,
        local_requests,
        recovery,
        spinning,
    )
    for seam in (*in_engine, admission, routes, labels, metrics, exit_status):
        seam.install()
    orphans.watch_coordinator()
    punica.install(options)
    _installed = True


def check_patch() -> None:
    """Require the patched engine, byte for byte.

    Raises:
        SeamError: a touched file is not the pinned postimage; says how to apply the patch.
    """
    from epochless_vllm.patch.installation import patch_status
    from epochless_vllm.patch.tree import find_installed_tree

    status = patch_status(find_installed_tree())
    if status.state != "patched":
        raise SeamError(
            f"vLLM in {status.root} is {status.state}: {status.reason}; run: epochless patch apply",
            target=str(status.root),
            state=status.state,
        )
