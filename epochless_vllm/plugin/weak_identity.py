"""A map keyed by object identity that forgets an entry with its object.

Request bodies are pydantic models: unhashable, and equal when their fields are. Knows nothing of what it maps.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class WeakIdentityMap(Generic[Value]):
    """Values by the identity of living objects. One thread only."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def set(self, key: Any, value: Value) -> None:
        """Map an object to a value until the object dies."""
        identity = id(key)

        def forget(reference: weakref.ref[Any]) -> None:
            # A later object may have the identity by now, with an entry of its own.
            entry = self._entries.get(identity)
            if entry is not None and entry[0] is reference:
                del self._entries[identity]

        self._entries[identity] = (weakref.ref(key, forget), value)

    def get(self, key: Any) -> Value | None:
        """Return the value of an object, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __len__(self) -> int:
        return len(self._entries)
