"""Seam: processes of a deployment whose parent is gone.

vLLM ends its children when it ends in an orderly way; a front end ended by SIGKILL or the kernel's memory killer leaves
the engine core running, with its memory, and nobody to speak to. Here every process that a deployment spawned watches
its parent, and ends when that does. Dies when upstream's engine core watches its front end.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from epochless_vllm.plugin.deployment import EPOCH_VARIABLE
from epochless_vllm.plugin.logs import logger

POLL_S = 0.5
GRACE_S = 10.0  # for an orderly end; a process that hangs in a step ends without one

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
    threading.Thread(target=watch, args=(os.getppid(),), name="epochless-orphan-watch", daemon=True).start()


def watch(parent: int) -> None:
    """Return never; end this process when ``parent`` is its parent no more."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    logger.error("process %d, which started this one, is gone; ending", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
