"""The page of threats names tests and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "epochless_vllm" / "plugin" / "THREATS.md"


def test_every_test_the_page_names_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", PAGE.read_text()))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_link_of_the_page_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).is_file(), target
