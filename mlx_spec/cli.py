"""The command line: `generate`, `pairs`, `pull`, `train`.

Knows how to talk to a terminal; what is said comes from the library. What is heavy is imported
inside the command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Callable, Iterator, Sequence

from . import __version__
from .errors import PairError, SpecError
from .train import command as train
from .types import KV_BITS, KV_GROUP_SIZES, MAX_DRAFT_TOKENS, VERIFY_RULES, Options, Result

FAILED, CTRL_C, PIPE_CLOSED = 1, 130, 141  # exit codes; for a wrong command line argparse has 2


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


def _generate(args: argparse.Namespace) -> int:
    options, prompt = _options(args), _prompt(args)  # what is wrong with them is said before anything is loaded
    pair = _load(args)
    from .api import stream_generate

    with _ctrl_c() as pressed:
        stream = stream_generate(pair, prompt, **options, should_cancel=pressed)
        for chunk in stream:
            if not args.json:
                _show(chunk.text)
        result = stream.result()
    if args.json:
        print(json.dumps(result.to_dict()), flush=True)
    else:
        _show("" if result.text.endswith("\n") else "\n")
        print(_report(result), file=sys.stderr)
    return CTRL_C if result.finish_reason == "cancelled" else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options = {f.name: getattr(args, f.name) for f in fields(Options) if hasattr(args, f.name)}
    Options.of(**options)
    return options


def _prompt(args: argparse.Namespace) -> str | list[dict[str, str]]:
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


def _load(args: argparse.Namespace) -> Any:
    from .pairs import catalogue, find, load

    pair = "demo" if args.pair is None else args.pair
    if find(pair) is None:
        raise PairError(f"no pair has the name {pair!r}; pairs are: {', '.join(e.name for e in catalogue())}")
    given = ("adapter_path", "draft_adapter_path", "revision", "draft_revision", "trust_remote_code")
    return load(pair if args.target is None else args.target, args.draft_model if args.num_draft_tokens else False,
                draft_required=not args.draft_optional, **{name: getattr(args, name) for name in given})


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
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


def _show(text: str) -> None:
    sys.stdout.reconfigure(errors="replace")  # a terminal without a character gets a question mark
    print(text, end="", flush=True)


def _report(result: Result) -> str:
    """What stderr says after a reply: a line for each thing that was measured, then the notes."""
    from .hub import readable

    s = result.stats
    read, written = ("n/a" if tps is None else f"{tps:.1f} tokens/s" for tps in (s.prompt_tps, s.generation_tps))
    first = "" if s.ttft_s is None else f", the first after {s.ttft_s:.2f} s"
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


def _pairs(args: argparse.Namespace) -> int:
    from .hub import readable
    from .names import catalogue

    if args.json:
        shown = ("name", "target", "draft", "target_bytes", "draft_bytes", "memory_bytes", "licence", "note", "on_disk")
        print(json.dumps([{name: getattr(e, name) for name in shown} for e in catalogue()], indent=1), flush=True)
        return 0
    rows = [("name", "target", "size", "draft", "size", "memory", "here", "licence")]
    for e in catalogue():
        draft = ("the target itself", "-") if e.draft == "self" else (e.draft, readable(e.draft_bytes))
        rows.append((e.name, e.target, readable(e.target_bytes), *draft, readable(e.memory_bytes),
                     "yes" if e.on_disk else "no", e.licence))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip(), flush=True)
    return 0


def _pull(args: argparse.Namespace) -> int:
    from .names import find, pull
    from .hub import readable

    entry = find(args.name)
    if entry is not None:
        print(f"{entry.name}: {readable(entry.size_bytes)}, {entry.licence}; "
              f"running it takes about {readable(entry.memory_bytes)} of memory", file=sys.stderr, flush=True)
    for path in pull(args.name):
        print(path, flush=True)
    return 0


class _Help(argparse.HelpFormatter):
    """One layout for every version of Python: `-p, --prompt TEXT`, not `-p TEXT, --prompt TEXT`."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=32, **kwargs)

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
    generate = _command(
        commands, "generate", _generate, "answer a prompt",
        "[--pair NAME | --target MODEL [--draft-model MODEL]] --prompt TEXT [options]",
        "Answer a prompt. The text goes to stdout as it is made, statistics and notes to stderr at the end. "
        "Ctrl-C ends the reply and keeps what there is; a second one ends the program at once.")
    for fill in (_model_arguments, _decoding_arguments, _sampling_arguments):
        fill(generate)
    _command(
        commands, "pairs", _pairs, "list the pairs that have a name", "[--json]",
        "List the pairs that have a name: what is downloaded, the memory a chat needs, whether it is on this machine.",
    ).add_argument("--json", action="store_true", help="a JSON list in place of the table; sizes in bytes")
    _command(
        commands, "pull", _pull, "download a pair", "NAME",
        "Download a pair by its name, or one hub repository. The size is said first; where it is comes to stdout.",
    ).add_argument("name", metavar="NAME", help="a pair's name (see `mlx_spec pairs`) or owner/name on the hub")
    train.fill(_command(
        commands, "train", train.run, "make a draft for a target",
        "--target MODEL --kind {draft,heads,mlp} --out DIR [options]",
        "Train a draft for a target, on text that the target writes itself or on --data, and report what it will "
        "gain. Ctrl-C keeps a checkpoint; models/README.md says how long it takes and how much memory it needs."))
    return parser


