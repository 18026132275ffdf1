"""Seam: processes of a deployment whose parent is gone.

vLLM ends its children when it ends in an orderly way; a front end ended by SIGKILL or the kernel's memory killer leaves
the engine core running, with its memory, and nobody to speak to. Here every process that a deployment spawned watches
its parent and the deployment's owner, which may end before this process has begun to watch, and ends when either does.
Dies when upstream's engine core watches its front end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.deployment import EPOCH_VARIABLE
from epochless_vllm.plugin.logs import logger

POLL_S = 0.5
GRACE_S = 10.0  # for an orderly end; a process that hangs in a step ends without one

_coordinator: Callable[..., None] | None = None  # vLLM's own, where it was replaced
_watching: int | None = None  # the process that watches: a forked one finds its parent's id here, and no thread


def install() -> None:
    """Watch this process's parent if a deployment spawned this process; a second call does nothing.

    The owner of a deployment is left alone: its parent is a shell or a program of the operator's.
    """
    global _watching
    owner = os.environ.get(EPOCH_VARIABLE, "").partition(":")[0]
    if _watching == os.getpid() or owner in ("", str(os.getpid())):
        return
    _watching = os.getpid()
    arguments = (os.getppid(), int(owner))
    threading.Thread(target=watch, args=arguments, name="epochless-orphan-watch", daemon=True).start()


def watch_coordinator() -> None:
    """Have the coordinator of data-parallel engines watched too: its process loads no plugin.

    Raises:
        SeamError: the target is missing.
    """
    global _coordinator
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    if not hasattr(DPCoordinatorProc, "run_coordinator"):
        raise SeamError("DPCoordinatorProc has no run_coordinator", target="DPCoordinatorProc.run_coordinator")
    if DPCoordinatorProc.run_coordinator is not run_coordinator:
        _coordinator = DPCoordinatorProc.run_coordinator
        DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)  # type: ignore[method-assign]


def run_coordinator(*arguments: Any, **keywords: Any) -> None:
    """Run vLLM's coordinator in its process, under watch. A spawned process finds this function by its name."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    install()
    (_coordinator or DPCoordinatorProc.run_coordinator)(*arguments, **keywords)


def watch(parent: int, owner: int) -> None:
    """Return never; end this process when ``parent`` is its parent no more, or ``owner`` runs no more."""
    while os.getppid() == parent and is_running(owner):
        time.sleep(POLL_S)
    logger.error("process %d, which started this one, is gone; ending", owner if os.getppid() == parent else parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def is_running(process: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
