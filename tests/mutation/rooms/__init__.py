"""The mutants, room by room."""

from __future__ import annotations

from tests.mutation.rooms import reference, replay, sampling, store

ROOMS = (*store.ROOMS, *sampling.ROOMS, *reference.ROOMS, *replay.ROOMS)
