"""Entry of the ``epochless`` command: the table of verbs, and what a run ends with.

Exit status: 0 good, 1 refused or not as it should be, 2 wrong usage. A verb is a module with ``configure(parser)`` and
``run(arguments, output) -> int``; only the one that is used gets imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from epochless_vllm import __version__
from epochless_vllm.cli.output import Output
from epochless_vllm.durable import storage_error
from epochless_vllm.errors import ConfigurationError, EpochlessError, InvalidRequestError

VERBS = {
    "publish": ("publish", "publish an adapter directory to a server"),
    "revisions": ("revisions", "list the policies and revisions of a server"),
    "retire": ("retire", "retire a policy or one of its revisions"),
    "receipt": ("receipt", "fetch a kept receipt, the receipts of a request, or the key"),
    "inspect": ("inspect", "show what an adapter directory holds, and its revision"),
    "verify": ("verify", "verify a receipt, offline"),
    "audit": ("audit", "compute again what receipts claim, from the weights"),
    "generate": ("generate", "greedy text from files alone, by the reference engine"),
    "fsck": ("fsck", "check every byte of a store and its journal"),
    "store": ("store", "check a store, or collect what it no longer needs"),
    "patch": ("patch", "apply, verify or revert the patch of the installed vLLM"),
    "demo": ("demo", "show the claims on a real server and a tiny model"),
    "doctor": ("doctor", "check this machine's setup and say what to fix"),
}

USAGE_ERRORS = (InvalidRequestError, ConfigurationError)


class VerbParser(argparse.ArgumentParser):
    """Leaves it to ``Output`` to say what is wrong with the words, so that machines read it, too."""

    def error(self, message: str) -> NoReturn:
        """Print the usage on standard error.

        Raises:
            InvalidRequestError: always.
        """
        self.print_usage(sys.stderr)
        raise InvalidRequestError(f"{self.prog}: {message}", field="arguments")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--version"], ["-V"]):
        sys.stdout.write(f"epochless {__version__}\n")
        return 0
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if words else 2
    if words[0] not in VERBS:
        sys.stderr.write(f"epochless: no verb {words[0]!r}\n\n{usage()}")
        return 2
    return run_verb(words[0], words[1:])


def usage() -> str:
    """Return the list of verbs."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {summary}" for verb, (_, summary) in VERBS.items()]
    return "usage: epochless VERB ...\n\n" + "\n".join(lines) + "\n\n`epochless VERB --help` explains a verb.\n"


def run_verb(verb: str, words: Sequence[str]) -> int:
    """Parse the words of a verb and run it."""
    module_name, summary = VERBS[verb]
    module = importlib.import_module(f"epochless_vllm.cli.{module_name}")
    parser = VerbParser(prog=f"epochless {verb}", description=module.__doc__ or summary)
    parser.add_argument("--json", action="store_true", help="print one JSON value for machines")
    module.configure(parser)
    # Taken out first, so that it may stand anywhere, also behind the action of a verb that has actions.
    output = Output(json="--json" in words)
    try:
        arguments = parser.parse_args([word for word in words if word != "--json"])
        status: int = module.run(arguments, output)
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # argparse has printed the help
        return int(stop.code or 0)
    except EpochlessError as error:
        output.error(error)
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return _abandon_output()
    except OSError as error:  # a file that may not be looked at, or standard output on a full disk
        if error.filename is not None:
            output.error(storage_error(error, str(error.filename), "use it"))
            return 1
        sys.stderr.write(f"error: standard output: {error.strerror}\n")
        return _abandon_output()
    except KeyboardInterrupt:
        return 130


def _abandon_output() -> int:
    """Let the interpreter end without flushing what nobody takes; return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main())