def _command(commands: Any, name: str, run: Callable, help: str, usage: str, about: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, usage=f"mlx_spec {name} [-h] {usage}", description=about, help=help,
                                  formatter_class=_Help, allow_abbrev=False)
    command.set_defaults(run=run)
    return command


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models", "MODEL is owner/name on the hub, an mlx-lm folder or a .gguf file.")
    one = group.add_mutually_exclusive_group().add_argument
    one("--pair", metavar="NAME", help="a target and its draft by name, see `mlx_spec pairs` (default: demo)")
    one("--target", "--model", metavar="MODEL", help="the model that answers; also a pair's name")
    add = group.add_argument
    add("--draft-model", "--draft", metavar="MODEL",
        help="the model that proposes (default: the pair's; with a --target of your own, none)")
    add("--draft-optional", action="store_true",
        help="when the draft can't be loaded, answer without it and say so (default: exit with 1)")
    add("--adapter-path", metavar="DIR", help="LoRA adapter for the target; it never reaches the draft")
    add("--draft-adapter-path", metavar="DIR", help="LoRA adapter for the draft")
    add("--revision", metavar="REV", help="branch, tag or commit of the target on the hub (default: main)")
    add("--draft-revision", metavar="REV", help="the same for the draft")
    add("--trust-remote-code", action="store_true",
        help="run Python code that the models bring along (default: refuse them)")
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", "-p", metavar="TEXT", required=True,
        help="one user message, or plain text where there is no chat template; - reads stdin")
    add("--system-prompt", metavar="TEXT", help="a system message before it")
    add("--ignore-chat-template", action="store_true", help="take the prompt as plain text that the model continues")


def _number(group: Any, name: str, kind: type, metavar: str, help: str, *flags: str) -> None:
    """One of the library's options, with its default; a default of None is told in the help's own words."""
    default = getattr(Options, name)
    flags = flags or ("--" + name.replace("_", "-"),)
    help = help if default is None else f"{help} (default: {default})"
    group.add_argument(*flags, dest=name, type=kind, metavar=metavar, default=default, help=help)


def _decoding_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding")
    _number(group, "max_tokens", int, "N", "tokens at most, from 0; -1: no limit", "--max-tokens", "-m")
    _number(group, "num_draft_tokens", int, "K",
            f"tokens drafted a round, 0 to {MAX_DRAFT_TOKENS}; 0: plain decoding, the draft is not loaded")
    group.add_argument("--verify", choices=VERIFY_RULES, default="block",
                       help="how drafts are judged at a temperature above 0; with match a seed gives the same text "
                            "whatever the draft (default: %(default)s)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="end the reply before this text; can be given more than once")
    group.add_argument("--json", action="store_true",
                       help="one JSON record on stdout in place of the text: text, tokens, counts, notes")


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Filters come first, the temperature last, as in mlx-lm.")
    _number(group, "temperature", float, "T", "temperature from 0, 0: greedy", "--temp")
    _number(group, "top_p", float, "P", "0 to 1; 1 and 0: off")
    _number(group, "top_k", int, "N", "from 0, 0: off")
    _number(group, "min_p", float, "P", "0 to 1, 0: off")
    _number(group, "seed", int, "N", "0 to 2**64 - 1 (default: a new one, named in the statistics)")
    _number(group, "repetition_penalty", float, "X",
            "above 0, 1: none; on the last 20 tokens, as the next two (default: none)")
    _number(group, "presence_penalty", float, "X", "taken off the logit of a token that occurred")
    _number(group, "frequency_penalty", float, "X", "the same, times how often it occurred")
    group = parser.add_argument_group("memory")
    _number(group, "prefill_step_size", int, "N", "prompt tokens read at a time, from 1; fewer need less memory")
    _number(group, "max_kv_size", int, "N",
            "tokens kept in the caches, from 8: the first 4 and the newest (default: all)")
    _number(group, "kv_bits", int, "BITS", f"quantise keys and values: {', '.join(map(str, KV_BITS))} (default: off)")
    _number(group, "kv_group_size", int, "N", f"values that share a scale: {', '.join(map(str, KV_GROUP_SIZES))}")
    _number(group, "quantized_kv_start", int, "N", "with --kv-bits: from this many tokens on")
