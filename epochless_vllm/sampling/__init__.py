"""The exact counter-based sampler."""
