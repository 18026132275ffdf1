"""The entry point vLLM loads in every process of a deployment.

``register`` adds the flags and declares the plugin to the patched engine; it changes nothing for an engine that runs
without Epochless. Everything else is installed by ``activate``, which the patched engine calls with its configuration
in the front end, in each engine core and in each worker, before anything is built there.
"""

from __future__ import annotations

import argparse
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.options import add_flags, fold_flags, options_of

_MARK = "_epochless_wrapped"


def register() -> None:
    """Install the flags and the activation hook; a second call does nothing.

    An exception here stops every use of vLLM in the environment, so nothing is checked until a configuration asks for
    Epochless.
    """
    from vllm.config import VllmConfig

    _wrap_flags()
    if getattr(VllmConfig.activate_epochless if hasattr(VllmConfig, "activate_epochless") else None, _MARK, False):
        return
    setattr(activate, _MARK, True)
    # On an unpatched engine this attribute is never read; wrap_engine_args refuses there when Epochless is enabled.
    VllmConfig.activate_epochless = activate
    from epochless_vllm.plugin.deployment import wrap_engine_args

    wrap_engine_args()


def activate(config: Any) -> None:
    """Refuse or prepare this process for a configuration with Epochless; return at once for one without.

    Called with a VllmConfig by the patched engine. Idempotent: in process, the front end, the engine core and the
    worker are one.

    Raises:
        ConfigurationError: the configuration asks for something Epochless does not cover; the message says what.
        SeamError: the engine lacks the target of a seam.
    """
    options = options_of(config.additional_config)
    if options is None:
        return
    from epochless_vllm.plugin.refusals import refuse_unsupported
    from epochless_vllm.plugin.seams import install_seams

    refuse_unsupported(config)
    install_seams(options)


def _wrap_flags() -> None:
    """Put our flags on ``vllm serve``.

    vLLM has no hook for a plugin's flags: it parses into a namespace and copies known fields only. The two wrapped
    functions bracket the parse. Dies when upstream lets a plugin declare flags.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.add_cli_args
    if not getattr(original, _MARK, False):

        def add_cli_args(parser: Any) -> Any:
            parser = original(parser)
            add_flags(parser)
            return parser

        setattr(add_cli_args, _MARK, True)
        EngineArgs.add_cli_args = staticmethod(add_cli_args)
    _wrap_serve_validation()


def _wrap_serve_validation() -> None:
    import sys

    module = sys.modules.get("vllm.entrypoints.cli.serve")
    if module is None:  # not the command line: options come through additional_config
        return
    if not hasattr(module, "ServeSubcommand"):
        raise SeamError("vllm.entrypoints.cli.serve has no ServeSubcommand", target="ServeSubcommand")
    original = module.ServeSubcommand.validate
    if getattr(original, _MARK, False):
        return

    def validate(self: Any, args: argparse.Namespace) -> None:
        from epochless_vllm.plugin.refusals import refuse_front_ends

        fold_flags(args)
        refuse_front_ends(args)
        original(self, args)

    setattr(validate, _MARK, True)
    module.ServeSubcommand.validate = validate
