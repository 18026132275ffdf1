"""Compute again what receipts claim: each is verified as `epochless verify` does, then every token's row is recomputed
from the weights it names, by an engine that shares nothing with the server but file formats, and compared. The prompt
is taken from --prompt-tokens, --prompt or an answer that holds prompt_token_ids, whichever has the receipt's digest.
The tokenizer's files are held against the receipt too, where the model's directory or --tokenizer has them."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from epochless_vllm.cli.fsck import open_root
from epochless_vllm.cli.output import Output
from epochless_vllm.cli.prompts import find_prompt, read_prompts
from epochless_vllm.cli.verify import add_expectations, print_verified, read_expectations, read_receipts
from epochless_vllm.errors import ConfigurationError, EpochlessError, InvalidRequestError, ReceiptError

if TYPE_CHECKING:  # both load NumPy or the verifier; a run that only prints its help needs neither
    from epochless_vllm.cli.verify import FoundReceipt
    from epochless_vllm.protocol.digests import Digest
    from epochless_vllm.reference.rows import Tolerance
    from epochless_vllm.reference.tokenizer import Tokenizer
    from epochless_vllm.verify.findings import Replay
    from epochless_vllm.verify.replay import Auditor, Progress
    from epochless_vllm.verify.verified import VerifiedReceipt

T = TypeVar("T")
DRIFT = 0.1  # of a tolerance given without its third number


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("receipt", nargs="+", help="files of receipts in any format, or of answers that carry them")
    parser.add_argument("--model", required=True, metavar="DIR", help="the base model's directory")
    parser.add_argument("--store", metavar="DIR", help="the store that holds the revisions (--epochless-store)")
    parser.add_argument("--tokenizer", metavar="DIR", help="the server's tokenizer, if not in the model's directory")
    parser.add_argument("--prompt-tokens", metavar="FILE", help="JSON: the prompt's token ids, or a list of such lists")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt's text; repeatable")
    parser.add_argument("--sample", type=int, metavar="N", help="compare N random tokens of each receipt only")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="receipts replayed at a time (default 1)")
    parser.add_argument(
        "--tolerance",
        metavar="A[,R[,D]]",
        help="greatest error of a logit, per unit of the row's largest, and mean over many rows as a share of both; "
        "default by the server's dtype",
    )
    parser.add_argument(
        "--check-text",
        action="store_true",
        help="also decode the tokens with the model's tokenizer and compare the text",
    )
    add_expectations(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Replay every receipt and print each verdict; 1 if any was refused.

    Raises:
        InvalidRequestError: an option is malformed, or no prompt was given.
        EpochlessError: the model or the store cannot be used at all.
    """
    from epochless_vllm.verify import verify_receipt

    for field in ("sample", "jobs"):
        value = getattr(arguments, field)
        if value is not None and value < 1:
            raise InvalidRequestError(f"{field}: {value} is not a positive count", field=field)
    expected = read_expectations(arguments)
    tolerance = _tolerance(arguments.tolerance)
    found = {
        name if each.choice is None else f"{name}, choice {each.choice}": each
        for name in arguments.receipt
        for each in read_receipts(name, expected["response"])
    }
    tokenizer = arguments.tokenizer or arguments.model
    prompts = read_prompts(
        model=tokenizer,
        tokens_file=arguments.prompt_tokens,
        texts=arguments.prompt,
        responses=[each.response for each in found.values() if each.response is not None],
    )

    decoder = open_decoder(tokenizer) if arguments.check_text else None
    own = read_tokenizer_digest(arguments)

    def verify(each: FoundReceipt) -> VerifiedReceipt:
        verified = verify_receipt(each.payload, keep_blocks=True, **{**expected, "response": each.response})
        if own is not None:
            _check_tokenizer(verified, own, tokenizer)
        if decoder is not None:
            _check_text(each.response, verified, decoder)
        return verified

    verified = {name: _attempt(partial(verify, each)) for name, each in found.items()}
    auditors = {
        base: open_auditor(arguments.model, base, arguments.store, tolerance)
        for base in sorted({each.header.base for each in verified.values() if not isinstance(each, EpochlessError)})
    }

    def audit(name: str, advance: Progress) -> tuple[dict[str, Any], bool]:
        receipt = verified[name]
        if isinstance(receipt, EpochlessError):
            return {"receipt": name, "error": receipt.describe()}, False
        result = _attempt(lambda: _audit(auditors[receipt.header.base], receipt, prompts, arguments.sample, advance))
        if isinstance(result, EpochlessError):
            return {"receipt": name, "error": result.describe()}, False
        replays.append(result[1])
        return {"receipt": name, **result[0], "tokenizer_checked": own is not None}, True

    replays: list[Replay] = []
    total = sum(_rows(each, arguments.sample) for each in verified.values())
    with progress_bar(total, quiet=output.json) as advance, ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda name: audit(name, advance), found))
    refused = sum(not good for _, good in results)
    together = _pool(replays) if len(replays) > 1 else None
    output.value({"receipts": [each for each, _ in results], "refused": refused, "together": together})
    for each, good in results:
        _print(each, good, output, several=len(results) > 1)
    if together is not None:
        _print_pooled(together, output)
    return 1 if refused or (together is not None and "error" in together) else 0


