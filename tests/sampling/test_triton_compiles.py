"""The Triton kernels compile for CUDA devices, which needs none. What they compute there is not yet run."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

TYPES = {
    "logits": "*fp32", "stride": "i64", "vocabulary": "i32", "blocks": "i32", "purpose": "i32", "peaks": "*i32"
}  # fmt: skip
CONSTANTS = {
    "BLOCK": 2048, "BLOCKS_P2": 128, "BUCKETS": 2048, "ABOVE": 10, "BELOW": 0, "BITS": 10, "LAST": True,
    "BY_MASS": True, "FILTERED": True,
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["peaks_kernel", "masses_kernel", "histogram_kernel", "narrow_kernel"])
def test_a_kernel_compiles_without_wide_floats(kernel: str) -> None:
    assert_compiles(kernel, 90)


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_draw_compiles_without_wide_floats(architecture: int) -> None:
    assert_compiles("draw_kernel", architecture)


def assert_compiles(kernel: str, architecture: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from epochless_vllm.sampling import triton_kernels

    function = getattr(triton_kernels, kernel)
    signature = {name: "constexpr" if name in CONSTANTS else TYPES.get(name, "*i64") for name in function.arg_names}
    constants = {(place,): CONSTANTS[name] for place, name in enumerate(function.arg_names) if name in CONSTANTS}
    source = ASTSource(function, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    assert len(compiled.asm["cubin"]) > 1000
    # Anything in double precision would be arithmetic that the recipe does not have.
    assert ".f64" not in compiled.asm["ptx"]
