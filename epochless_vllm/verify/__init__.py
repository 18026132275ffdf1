"""Verification of receipts and journals; standard library only, except replay."""
