"""The exact counter-based sampler.

``sample_rows`` draws one token from each row of logits and returns it with its exact behaviour probability; the
caller brings, for each row, the ``parameter_row`` of its ``SamplerConfig`` and its ``DrawKey``, both made once at
admission, and the position of the token. ``kept_tokens`` says which tokens a row's filters leave. ``warm_up`` compiles
and checks all of it at start-up.
"""

from epochless_vllm.sampling.rows import ALL_MASKED, NON_FINITE, OK, parameter_row
from epochless_vllm.sampling.sample import Sampled, sample_rows
from epochless_vllm.sampling.self_test import warm_up
from epochless_vllm.sampling.torch_path import kept_tokens

__all__ = ["ALL_MASKED", "NON_FINITE", "OK", "Sampled", "kept_tokens", "parameter_row", "sample_rows", "warm_up"]