def open_auditor(model: str, base: str, store: str | None, tolerance: Tolerance | None) -> Auditor:
    """Return the auditor of a base model.

    Raises:
        StoreError: the store is none.
        EpochlessError: see ``Auditor``.
    """
    from epochless_vllm.store.revisions import RevisionStore
    from epochless_vllm.verify.replay import Auditor

    opened = None if store is None else RevisionStore(open_root(store))
    return Auditor(model, base, opened, tolerance=tolerance)


def read_tokenizer_digest(arguments: argparse.Namespace) -> Digest | None:
    """Return the digest of the tokenizer at hand; None for a model's directory without one.

    Raises:
        InvalidRequestError: --tokenizer names a directory without one.
    """
    from epochless_vllm.store.tokenizer_files import compute_tokenizer_digest, find_tokenizer_files

    directory = arguments.tokenizer or arguments.model
    if find_tokenizer_files(directory):
        return compute_tokenizer_digest(directory)
    if arguments.tokenizer is not None:
        raise InvalidRequestError(
            f"tokenizer: {directory}: holds no tokenizer file; name the directory the server took its tokenizer from",
            field="tokenizer",
        )
    return None


def _check_tokenizer(verified: VerifiedReceipt, own: Digest, directory: str) -> None:
    if verified.header.tokenizer != own:
        raise ReceiptError(
            f"the receipt is of tokenizer {verified.header.tokenizer}, the files in {directory} are {own}; give the "
            "server's by --tokenizer",
            threat="tokenizer_mismatch",
        )


def open_decoder(model: str) -> Tokenizer:
    """Return the tokenizer of a model directory.

    Raises:
        TokenizerError: there is none, or it is not read exactly.
    """
    from epochless_vllm.reference.tokenizer import read_tokenizer

    return read_tokenizer(model)


def _check_text(response: bytes | None, verified: VerifiedReceipt, decoder: Tokenizer) -> None:
    from epochless_vllm.verify.text import check_text

    if response is None:
        raise InvalidRequestError("check-text: there is no answer; give one as the file or by --response", field="text")
    tokens = [token for block in verified.blocks for token in block.tokens]
    reason = "" if verified.final is None else verified.final.finish_reason
    header = verified.header
    check_text(response, header.choice_index, tokens, reason, decoder, prompt_index=header.prompt_index)


