"""The mutants, room by room."""

from __future__ import annotations

from tests.mutation.rooms import patch, plugin, publication, receipts, reference, replay, sampling, spec, store

ROOMS = (
    *store.ROOMS,
    *publication.ROOMS,
    *receipts.ROOMS,
    *sampling.ROOMS,
    *reference.ROOMS,
    *replay.ROOMS,
    *plugin.ROOMS,
    *patch.ROOMS,
    *spec.ROOMS,
)
