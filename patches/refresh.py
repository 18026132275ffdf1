"""Write the patch series, pin.json and the digests that embed it, from a git branch with one commit per seam.

    python patches/refresh.py REPOSITORY BASE TIP

REPOSITORY is a clone of vLLM; BASE is the pinned commit (any commit with its files will do), TIP the last seam. Each
commit message names its seam in a line 'Seam: NAME' and says why it exists; see README.md. For another vLLM, first
change UPSTREAM in verify_patch.py and in epochless_vllm/patch/pin.py. A maintainer's tool: nothing else runs it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DATA = ROOT / "epochless_vllm" / "patch" / "data"
sys.path.insert(0, str(ROOT))

import verify_patch  # noqa: E402  beside the package, not in it

FORMAT_PATCH = (
    *("format-patch", "--stdout", "-1", "--full-index", "--zero-commit", "--no-signature", "--no-stat"),
    *("--no-renames", "--no-ext-diff", "--no-attach", "--subject-prefix=PATCH", "--src-prefix=a/", "--dst-prefix=b/"),
    *("-U3", "--diff-algorithm=myers"),
)


def git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *arguments], check=True, capture_output=True).stdout


def blob_ids(repository: Path, commit: str, paths: list[str]) -> dict[str, str]:
    listing = git(repository, "ls-tree", "-r", commit, "--", *paths).decode()
    return {line.split("\t")[1]: line.split()[2] for line in listing.splitlines()}


def write_series(repository: Path, base: str, tip: str) -> dict[str, str]:
    """Replace the patch files by those of ``base..tip`` and return their digests in order."""
    for stale in HERE.glob("*.patch"):
        stale.unlink()
    digests = {}
    for commit in git(repository, "rev-list", "--reverse", f"{base}..{tip}").decode().split():
        patch = git(repository, *FORMAT_PATCH, commit)
        seam = re.search(rb"^Seam: (\S+)$", patch, re.MULTILINE)
        if seam is None:
            raise SystemExit(f"{commit}: the message has no line 'Seam: NAME'")
        name = seam[1].decode() + ".patch"
        (HERE / name).write_bytes(patch.rstrip(b"\n") + b"\n")
        digests[name] = hashlib.sha256((HERE / name).read_bytes()).hexdigest()
    return digests


def embed_pin(pin: bytes) -> None:
    digest = hashlib.sha256(pin).hexdigest()
    for module in (ROOT / "verify_patch.py", ROOT / "epochless_vllm" / "patch" / "pin.py"):
        text, count = re.subn(r'(?m)^PIN_SHA256 = "[0-9a-f]{64}"$', f'PIN_SHA256 = "{digest}"', module.read_text())
        if count != 1:
            raise SystemExit(f"{module}: no line PIN_SHA256 to replace")
        module.write_text(text)


def copy_into_package() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    for source in (*HERE.glob("*.patch"), HERE / "pin.json", ROOT / "verify_patch.py"):
        shutil.copyfile(source, DATA / source.name)


def main(repository: Path, base: str, tip: str) -> None:
    digests = write_series(repository, base, tip)
    paths = git(repository, "diff", "--name-only", "--no-renames", base, tip).decode().split()
    before, after = blob_ids(repository, base, paths), blob_ids(repository, tip, paths)
    pin = {
        "format": verify_patch.FORMAT,
        "upstream": verify_patch.UPSTREAM,
        "allow": sorted(paths),
        "series": [{"file": name, "sha256": digest} for name, digest in digests.items()],
        "files": [{"path": path, "before": before[path], "after": after[path]} for path in sorted(paths)],
    }
    (HERE / "pin.json").write_text(json.dumps(pin, indent=2) + "\n")
    embed_pin((HERE / "pin.json").read_bytes())
    copy_into_package()
    print(f"{len(digests)} patches of {len(paths)} files; now run verify_patch.py and the tests")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
