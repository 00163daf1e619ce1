"""Flags that commands share: which models, and the library's options."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from ..types import KV_BITS, KV_GROUP_SIZES, MAX_DRAFT_TOKENS, TASKS, VERIFY_RULES, Options


def add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models", "MODEL is owner/name on the hub, an mlx-lm folder or a .gguf file.")
    one = group.add_mutually_exclusive_group().add_argument
    one("--pair", metavar="NAME", help="a target and its draft by name, see `mlx_spec pairs` (default: demo)")
    one("--target", "--model", metavar="MODEL", help="the model that answers; also a pair's name")
    add = group.add_argument
    add("--draft-model", "--draft", metavar="MODEL",
        help="the model that proposes; none: what can be looked up in the text is proposed (default: the pair's; with a --target of your "
             "own, none)")
    add("--draft-optional", action="store_true",
        help="when the draft can't be loaded, answer without it and say so (default: exit with 1)")
    add("--adapter-path", metavar="DIR", help="LoRA adapter for the target; it never reaches the draft")
    add("--draft-adapter-path", metavar="DIR", help="LoRA adapter for the draft")
    add("--revision", metavar="REV", help="branch, tag or commit of the target on the hub (default: main)")
    add("--draft-revision", metavar="REV", help="the same for the draft")
    add("--trust-remote-code", action="store_true",
        help="run Python code that the models bring along (default: refuse them)")


def load_pair(args: argparse.Namespace) -> Any:
    """The pair that the flags name. Raises PairError and DownloadError."""
    from ..names import need
    from ..pairs import load

    pair = need("demo" if args.pair is None else args.pair).name
    given = ("adapter_path", "draft_adapter_path", "revision", "draft_revision", "trust_remote_code")
    return load(pair if args.target is None else args.target, args.draft_model if args.num_draft_tokens else False,
                draft_required=not args.draft_optional, **{name: getattr(args, name) for name in given})


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """The library's options among the flags. Raises ValueError."""
    options = {f.name: getattr(args, f.name) for f in fields(Options) if hasattr(args, f.name)}
    Options.of(**options)
    return options


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding")
    _number(group, "max_tokens", int, "N", "tokens at most, from 0; -1: no limit", "--max-tokens", "-m")
    _number(group, "num_draft_tokens", _draft_tokens, "K",
            f"tokens drafted a round, 0 to {MAX_DRAFT_TOKENS}, or auto: as many as pay on this machine; "
            "0: plain decoding, the draft is not loaded")
    group.add_argument("--task", choices=TASKS, default="prose", help="what auto expects at first")
    group.add_argument("--reproducible", action="store_true", help="auto by tokens and stored costs alone, not by clocks")
    group.add_argument("--verify", choices=VERIFY_RULES, default="block",
                       help="how drafts are judged at a temperature above 0; with match a seed gives the same text "
                            "whatever the draft")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="end the reply before this text; can be given more than once")
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


def _draft_tokens(text: str) -> int | str:
    if text != "auto" and not text.lstrip("+-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return text if text == "auto" else int(text)


def _number(group: Any, name: str, kind: type, metavar: str, help: str, *flags: str) -> None:
    """One of the library's options, with its default; a default of None is told in the help's own words."""
    flags = flags or ("--" + name.replace("_", "-"),)
    group.add_argument(*flags, dest=name, type=kind, metavar=metavar, default=getattr(Options, name), help=help)
