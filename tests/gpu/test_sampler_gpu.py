"""The sampler's Triton kernels on a device. Not yet run on any GPU; ``check_sampler.py`` adds timings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epochless_vllm.sampling import warm_up
from tests.gpu.check_sampler import BIT_CHECKS, device_differences
from tests.sampling.cases import batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_start_up_self_test_passes() -> None:
    warm_up("cuda")


@pytest.mark.parametrize("check", BIT_CHECKS)
def test_the_device_equals_the_numpy_reference(check: dict[str, Any]) -> None:
    assert device_differences(batches(**check)) == []
