"""The data mutants, room by room. Each takes them from where the tests of its subject have them."""

from __future__ import annotations

from tests.mutation.data_rooms import ledgers, patches, receipts

DATA_ROOMS = (*receipts.ROOMS, *ledgers.ROOMS, *patches.ROOMS)