@contextmanager
def progress_bar(total: int, *, quiet: bool) -> Iterator[Progress]:
    """Yield a function that counts rows on a bar on standard error; silent where that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=total)
        yield lambda rows: bar.advance(task, rows)


def _audit(
    auditor: Auditor, receipt: VerifiedReceipt, prompts: list[list[int]], sample: int | None, advance: Progress
) -> tuple[dict[str, Any], Replay]:
    from epochless_vllm.verify.findings import describe_replay, require_replayed
    from epochless_vllm.verify.verified import describe

    prompt = find_prompt(prompts, receipt.header)
    # The server must not know beforehand which tokens will be looked at.
    positions = None if sample is None else random.SystemRandom().sample(range(receipt.tokens), _rows(receipt, sample))
    replay = auditor.replay(receipt, prompt, positions=positions, progress=advance)
    return describe(require_replayed(replay)) | {"replay": describe_replay(replay)}, replay


def _pool(replays: list[Replay]) -> dict[str, Any]:
    from epochless_vllm.verify.findings import judge_together

    pooled = _attempt(lambda: judge_together(replays))
    return {"error": pooled.describe()} if isinstance(pooled, EpochlessError) else pooled.describe()


def _attempt(work: Callable[[], T]) -> T | EpochlessError:
    """Return what the work returns, or its refusal; a setup that no receipt can be replayed with is raised."""
    try:
        return work()
    except (InvalidRequestError, ConfigurationError):
        raise
    except EpochlessError as error:  # one receipt's refusal must not hide the others'
        return error


def _rows(receipt: VerifiedReceipt | EpochlessError, sample: int | None) -> int:
    if isinstance(receipt, EpochlessError):
        return 0
    return receipt.tokens if sample is None else min(sample, receipt.tokens)


def _tolerance(text: str | None) -> Tolerance | None:
    if text is None:
        return None
    from epochless_vllm.reference.rows import Tolerance

    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 <= number < 1e3 for number in numbers) or not any(numbers[:2]):
        raise InvalidRequestError(
            f"tolerance: {text!r} is not A, A,R or A,R,D such as 0.05,0.02,0.1", field="tolerance"
        )
    return Tolerance(*numbers, *(0.0, DRIFT)[len(numbers) - 1 :])


def _print(result: dict[str, Any], good: bool, output: Output, *, several: bool) -> None:
    if several:
        output.line(f"file     {result['receipt']}")
    if not good:
        _print_refusal(result["error"], output)
        return
    print_verified(result, output)
    if not result["tokenizer_checked"]:
        output.line("caveat   the tokenizer was not checked: the model's directory has none; give one by --tokenizer")
    _print_replay(result["replay"], result["tokens"], output)


def _print_pooled(together: dict[str, Any], output: Output) -> None:
    if "error" in together:
        output.line(f"REFUSED  together: {together['error']['message']}")
    elif together["rows"]:
        allowed = f"{together['allowed']:.3g} allowed"
        output.line(
            f"together {together['rows']} tokens, mean error {together['drift']:.3g} of the tolerance, {allowed}"
        )
        output.line(f"together {_scores(together)}")


def _scores(found: dict[str, Any]) -> str:
    scores = ", ".join(f"{name} {score:.2f}" for name, score in found["scores"].items())
    return f"{scores} standard deviations, {found['score_limit']:.2f} allowed"


def _print_refusal(error: dict[str, Any], output: Output) -> None:
    output.line(f"REFUSED  {error.get('threat', error['code'])}: {error['message']}")
    if "worst_nats" in error:
        _print_replay(error, None, output)


def _print_replay(found: dict[str, Any], tokens: int | None, output: Output) -> None:
    of = "" if tokens is None else f" of {tokens}"
    output.line(
        f"replayed {found['compared']}{of} tokens, {found['exact']} picked again exactly, "
        f"{found['disagreements']} disagreements, {found['membership_flips']} membership flips"
    )
    worst, ratio, tolerance = found["worst_nats"], found["worst_ratio"], found["tolerance"]
    output.line(
        f"worst    {worst['value']:.3g} nats at token {worst['position']}, {ratio['value']:.3g} of the tolerance "
        f"({tolerance['absolute']:g} + {tolerance['relative']:g} of the largest logit)"
    )
    output.line(f"sums     {_scores(found)}")
    for reason, count in sorted(found["not_replayable"].items()):
        output.line(f"not replayable  {count} tokens: {reason}")
