#!/usr/bin/env bash
# Builds the environment in VENV (default .venv): pinned packages, the CPU engine, this package, the verified patch.
# Idempotent: each stage is skipped when its inputs have not changed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
LOCK=docker/requirements.lock

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v "$PYTHON" >/dev/null || die "no $PYTHON on PATH; install Python 3.10-3.13 or run: make setup PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
  || die "$("$PYTHON" --version) is not supported; run: make setup PYTHON=python3.11 (any of 3.10-3.13)"
command -v git >/dev/null || die "git is missing; install it with your package manager"
command -v cc >/dev/null || command -v gcc >/dev/null || die "no C compiler; install gcc or clang"
[ "$(uname -s)" = Linux ] || die "the CPU engine has Linux wheels only; use a Linux host or container"

if [ ! -x "$VENV/bin/python" ]; then
  say "environment in $VENV"
  "$PYTHON" -m venv "$VENV" || die "cannot make a virtual environment; install the venv module (python3-venv)"
fi
py=$VENV/bin/python
stamp=$VENV/.epochless-lock
sum=$(sha256sum "$LOCK" | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
  say "$(grep -c '==' "$LOCK") pinned packages (about 6 GB; minutes on a cold cache)"
  "$py" -m pip install -qq --disable-pip-version-check --no-deps -r "$LOCK" \
    || die "the packages could not be installed; check the network and free disk space (8 GB), then run make setup again"
  printf '%s' "$sum" > "$stamp"
fi
if ! "$py" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
  say "metadata of the vllm distribution"
  "$py" -m pip install -qq --disable-pip-version-check --no-deps "$("$py" docker/vllm_metadata.py build/metadata)"
fi
if ! "$py" -c 'import importlib.metadata as m, sys; sys.exit(not m.files("epochless-vllm"))' 2>/dev/null; then
  say "this package, editable"
  "$py" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e . \
    || die "the package could not be installed"
fi
say "the patch"
"$py" -m epochless_vllm.cli.main patch apply || die "the patch was not applied; see the reason above"
site=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$py" verify_patch.py --site-packages "$site" || die "the patched engine does not verify; run: rm -rf $VENV && make setup"
say "ready: $VENV/bin/vllm serve MODEL --enable-lora --enable-epochless --epochless-store DIR"
