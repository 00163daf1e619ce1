"""The command line: which commands there are, and how each ends.

A command is a module with HELP, USAGE, ABOUT, `fill` (its flags) and `run` (to an exit code). It
imports what is heavy inside `run`, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import Any, Sequence

from . import __version__
from .commands import CTRL_C, FAILED, PIPE_CLOSED
from .errors import SpecError

COMMANDS = {
    "generate": "commands.generate",
    "chat": "commands.chat",
    "pairs": "commands.pairs",
    "pull": "commands.pull",
    "train": "commands.train",
    "advise": "commands.advise",
    "bench": "commands.bench",
    "doctor": "commands.doctor",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Raises SystemExit(2) for a wrong command line."""
    args = _parser().parse_args(argv)
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("mlx_spec: interrupted", file=sys.stderr)
        return CTRL_C
    except (ValueError, SpecError, OSError) as e:
        if isinstance(e, OSError):
            # Python flushes stdout once more at its end, and would complain then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(e, BrokenPipeError):
            return PIPE_CLOSED
        print("mlx_spec: error:", " ".join(str(e).split()), file=sys.stderr)
        return FAILED


class _Help(argparse.HelpFormatter):
    """Defaults are told, and `-p, --prompt TEXT` has one layout for every version of Python."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=32, **kwargs)

    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.default in (None, [], argparse.SUPPRESS) or action.default is False
        return action.help if told else f"{action.help} (default: %(default)s)"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar or '{' + ','.join(map(str, action.choices)) + '}'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_spec", usage="mlx_spec [-h] [--version] COMMAND ...", formatter_class=_Help, allow_abbrev=False,
        description="Speculative decoding on MLX: a small draft proposes tokens, the target checks them in one pass, "
                    "and the text is the target's own.",
        epilog="Environment: MLX_SPEC_CACHE, MLX_SPEC_DTYPE, MLX_SPEC_BLAS, HF_HUB_OFFLINE; see README.md. "
               "Exit codes: 0 done, 1 an error (one line on stderr), 2 a wrong command line, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"mlx_spec {__version__}", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="mlx_spec")
    for name, home in COMMANDS.items():
        module = import_module(f".{home}", __package__)
        command = commands.add_parser(name, usage=f"mlx_spec {name} [-h] {module.USAGE}", description=module.ABOUT,
                                      help=module.HELP, formatter_class=_Help, allow_abbrev=False)
        command.set_defaults(run=module.run)
        module.fill(command)
    return parser
