"""Greedy text from the NumPy reference engine, without a server: what a model and a revision say when nothing but their
files is trusted. Slow; for comparing with an answer, not for serving."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from epochless_vllm.cli.fsck import open_root
from epochless_vllm.cli.output import Output
from epochless_vllm.cli.prompts import read_prompts
from epochless_vllm.errors import InvalidRequestError, TokenizerError

if TYPE_CHECKING:
    from epochless_vllm.reference.lora import Adapter
    from epochless_vllm.reference.model import Model
    from epochless_vllm.reference.rounding import Rounding

DTYPES = ("float32", "bfloat16", "float16")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--model", required=True, metavar="DIR", help="the base model's directory")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt's text")
    parser.add_argument("--prompt-tokens", metavar="FILE", help="JSON: the prompt's token ids")
    parser.add_argument("--adapter", metavar="DIR", help="a PEFT adapter's directory")
    parser.add_argument("--revision", metavar="DIGEST", help="a revision of --store, instead of --adapter")
    parser.add_argument("--store", metavar="DIR", help="the store that holds the revision")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to generate (default 64)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="what weights are rounded to when read")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the text.

    Raises:
        InvalidRequestError: options that contradict each other.
        EpochlessError: the model, the adapter or the prompt cannot be computed.
    """
    from epochless_vllm.reference.buffers import Limits
    from epochless_vllm.reference.forward import Engine
    from epochless_vllm.reference.model import load_model
    from epochless_vllm.reference.sequences import generate_greedy

    if arguments.tokens < 1:
        raise InvalidRequestError(f"tokens: {arguments.tokens} is not a positive count", field="tokens")
    if arguments.adapter and arguments.revision:
        raise InvalidRequestError("adapter: give it or --revision, not both", field="adapter")
    if bool(arguments.revision) != bool(arguments.store):
        raise InvalidRequestError("revision: --revision and --store go together", field="revision")
    prompt = read_prompts(
        model=arguments.model,
        tokens_file=arguments.prompt_tokens,
        texts=None if arguments.prompt is None else [arguments.prompt],
        responses=[],
    )[0]
    model = load_model(arguments.model, arguments.dtype)
    adapter = _adapter(arguments, model, arguments.dtype)
    limits = Limits(len(prompt) + arguments.tokens, rank=adapter.max_rank if adapter else 0)
    stop = () if arguments.ignore_eos else model.config.eos_ids
    tokens = generate_greedy(Engine(model, limits), prompt, arguments.tokens, adapter=adapter, stop=stop)
    text = _text(arguments.model, tokens)
    output.value({"prompt_token_ids": prompt, "token_ids": tokens, "text": text})
    output.line(json.dumps(tokens) if text is None else text)
    return 0


def _adapter(arguments: argparse.Namespace, model: Model, rounding: Rounding) -> Adapter | None:
    from epochless_vllm.protocol.manifest import RevisionId
    from epochless_vllm.reference.lora import adapter_from_directory, adapter_from_revision
    from epochless_vllm.store.revisions import RevisionStore

    if arguments.adapter:
        return adapter_from_directory(arguments.adapter, model.config, rounding)
    if not arguments.revision:
        return None
    stored = RevisionStore(open_root(arguments.store)).read(RevisionId(arguments.revision))
    return adapter_from_revision(stored, model.config, rounding)


def _text(model: str, tokens: list[int]) -> str | None:
    """Return the tokens' text, or None for a model without a tokenizer that is read here."""
    from epochless_vllm.reference.tokenizer import read_tokenizer

    try:
        return read_tokenizer(model).decode(tokens, skip_special_tokens=True)
    except TokenizerError:  # token ids say as much; a prompt given as text has raised before
        return None
