"""The plugin's logger, formatted as the engine's own so that one server log reads as one."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.epochless")
