"""Applies, verifies and reverts the pinned vLLM patch."""
