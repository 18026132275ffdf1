"""The reference engine, judged by transformers' logits in twenty configurations; see tests/reference/cases.py.

Where ``only`` is given, exactly those configurations tell: grouped heads, untied heads, one scaling of RoPE, one dtype.
"""


from __future__ import annotations

from tests.mutation.mutants import Mutant, Room

MIXTURE = "mixture"
_ADAPTED = "tiny r8, gqa-4x alpha, mqa rslora, full-context patterns, untied-cls head, mixture"
_GROUPED = (
    "gqa-2x none, gqa-4x none, gqa-4x alpha, qwen2 none, qwen3 none, llama-biases none, bf16 none, fp16-shards none, "
    "rope-linear none, rope-llama3 none, rope-yarn none"
)


def _mutant(name: str, module: str, old: str, new: str, *, only: str = "", equivalent: str = "") -> Mutant:
    labels = frozenset(filter(None, only.split(", ")))
    return Mutant(f"reference/{module}", name, old, new, labels, equivalent)


MUTANTS = (
    _mutant(
        "gqa-modulo, by position", "forward", "head // (config.heads // config.kv_heads)", "head % config.kv_heads",
        only=_GROUPED + ", mixture",
    ),
    _mutant(
        "gqa-modulo, batched", "forward", "x[:count].reshape(count, config.kv_heads, -1, size)",
        "x[:count].reshape(count, -1, config.kv_heads, size).swapaxes(1, 2)", only=_GROUPED + ", mixture",
    ),
    _mutant(
        "ignore-untied", "model", 'Linear("lm_head", embedding, None) if config.tied else',
        'Linear("lm_head", embedding, None) if True else',
        only="untied-cls none, untied-cls head, qwen3 none, fp16-shards none",
    ),
    _mutant(
        "keys rotated one position early", "forward", "self._place_heads(k, layer.k_norm, config.kv_heads)",
        "self._length, there = max(self._length - 1, 0), self._length\n"
        "        self._place_heads(k, layer.k_norm, config.kv_heads)\n        self._length = there",
    ),
    _mutant("rotation the other way", "arithmetic", "    first_THF -= second_THF", "    first_THF += second_THF"),
    _mutant(
        "neighbouring pairs rotated", "arithmetic", "left, right = x_THD[:, :, :half], x_THD[:, :, half:]",
        "left, right = x_THD[:, :, ::2], x_THD[:, :, 1::2]",
    ),
    _mutant("values rotated too", "forward", "        begin, end, size = self._length",
           "        self._place_heads(v, None, config.kv_heads)\n        begin, end, size = self._length"),
    _mutant("theta of another model", "rope", "np.float32(self.theta), exponents", "np.float32(9000), exponents"),
    _mutant("frequencies by half the exponent", "rope", "/ np.float32(head_dim)", "/ np.float32(2 * head_dim)"),
    _mutant("linear factor ignored", "rope", 'counted /= np.float32(self.parameters["factor"])', "pass",
           only="rope-linear none"),
    _mutant("llama3 blend reversed", "rope", "((1 - blend) * stretched + blend * plain)",
           "(blend * stretched + (1 - blend) * plain)", only="rope-llama3 none"),
    _mutant("llama3 trained length ignored", "rope", "turns = trained * plain", "turns = plain",
           only="rope-llama3 none"),
    _mutant("yarn magnitude ignored", "rope", 'if self.kind == "yarn" and factor > 1', "if False",
           only="rope-yarn none"),
    _mutant("yarn ramp reversed", "rope", "interpolated * ramp + plain * (1 - ramp)",
           "interpolated * (1 - ramp) + plain * ramp", only="rope-yarn none"),
    _mutant("final norm's gain ignored", "forward", "self.model.norm, epsilon",
           "np.ones_like(self.model.norm), epsilon"),
    _mutant("second norm uses the first's gain", "forward", "hidden, layer.post_norm", "hidden, layer.input_norm"),
    _mutant("head norms left out", "forward", "if norm is not None:", "if False:", only="qwen3 none"),
    _mutant("head norm of the queries on the keys", "forward", "layer.k_norm", "layer.q_norm", only="qwen3 none"),
    _mutant("norm without its epsilon", "arithmetic", "scale_T += np.float32(epsilon)", "pass"),
    _mutant("norm by the sum, not the mean", "arithmetic", "scale_T /= np.float32(x_TI.shape[1])", "pass"),
    _mutant("biases left out", "forward", "if linear.bias is not None:", "if False:",
           only="qwen2 none, llama-biases none, rope-yarn none"),
    _mutant("scale by alpha alone", "lora", "config.scaling_for(name)", "float(config.modules[name].alpha)"),
    _mutant("adapter unscaled", "forward", "low *= np.float32(factors.scaling)", "pass",
           only="gqa-4x alpha, mqa rslora, full-context patterns, untied-cls head, mixture"),
    _mutant("rsLoRA and patterns ignored", "lora", "config.scaling_for(name)", "float(config.lora_alpha) / config.r",
           only="mqa rslora, full-context patterns, mixture"),
    _mutant("adapter of the head ignored", "forward", "self._linear(self.model.head, normed, inside, logits)",
           "self._linear(self.model.head, normed, [], logits)", only="untied-cls head, mixture"),
    _mutant("adapter replaces the base", "forward", "out_TO[begin:end] += delta", "out_TO[begin:end] = delta",
           only=_ADAPTED),
    _mutant("first run of rows only", "forward", "for begin, end, adapter in spans:",
           "for begin, end, adapter in spans[:1]:", only=MIXTURE),
    _mutant("runs not cut to the rows of logits", "forward", "(max(a, begin) - begin, min(z, end) - begin, each)",
           "(a, z, each)", only=MIXTURE),
    _mutant("sampled adapter in the cache", "sequences", "engine.extend([token], cached)  #",
           "engine.extend([token], sampled)  #", only=MIXTURE),
    _mutant("scores scaled by hidden size", "forward", "model.config.head_dim**-0.5", "model.config.hidden**-0.5"),
    _mutant("one later position seen", "buffers", "-np.inf, np.float32), 1)", "-np.inf, np.float32), 2)"),
    _mutant("no mask", "forward", "scores[:, known:] += b.mask[:count, :count]", "pass"),
    _mutant("own position not seen", "forward", "seen = self._length + count\n        scores = b.scores[:seen]",
           "seen = max(1, self._length)\n        scores = b.scores[:seen]"),
    _mutant("values in reverse order", "forward", "b.values[index, shared, :seen].T, b.context",
           "b.values[index, shared, :seen][::-1].T, b.context"),
    _mutant("no residual round attention", "forward", "spans, normed)\n        hidden += normed\n\n    def _place",
           "spans, normed)\n        hidden[...] = normed\n\n    def _place"),
    _mutant("no residual round the mlp", "forward", "spans, normed)\n        hidden += normed\n\n    def _logits",
           "spans, normed)\n        hidden[...] = normed\n\n    def _logits"),
    _mutant("gate and up exchanged", "forward", "gate(gates, ups,", "gate(ups, gates,"),
    _mutant("relu for silu", "arithmetic", "    gate_TI /= scratch_TI", "    np.maximum(gate_TI, 0, out=gate_TI)"),
    _mutant("softmax not normalized", "arithmetic", "    scores_TN /= scale_T[:, None]", "    pass"),
    _mutant("last partial block of outputs skipped", "arithmetic", "range(0, outputs, BLOCK)",
           "range(0, outputs - outputs % BLOCK, BLOCK)"),
    _mutant("fp16 read twice as large", "weights", '"<f4" if dtype == "F32" else "<f2", piece.size)',
           '"<f4" if dtype == "F32" else "<f2", piece.size) * (2 - (dtype == "F32"))', only="fp16-shards none"),
    _mutant("bf16 in the low half", "weights", "<<= np.uint32(16)", "<<= np.uint32(15)", only="bf16 none"),
    _mutant("layers in reverse", "model", "tuple(map(layer, range(config.layers)))",
           "tuple(map(layer, reversed(range(config.layers))))"),
    _mutant("every position one later", "rope", "np.arange(positions, dtype", "np.arange(1, positions + 1, dtype",
           equivalent="scores depend on differences of positions only"),
    _mutant("softmax without its maximum", "arithmetic", "    scores_TN -= scale_T[:, None]", "    pass",
           equivalent="a shift of all scores cancels in the quotient; only scores beyond 88 would overflow"),
)  # fmt: skip

ROOMS = (
    Room(
        "reference engine",
        ("tests/reference/against_oracle.py",),
        MUTANTS,
        preload=("numpy",),
        prepare="tests.reference.against_oracle",
        by_parameter=True,
    ),
)
