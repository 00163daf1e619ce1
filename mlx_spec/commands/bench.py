"""`mlx_spec bench`: a table on stdout, progress on stderr, the record in a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Callable

from ..bench import texts
from ..types import VERIFY_RULES, Options
from . import CTRL_C, FAILED
from .arguments import add_models, load_pair

HELP = "is speculation faster here, and is the output the same?"
USAGE = "[--pair NAME | --target MODEL [--draft-model MODEL]] [options]\n       mlx_spec bench --compare A.json B.json ..."
ABOUT = """Time plain and speculative decoding side by side on real prompts, and compare what comes out. Close everything
else first. Ctrl-C keeps what is finished. The exit code is 1 if a reply of this library is wrong."""
FORMATS = ("md", "json", "jsonl", "csv")
BASELINES = ("mlx-lm-plain", "mlx-lm-spec")  # the names in `bench/arms.py`, which imports MLX


def fill(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    add = parser.add_argument_group("what runs", "Lists are separated by commas.").add_argument
    add("--prompts", metavar="LIST", default=",".join(texts.CATEGORIES),
        help="kinds of text, or .jsonl files with `text` (or GSM8K's `question`, HumanEval's `prompt`)")
    add("--each", type=int, metavar="N", help="prompts of a kind at most, 0: all (default: 4; with --quick 2)")
    add("-k", metavar="LIST", help="draft lengths, 0: plain (default: auto,0,4; with --quick auto,0)")
    add("--temp", metavar="LIST", default="0", help="temperatures")
    add("--verify", choices=VERIFY_RULES, default="match",
        help="above temperature 0; only with match can the output be compared with plain decoding")
    add("-n", type=int, metavar="N", default=1, help="repetitions")
    add("--max-tokens", "-m", type=int, metavar="N", help="of a reply at most (default: 96; with --quick 48)")
    add("--baseline", metavar="LIST", default=",".join(BASELINES), help="mlx-lm-plain always runs, mlx-lm-spec where it can")
    add("--quick", action="store_true", help="a short run without the kind `long`")
    add("--delay", type=float, metavar="SECONDS", default=0.0, help="to cool down before every prompt")
    add = parser.add_argument_group("output").add_argument
    add("--compare", nargs="+", metavar="FILE", help="run nothing: put JSON records side by side; several of one build, "
        "from runs in turns, as A1.json,A2.json,A3.json")
    add("-o", dest="format", choices=FORMATS, default="md", help="on stdout")
    add("--out", metavar="FILE", help="write it to a file too, .md, .json, .jsonl or .csv; only JSON holds everything")
    add("--plot", metavar="FILE.png", help="speed-up by kind of text, acceptance by position, v(m)")
    parser.set_defaults(num_draft_tokens=1)  # the draft is loaded


def run(args: argparse.Namespace) -> int:
    _check_files(args)
    if args.compare:
        return _compare(args)
    ks, temperatures, baselines, options = _asked(args)  # what is wrong with them is said before anything is loaded
    each = (2 if args.quick else 4) if args.each is None else args.each or None
    prompts = texts.load([name for name in _list(args.prompts) if not (args.quick and name == "long")], each)
    pair = load_pair(args)
    from ..bench.run import Plan, arms_of, bench, encoded

    plan = Plan(arms_of(pair, ks, temperatures, baselines), encoded(pair, prompts), args.n, options, args.delay)
    given = {name: value for name, value in vars(args).items() if name not in ("run", "out", "plot", "compare", "format")}
    return _give(args, bench(pair, plan, _draft_name(args), given, _note))


def _check_files(args: argparse.Namespace) -> None:
    if args.out and Path(args.out).suffix[1:] not in FORMATS:
        raise ValueError(f"--out must end in one of .{', .'.join(FORMATS)}; got {args.out!r}")
    if args.plot and Path(args.plot).suffix != ".png":
        raise ValueError(f"--plot must end in .png; got {args.plot!r}")
    for path in filter(None, (args.out, args.plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path} can't be written: its folder does not exist")


def _asked(args: argparse.Namespace) -> tuple[list, list[float], list[str], Options]:
    ks = [_k(k) for k in _list(("auto,0" if args.quick else "auto,0,4") if args.k is None else args.k)]
    if not ks:
        raise ValueError("-k is empty: give draft lengths, as auto,0,4")
    temperatures, baselines = [_temperature(t) for t in _list(args.temp) or ["0"]], _list(args.baseline)
    tokens = (48 if args.quick else 96) if args.max_tokens is None else args.max_tokens
    if unknown := set(baselines) - set(BASELINES):
        raise ValueError(f"--baseline takes {', '.join(BASELINES)}; got {unknown.pop()!r}")
    for name, value, least in (("-n", args.n, 1), ("--each", args.each or 0, 0), ("--max-tokens", tokens, 1),
                               ("--delay", args.delay, 0)):
        if not value >= least:
            raise ValueError(f"{name} must be a number from {least}; got {value}")
    options = Options(max_tokens=tokens, verify=args.verify)
    for k, t in ((k, t) for k in ks for t in temperatures):
        options.but(num_draft_tokens=k, temperature=t)
    return ks, temperatures, baselines, options


def _give(args: argparse.Namespace, record: Any) -> int:
    from ..bench import figures, plot

    print(_rendered(record, args.format), end="", flush=True)
    if args.out:
        Path(args.out).write_text(_rendered(record, Path(args.out).suffix[1:]), encoding="utf-8")
    if args.plot and record["runs"]:
        plot.plot([("this run", record)], args.plot)
    return CTRL_C if not record["finished"] else FAILED if figures.bugs(record) else 0


def _rendered(record: Any, form: str) -> str:
    from ..bench import render

    if form == "jsonl":
        return "".join(json.dumps(run) + "\n" for run in record["runs"])
    makers: dict[str, Callable] = {"md": render.markdown, "csv": render.comma_separated,
                                   "json": lambda r: json.dumps(r, indent=1) + "\n"}
    return makers[form](record)


def _compare(args: argparse.Namespace) -> int:
    from ..bench import compare, plot, record

    groups = [(paths := _list(group), [record.read(path) for path in paths]) for group in args.compare]
    if not all(paths for paths, _ in groups):
        raise ValueError("--compare takes records, and several of one build as A1.json,A2.json; one of these is empty")
    builds = [compare.Build(Path(paths[0]).stem, found) for paths, found in groups]
    for build in builds:
        build.check()
    if len({build.name for build in builds}) < len(builds):
        builds = [build._replace(name=f"{i + 1}: {build.name}") for i, build in enumerate(builds)]
    table = compare.markdown(builds)
    print(table, end="", flush=True)
    if args.out:
        Path(args.out).write_text(table, encoding="utf-8")
    if args.plot:
        plot.plot([(build.name, build.pooled) for build in builds], args.plot)
    return 0


def _list(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _k(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _temperature(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--temp takes numbers from 0, separated by commas; got {text!r}") from None


def _draft_name(args: argparse.Namespace) -> str | None:
    from ..names import find

    entry = find(args.target or args.pair or "demo")
    name = args.draft_model or (entry and entry.draft_name)
    return entry.name if entry and name == "self" else name


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
