"""Applies, verifies and reverts the pinned patch of vLLM.

The checks are those of the standalone ``verify_patch.py``, written a second time: tests hold the two to the same
verdict at the same step on the same input. Knows the files of a vLLM tree and runs none of its code.
"""
