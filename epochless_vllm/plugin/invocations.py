"""Seam: the model of a SageMaker invocation.

``POST /invocations`` takes the adapter from a header; the library behind it writes the header's value over the body's
``model`` also when there is no header, so that a request naming a policy would be answered by the base model. Here a
missing header leaves the body alone. Dies when the library does the same.
"""

from __future__ import annotations

from typing import Any

from epochless_vllm.errors import SeamError


def install() -> None:
    """Wrap the transformation that moves the header into the body.

    Raises:
        SeamError: the target is missing.
    """
    from model_hosting_container_standards.sagemaker.lora.constants import SageMakerLoRAApiHeader
    from model_hosting_container_standards.sagemaker.lora.models import BaseLoRATransformRequestOutput
    from model_hosting_container_standards.sagemaker.lora.transforms.inject_to_body import InjectToBodyApiTransform

    original = getattr(InjectToBodyApiTransform, "transform_request", None)
    if original is None:
        raise SeamError("InjectToBodyApiTransform has no transform_request", target="transform_request")
    if getattr(original, "_epochless", False):
        return
    header = SageMakerLoRAApiHeader.ADAPTER_IDENTIFIER

    async def transform_request(self: Any, raw_request: Any) -> Any:
        if header not in raw_request.headers:
            return BaseLoRATransformRequestOutput(request=None, raw_request=raw_request)
        return await original(self, raw_request)

    transform_request._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    InjectToBodyApiTransform.transform_request = transform_request
