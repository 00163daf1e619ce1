"""`mlx_spec generate`: the text on stdout as it is made, what was measured on stderr."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import Callable, Iterator

from ..types import Result
from . import CTRL_C
from .arguments import add_models, add_options, load_pair, read_options

HELP = "answer a prompt"
USAGE = "[--pair NAME | --target MODEL [--draft-model MODEL]] --prompt TEXT [options]"
ABOUT = """Answer a prompt. The text goes to stdout as it is made, statistics and notes to stderr at the end.
Ctrl-C ends the reply and keeps what there is; a second one ends the program at once."""


def fill(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", "-p", metavar="TEXT", required=True,
        help="one user message, or plain text where there is no chat template; - reads stdin")
    add("--system-prompt", metavar="TEXT", help="a system message before it")
    add("--ignore-chat-template", action="store_true", help="take the prompt as plain text that the model continues")
    add_options(parser)
    parser.add_argument("--json", action="store_true",
                        help="one JSON record on stdout in place of the text: text, tokens, counts, notes")


def run(args: argparse.Namespace) -> int:
    options, prompt = read_options(args), _prompt(args)  # what is wrong with them is said before anything is loaded
    pair = load_pair(args)
    from ..api import stream_generate

    with ctrl_c() as pressed:
        stream = stream_generate(pair, prompt, **options, should_cancel=pressed)
        for chunk in stream:
            if not args.json:
                show(chunk.text)
        result = stream.result()
    if args.json:
        print(json.dumps(result.to_dict()), flush=True)
    else:
        show("" if result.text.endswith("\n") else "\n")
        print(_report(result), file=sys.stderr)
    return CTRL_C if result.finish_reason == "cancelled" else 0


def _prompt(args: argparse.Namespace) -> str | list[dict[str, str]]:
    if args.ignore_chat_template and args.system_prompt is not None:
        raise ValueError("--system-prompt needs the chat template: leave it out, or --ignore-chat-template")
    text = args.prompt
    if text == "-":
        if sys.stdin is None:
            raise ValueError("--prompt - reads stdin, and stdin is closed")
        # As bytes: what a pipe carries need not be UTF-8.
        text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    if args.ignore_chat_template:
        return text
    system = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    return [*system, {"role": "user", "content": text}]


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C into a question that the engine asks each round; the second one ends the process.

    A thread listens for the second, because Python runs no handler while MLX evaluates.
    """
    pressed = threading.Event()
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def listen() -> None:
        count = 0
        while signum := os.read(heard, 1):
            count += signum[0] == signal.SIGINT
            if count == 2:
                os._exit(CTRL_C)

    handler = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    waking = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield pressed.is_set
    finally:
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGINT, handler)
        os.close(told)
        listener.join()
        os.close(heard)


def show(text: str) -> None:
    sys.stdout.reconfigure(errors="replace")  # a terminal without a character gets a question mark
    print(text, end="", flush=True)


def _report(result: Result) -> str:
    """What stderr says after a reply: a line for each thing that was measured, then the notes."""
    from ..hub import readable

    s = result.stats
    read, written = ("n/a" if not tps else f"{tps:.1f} tokens/s" for tps in (s.prompt_tps, s.generation_tps))
    first = "" if s.ttft_s is None or not s.generation_tokens else f", the first after {s.ttft_s:.2f} s"
    accepted = "n/a (nothing was drafted)" if s.acceptance_rate is None else (
        f"{s.accepted} of {s.drafted} drafted ({s.acceptance_rate:.0%}), {s.tokens_per_round:.2f} tokens a round")
    lines = [
        ("prompt", f"{s.prompt_tokens} tokens, {read}"),
        ("generation", f"{s.generation_tokens} tokens, {written}{first}, end: {result.finish_reason}"),
        ("acceptance", accepted),
        ("peak memory", "n/a" if s.peak_memory_bytes is None else readable(s.peak_memory_bytes)),
        ("mode", f"{s.mode}, seed {result.seed}"),
        *(("note", note) for note in result.notes),
    ]
    return "\n".join(f"{name + ':':<12} {value}" for name, value in lines)
