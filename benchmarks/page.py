"""How much the page slows decoding: the same reply by itself, through the running page, and with a browser open on it.

Each is timed where it is decoded, from the first chunk to the last, by the wall: what the page does between rounds and
what its server and its browser take from them both count. Arms take turns prompt by prompt, in rotating order; greedy,
speculative only; end tokens are ignored.

On a CPU the device is the same cores that the page and the browser run on. With --apart decoding has a core to itself and
everything else the others: as near as a CPU comes to a device of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Callable, Iterator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import mlx_spec  # noqa: E402, F401  before mlx.core: it puts a fast BLAS in place

import app as page_app  # noqa: E402
from measure import each_prompt, machine, note, parser, reached, report_machine, show, table  # noqa: E402
from mlx_spec import arena as arena_module  # noqa: E402
from mlx_spec.arena import Arena  # noqa: E402
from mlx_spec.bench.stats import Probe, interval, rotated  # noqa: E402
from mlx_spec.bench.texts import load as load_prompts  # noqa: E402
from mlx_spec.blas import work_side_by_side  # noqa: E402
from mlx_spec.engine import Decoder  # noqa: E402
from mlx_spec.page.stage import Stage  # noqa: E402
from mlx_spec.prompts import encode  # noqa: E402
from mlx_spec.types import Options  # noqa: E402

LOST = 0.03  # of the speed: what the page may cost
Converse = Callable[[str], None]  # says a prompt to the page, and returns when the reply is done


class Bench:
    """The page on a pair, and a watch on the replies that its arena decodes."""

    def __init__(self, pair: str, k: int, tokens: int):
        self.k, self.tokens, self.run = k, tokens, {}
        self.arena = Arena()
        stage = Stage(self.arena)
        stage.load(pair).join()
        if not stage.ready:
            raise SystemExit(stage.status)
        self.arena.pair.end_ids = frozenset()
        arena_module.race = partial(self._watched, arena_module.race)
        self.page = page_app.Page(stage)
        self.page.mode.value, self.page.settings[5].value = "speculative", tokens
        self.page.settings[6].value = k
        self.address = page_app.serve(self.page)

    def _watched(self, race: Callable, lanes: Any) -> Iterator:
        stamps, ids = [], []
        for lane, chunk in race(lanes):
            stamps.append(time.perf_counter())
            ids += [t.id for t in chunk.tokens]
            yield lane, chunk
        self.run = {"seconds": stamps[-1] - stamps[0], "ids": ids}

    def alone(self, text: str) -> None:
        """In the thread that the page's replies are decoded in, and with their options."""
        def work(_: Any) -> None:
            pair = self.arena.pair
            ids, _notes = encode(pair.tokenizer, [{"role": "user", "content": text}])
            options = Options(max_tokens=self.tokens, num_draft_tokens=self.k, verify="match")
            race = ((None, chunk) for chunk in Decoder(pair, ids, options).chunks())
            for _step in self._watched(lambda lanes: lanes, race):
                pass

        self.arena.worker.ask(work).result()

    def timed(self, converse: Converse, text: str) -> dict[str, Any]:
        self.run = {}
        converse(text)
        while not self.run:
            time.sleep(0.05)
        return self.run


def say_to_server(address: str, tokens: int, k: int, text: str) -> int:
    """In a process of its own, as a browser is."""
    from gradio_client import Client

    job = Client(address, verbose=False).submit(
        text, "speculative", "", 0, 1, 0, 0, "", tokens, k, "match", api_name="/send")
    return sum(1 for _ in job)


def say_in_browser(tab: Any, bench: Bench, text: str) -> None:
    tab.click("#clear")
    tab.wait_for_function("!document.querySelector('#history .said')")
    tab.wait_for_timeout(500)  # where there was nothing to clear, it still has to be heard before the prompt
    tab.fill("#box textarea", text)
    tab.press("#box textarea", "Enter")
    while not bench.run:
        tab.wait_for_timeout(50)
    tab.wait_for_timeout(1000)  # it draws the end


def open_tab(stack: ExitStack, address: str, chromium: str) -> Any:
    from playwright.sync_api import sync_playwright

    browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    stack.callback(browser.close)
    tab = browser.new_page(viewport={"width": 1280, "height": 1000})
    tab.goto(address)
    tab.wait_for_selector("#box textarea")
    return tab


def arms_of(bench: Bench, stack: ExitStack) -> dict[str, Converse]:
    client = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
    say = partial(say_to_server, bench.address, bench.tokens, bench.k)
    arms: dict[str, Converse] = {"alone": bench.alone, "client": lambda text: client.submit(say, text).result()}
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with suppress(ImportError):
        if chromium:
            arms["browser"] = partial(say_in_browser, open_tab(stack, bench.address, chromium), bench)
    return arms


def keep_apart(bench: Bench, text: str) -> None:
    """Threads that decode on the first core, all others, and what they start, on the rest."""
    work_side_by_side()
    before = _ticks()
    bench.timed(bench.alone, text)
    grown = {thread: ticks - before.get(thread, 0) for thread, ticks in _ticks().items()}
    first, *rest = sorted(os.sched_getaffinity(0))
    for thread, ticks in grown.items():
        os.sched_setaffinity(thread, {first} if ticks > 0.05 * sum(grown.values()) else rest)
    note(f"{sum(ticks > 0.05 * sum(grown.values()) for ticks in grown.values())} threads decode, on core {first}")


def _ticks() -> dict[int, int]:
    """What each thread of this process has computed."""
    found = {}
    for path in Path("/proc/self/task").glob("*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        found[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    return found


def one_prompt(bench: Bench, arms: dict[str, Converse], text: str, turn: int) -> dict[str, Any]:
    return {name: bench.timed(arms[name], text) for name in rotated(list(arms), turn)}


def report(records: list[dict]) -> dict[str, dict[str, float]]:
    found, rows = {}, []
    for name in [name for name in records[0] if name != "alone"]:
        same = sum(r[name]["ids"] == r["alone"]["ids"] for r in records)
        ratio = found[name] = interval([r["alone"]["seconds"] / r[name]["seconds"] for r in records])
        rows.append([name, show(ratio), reached(ratio["median"] > 1 - LOST, f"> {1 - LOST}"), f"{same} of {len(records)}"])
    print("decoding through the page / by itself: ratios of speeds")
    table(["through", "ratio", "target", "same tokens"], rows)
    return found


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--pair", default="demo")
    options.add_argument("--k", type=int, default=4)
    options.add_argument("--apart", action="store_true", help="Linux: decoding has a core to itself")
    options.add_argument("--quick", action="store_true", help="two prompts, 16 tokens: does it work?")
    options.set_defaults(tokens=256)
    args = options.parse_args()
    if args.quick:
        args.prompts, args.tokens = 2, 16
    return args


def main() -> None:
    args = arguments()
    os.environ["MLX_SPEC_DTYPE"] = args.dtype
    card = machine(args.dtype)
    report_machine(card)
    bench, probe = Bench(args.pair, args.k, args.tokens), Probe()
    texts = [prompt.text for prompt in load_prompts(["chat"], args.prompts)]
    if args.apart:
        keep_apart(bench, texts[0])
    with ExitStack() as stack:
        arms = arms_of(bench, stack)
        note("warming up")
        one_prompt(bench, arms, texts[0], 0)
        records = each_prompt(texts, probe, partial(one_prompt, bench, arms))
    probe.read()
    figures = report(records)
    report_machine(card, probe)
    bench.page.blocks.close()
    if args.json:
        raw = {"machine": card, "arguments": vars(args), "records": records, "probe": probe.readings, "figures": figures}
        Path(args.json).write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
