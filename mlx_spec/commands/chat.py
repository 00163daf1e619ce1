"""`mlx_spec chat`: lines in, replies out as they are made, commands that begin with /.

Replies go to stdout, all else to stderr; where stdin is no terminal no prompt is shown, so that lines
can be piped in.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ..errors import SpecError
from ..types import Result
from .arguments import add_models, add_options, load_pair, read_options
from .generate import ctrl_c, show

HELP = "talk with a pair in the terminal"
USAGE = "[--pair NAME | --target MODEL [--draft-model MODEL]] [options]"
ABOUT = """Talk with a pair. Replies go to stdout as they are made, a line of statistics to stderr after each.
Ctrl-C ends a reply and keeps what there is, Ctrl-D leaves, /help lists the commands."""
COMMANDS = """/retry        another reply to the last turn
/edit TEXT    say the last turn differently
/clear        begin anew
/save FILE    write the conversation; /load FILE reads it
/quit         leave, as Ctrl-D does; Ctrl-C ends a reply and keeps what there is
A line that ends with \\ goes on in the next one; one that begins with a space is never a command."""


def fill(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="a system message before the first turn")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    options, pair = read_options(args), load_pair(args)
    from ..chat import Chat

    return Talk(Chat(pair, args.system_prompt, **options)).run()


class Talk:
    """A `Chat` and what a line that is typed does to it."""

    def __init__(self, chat: Any):
        self.chat, self._told = chat, set()  # notes are told once
        self._commands: dict[str, Callable[[str], None]] = {
            "/retry": lambda _: self._reply(chat.retry),
            "/edit": lambda text: self._reply(partial(chat.edit, -1, text)),
            "/clear": lambda _: chat.clear(),
            "/save": lambda name: chat.save(_path(name)),
            "/load": lambda name: chat.load(_path(name)),
            "/help": lambda _: tell(COMMANDS),
        }

    def run(self) -> int:
        """Until /quit or the end of stdin; the exit code."""
        if sys.stdin is None:
            raise ValueError("chat reads stdin, and stdin is closed")
        sys.stdin.reconfigure(errors="replace")  # what a pipe carries need not be UTF-8
        with suppress(ImportError):
            import readline  # noqa: F401  input() then has the arrow keys
        if sys.stdin.isatty():
            tell("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                line = _read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                tell("\nCtrl-D or /quit leaves")
                continue
            if line.strip().partition(" ")[0] == "/quit":
                return 0
            if line.strip():
                self._do(line)

    def _do(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        try:
            if not line.startswith("/"):
                self._reply(partial(self.chat.stream, line.strip()))
            elif word in self._commands:
                self._commands[word](rest.strip())
            else:
                raise ValueError(f"no such command: {word}; /help lists them")
        except (ValueError, SpecError) as e:
            tell("mlx_spec: error:", " ".join(str(e).split()))

    def _reply(self, start: Callable[..., Any]) -> None:
        with ctrl_c() as pressed:
            turn = start(should_cancel=pressed)
            for chunk in turn:
                show(chunk.text)
            result = turn.result()
        show("" if result.text.endswith("\n") else "\n")
        for note in (note for note in result.notes if note not in self._told):
            self._told.add(note)
            tell("note:", note)
        tell(summary(result))


def summary(result: Result) -> str:
    """A reply's figures in one line; what is not known is left out."""
    s = result.stats
    figures = [(s.generation_tps, "{:.1f} tokens/s"), (s.ttft_s, "the first after {:.2f} s"),
               (s.acceptance_rate, "{:.0%} accepted"), (s.tokens_per_round if s.drafted else None, "{:.2f} a round")]
    known = [form.format(value) for value, form in figures if value is not None]
    return f"[{', '.join([f'{s.generation_tokens} tokens', *known])}, end: {result.finish_reason}]"


def _read() -> str:
    prompts = ("> ", "| ") if sys.stdin.isatty() else ("", "")
    line = input(prompts[0])
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input(prompts[1])}"
    return line


def _path(name: str) -> Path:
    if not name:
        raise ValueError("give a file's name too")
    return Path(name).expanduser()


def tell(*words: Any) -> None:
    print(*words, file=sys.stderr, flush=True)
