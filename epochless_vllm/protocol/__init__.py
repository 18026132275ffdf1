"""What producer and verifier must agree on: canonical bytes, digests, identities, publication rules, receipts.

No I/O, no clock, no randomness.
"""
