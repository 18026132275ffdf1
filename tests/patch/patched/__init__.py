"""Checks of the patched modules of vLLM; run by test_behaviour in a process whose vllm is a patched copy."""
