"""The tiny model of tests and demo alike."""

from epochless_vllm.cli.tiny_model import make_adapter, make_model, write_safetensors

__all__ = ["make_adapter", "make_model", "write_safetensors"]
