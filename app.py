"""The local chat page: plain and speculative decoding race in the browser.

Widgets and what connects them. What is shown is made in mlx_spec/page, what is decoded in
mlx_spec/arena.py; MLX is not imported before the page is up.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
import time
import webbrowser
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

# Before the import, which reads them: nothing is told to anybody, nor kept in the browser.
os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_RUN_HISTORY="False")

import gradio as gr  # noqa: E402
import pandas as pd  # noqa: E402

from mlx_spec.errors import SpecError  # noqa: E402
from mlx_spec.names import catalogue, need, short  # noqa: E402
from mlx_spec.page import numbers, text  # noqa: E402
from mlx_spec.page.stage import READING, Stage, Visitor, best_pair  # noqa: E402
from mlx_spec.types import VERIFY_RULES  # noqa: E402

LOOK = Path(text.__file__).parent
EXAMPLES = json.loads((LOOK / "examples.json").read_text())
MODES = ("race", "speculative", "plain")
LANES = (numbers.PLAIN, numbers.SPECULATIVE)
DEFAULT_K = "auto"
PLOT_S = 1.0  # between two drawings of the plots
MATHS = [{"left": "$$", "right": "$$", "display": True}]
COLOURS = {numbers.PLAIN: "#94a3b8", numbers.SPECULATIVE: "#16a34a"}
GREEN = {"button_primary_background_fill": 700, "button_primary_background_fill_hover": 800, "checkbox_label_background_fill_selected": 700}
OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "num_draft_tokens", "verify")
WHOLE = ("top_k", "max_tokens")
CHUNK = 512  # prompt tokens read at a time: a stop is heard between two chunks


class Page:
    """The widgets by name, and what happens when they are used. Every visitor has a Visitor."""

    def __init__(self, stage: Stage):
        self.stage, self.visitors = stage, {}
        with gr.Blocks(title="mlx_spec", analytics_enabled=False) as self.blocks:
            self.visitor = gr.State(Visitor(), delete_callback=Visitor.clear)
            self._build_race()
            self._build_settings()
            self._connect()
        self.blocks.queue(default_concurrency_limit=None)  # the worker has the line, and stop never waits in it

    def _build_race(self) -> None:
        gr.HTML('<div id="title"><b>mlx_spec</b><span>the same text, sooner: plain and speculative decoding side by side</span></div>')
        self.banner = gr.HTML(self.banner_html)
        self.history = gr.HTML(elem_id="history")
        self.told = gr.Markdown(sanitize_html=True, latex_delimiters=MATHS, line_breaks=True, visible=False, elem_id="told")
        self.verdict = gr.HTML(elem_id="verdict")
        self.columns, self.replies, self.answers = {}, {}, {}
        with gr.Row(elem_id="race", equal_height=True):
            for name in LANES:
                with gr.Column(elem_classes="racer", elem_id=name) as self.columns[name]:
                    self.replies[name] = gr.HTML(numbers.head_html(name, None, DEFAULT_K) + '<div class="reply"></div>')
                    self.answers[name] = gr.Markdown(sanitize_html=True, latex_delimiters=MATHS, line_breaks=True,
                                                     visible=False, elem_classes="answer")
        with gr.Row():
            self.mode = gr.Radio(MODES, value="race", show_label=False, container=False, scale=3, min_width=320, elem_id="mode")
            self.formatted = gr.Checkbox(label="formatted", container=False, scale=1, min_width=110, elem_id="formatted")
        gr.HTML(text.LEGEND)
        with gr.Row(equal_height=True):
            self.box = gr.Textbox(placeholder="Ask something. Enter sends, Esc stops.", max_lines=8, show_label=False,
                                  container=False, scale=8, autofocus=True, min_width=280, elem_id="box")
            self.returned = gr.Textbox(visible="hidden")  # what goes back into the box, in front of what is typed by then
            self.send_button = gr.Button("Send", variant="primary", scale=1, min_width=80, elem_id="send")
            self.stop_button = gr.Button("Stop", scale=1, min_width=80, elem_id="stop")
        self.place = gr.HTML(elem_id="place")
        with gr.Row():
            self.retry_button, self.edit_button, self.clear_button = (
                gr.Button(name, size="sm", min_width=120, scale=0, elem_id=name.split()[0].lower())
                for name in ("Retry (new seed)", "Edit last turn", "Clear"))
        self.examples = {}
        with gr.Accordion("Examples", open=False):
            for group, prompts in EXAMPLES.items():
                gr.Markdown(f"**{group}**")
                with gr.Row():
                    for prompt in prompts:
                        self.examples[prompt] = gr.Button(prompt, size="sm", min_width=280)

    def _build_settings(self) -> None:
        with gr.Row(elem_id="plots"):
            self.over_time = gr.LinePlot(x="device seconds", y="tokens", color="column", color_map=COLOURS, height=230,
                                         color_title=" ", title="Tokens over device time", min_width=300)
            self.by_position = gr.BarPlot(x="position", y="% accepted", y_lim=[0, 100], height=230, min_width=300,
                                          title="Accepted by position in the round")
        with gr.Accordion("Settings", open=False):
            self.system = gr.Textbox(label="System prompt", lines=2)
            with gr.Row():
                self.settings = [
                    gr.Slider(0, 2, 0, step=0.05, label="Temperature", min_width=250),
                    gr.Slider(0, 1, 1, step=0.01, label="Top-p (1: off)", min_width=250),
                    gr.Slider(0, 200, 0, step=1, label="Top-k (0: off)", min_width=250),
                    gr.Slider(0, 1, 0, step=0.01, label="Min-p (0: off)", min_width=250),
                    gr.Textbox(label="Seed (empty: a new one)", min_width=250),
                    gr.Slider(1, 4096, 256, step=1, label="Max tokens", min_width=250),
                    gr.Dropdown([DEFAULT_K, *range(9)], value=DEFAULT_K, label="k: tokens drafted a round", min_width=250,
                                info="auto: as many as pay on this machine", elem_id="k"),
                    gr.Dropdown(VERIFY_RULES, value="match", label="Rule at a temperature", min_width=250,
                                info="match: both columns draw with one seed, so identity is checked"),
                ]
        with gr.Accordion("Models", open=False, elem_id="models"):
            self.pair = gr.Dropdown(value=None, label="Pairs by name", elem_id="pair")
            with gr.Row():
                self.target = gr.Textbox(label="or any target: owner/name or a folder", min_width=260, elem_id="target")
                self.draft = gr.Textbox(label="and its draft (empty: the pair's own, if it has one; none: no draft)", min_width=260, elem_id="draft")
            with gr.Row():
                self.load_button = gr.Button("Load", variant="primary", size="sm", elem_id="load")
                self.cancel_button = gr.Button("Cancel", size="sm", elem_id="cancel")
                self.advise_button = gr.Button("Which draft fits?", size="sm", elem_id="advise")
            self.advised = gr.Radio([], visible=False, elem_id="advised")
        with gr.Accordion("Result to copy", open=False):
            self.row = gr.Code(label="Markdown", interactive=False, lines=3, wrap_lines=True)
            self.json = gr.Code(label="JSON", interactive=False, language="json")

    def _connect(self) -> None:
        wanted = [self.visitor, self.mode, self.system, *self.settings]
        shown = [self.returned, self.place, self.history, self.told, self.verdict, *self.columns.values(),
                 *self.replies.values(), *self.answers.values(), self.over_time, self.by_position, self.row, self.json]
        hidden = dict(show_progress="hidden")
        quiet = hidden | dict(api_visibility="private")
        self.send_button.click(self.send, [self.box, *wanted], shown, api_name="send", trigger_mode="multiple",
                               js="(said, ...wanted) => [outbox.shift() ?? said, ...wanted]", **hidden)
        self.returned.change(None, self.returned, None, js="put_back")
        self.retry_button.click(self.retry, wanted, shown, api_name="retry", **hidden)
        for prompt, button in self.examples.items():
            button.click(self._example(prompt), wanted, shown, **quiet)
        self.stop_button.click(self.stop, self.visitor, None, api_name="stop", **hidden)
        self.edit_button.click(self.edit, self.visitor, shown, api_name="edit", **hidden)
        self.clear_button.click(self.clear, self.visitor, shown, api_name="clear", **hidden)
        self.formatted.change(self.show_formatted, [self.formatted, self.visitor], shown, **quiet)
        self.mode.change(lambda mode: [gr.update(visible=mode in ("race", name)) for name in LANES],
                         self.mode, [*self.columns.values()], **quiet)
        self.pair.input(lambda: ("", ""), None, [self.target, self.draft], **quiet)
        self.load_button.click(self.load, [self.pair, self.target, self.draft], self.banner, api_name="load", **hidden)
        self.cancel_button.click(self.cancel_load, None, self.banner, **quiet)
        self.advise_button.click(self.advise, None, [self.banner, self.advised], api_name="advise", **hidden)
        self.advised.input(self.chosen, self.advised, [self.target, self.draft], **quiet)
        gr.Timer(1.0).tick(self.banner_html, None, self.banner, **quiet)
        self.banner.change(self.news, None, [self.pair, self.advised], **quiet)
        self.blocks.load(self.enter, self.visitor, self.pair, **quiet)
        self.blocks.unload(self.leave)

    def enter(self, visitor: Visitor, request: gr.Request) -> dict:
        self.visitors[request.session_hash] = visitor
        return self.pairs()

    def leave(self, request: gr.Request) -> None:
        self.visitors.pop(request.session_hash, Visitor()).clear()

    def send(self, said: str, visitor: Visitor, mode: str, system: str, *settings: Any) -> Iterator[dict]:
        said = text.clean(said or "")
        if not said.strip():
            yield {self.place: ""}
            return
        yield from self._turn(said, visitor, mode, system, settings)

    def retry(self, visitor: Visitor, mode: str, system: str, *settings: Any) -> Iterator[dict]:
        said = visitor.take_back()
        if said is None:
            yield {self.place: ""}
            return
        new = [None if name == "seed" else value for name, value in zip(OPTIONS, settings)]
        yield from self._turn(said, visitor, mode, system, new)

    def _example(self, prompt: str) -> Callable[..., Iterator[dict]]:
        return partial(self.send, prompt)

    def _turn(self, said: str, visitor: Visitor, mode: str, system: str, settings: Sequence[Any]) -> Iterator[dict]:
        reply, drawn, waiting = None, 0.0, True
        asked = [*visitor.messages, {"role": "user", "content": said}]
        yield ({self.returned: "", self.place: place_html(READING)} | self.history_update(asked, visitor.formatted)
               | self.reply_update(None, visitor.formatted))
        try:
            for event in self.stage.turn(visitor, said, mode, options_of(settings), text.clean(system or "")):
                if isinstance(event, str):
                    waiting = True
                    yield {self.place: place_html(event or READING)} | self.history_update(visitor.said, visitor.formatted)
                    continue
                update = self.reply_update(event, visitor.formatted)
                if waiting:
                    update |= self._first_update(event, visitor)
                reply, waiting = event, False
                if reply.done or time.monotonic() - drawn >= PLOT_S:
                    drawn = time.monotonic()
                    update |= self._plots(reply)
                yield update
        except Exception as error:  # a model can fail in any way, and the page says so and lives on
            expected = isinstance(error, (ValueError, SpecError))
            place = place_html(str(error) if expected else f"{type(error).__name__}: {error}", bad=True)
            before = {} if reply else self.show_formatted(visitor.formatted, visitor)
            yield before | {self.place: place, self.returned: "" if reply else said}
        else:
            if reply is None and visitor.said:  # stopped before its turn came, and not cleared
                yield {self.place: "", self.returned: said} | self.history_update(visitor.messages, visitor.formatted)

    def _first_update(self, reply: Any, visitor: Visitor) -> dict:
        notes = [note for note in reply.notes if note not in self.stage.status]  # the banner shows those
        columns = {column: gr.update(visible=name in reply.lanes) for name, column in self.columns.items()}
        place = place_html(" · ".join(notes)) if notes else ""
        return columns | {self.place: place} | self.history_update(visitor.said, visitor.formatted)

    def history_update(self, messages: Sequence[dict], formatted: bool) -> dict:
        return {self.history: "" if formatted else text.history_html(messages),
                self.told: gr.update(value=text.history_markdown(messages) if formatted else "", visible=formatted)}

    def reply_update(self, reply: Any, formatted: bool) -> dict:
        update = {self.verdict: numbers.verdict_html(reply)}
        for name in LANES:
            view = reply.lanes.get(name) if reply is not None else None
            head = numbers.head_html(name, view, reply.options.num_draft_tokens if reply is not None else DEFAULT_K)
            if view is not None and formatted:
                thought, answer, finished = text.split_thinking(view.text, reply.thinks)
                made = "" if thought is None else text.thought_html(thought, finished)
                update[self.answers[name]] = gr.update(value=text.markdown(answer), visible=True)
            else:
                made = f'<div class="reply"><div>{text.tokens_html(view.pieces if view is not None else ())}</div></div>'
                update[self.answers[name]] = gr.update(visible=False)
            update[self.replies[name]] = head + made
        return update

    def _plots(self, reply: Any) -> dict:
        # Typed, because an empty column would be drawn as names, and stay so.
        trail = pd.DataFrame(numbers.trail_rows(reply), columns=["device seconds", "tokens", "column"])
        bars = pd.DataFrame(numbers.acceptance_rows(reply), columns=["position", "% accepted"])
        update = {self.over_time: trail.astype({"device seconds": float, "tokens": int, "column": str}),
                  self.by_position: bars.astype({"position": str, "% accepted": float})}
        if reply.done:
            found = numbers.record(reply, self.stage.pair_name)
            update |= {self.row: numbers.row_markdown(found), self.json: numbers.row_json(found)}
        return update

    stop = staticmethod(Visitor.stop)

    def edit(self, visitor: Visitor) -> dict:
        said = visitor.take_back()
        if said is None:
            return {self.place: ""}
        visitor.reply = None
        return self._emptied(visitor) | {self.returned: said}

    def clear(self, visitor: Visitor) -> dict:
        visitor.clear()
        return self._emptied(visitor)

    def _emptied(self, visitor: Visitor) -> dict:
        nothing = dict.fromkeys((self.over_time, self.by_position))
        nothing |= dict.fromkeys((self.returned, self.place, self.row, self.json), "")
        return self.show_formatted(visitor.formatted, visitor) | nothing

    def show_formatted(self, formatted: bool, visitor: Visitor) -> dict:
        visitor.formatted = formatted
        said = visitor.said if visitor.reply is not None else visitor.messages
        return self.reply_update(visitor.reply, formatted) | self.history_update(said, formatted)

    def load(self, pair: str | None, target: str, draft: str) -> str:
        chosen = target.strip() or pair or (self.stage.target if draft.strip() else "")  # a draft for what answers now
        if chosen:
            self.stage.load(chosen, draft.strip() or None)
        else:
            gr.Warning("Choose a pair by name, or write a target's.")
        return self.banner_html()

    def advise(self) -> tuple[str, dict]:
        try:
            self.stage.advise()
        except SpecError as error:
            gr.Warning(str(error))
        return self.banner_html(), self.drafts()

    def news(self) -> tuple[dict, dict]:
        """What there is to choose from once something was loaded, or advice was found."""
        return (gr.skip(), gr.skip()) if self.stage.kind == "loading" else (self.pairs(), self.drafts())

    def drafts(self) -> dict:
        """Those that were tried, the best first; what can't be chosen is told below them."""
        target, found = self.stage.advice
        choices = [(f"{short(a.draft)} · {numbers.gain(a)}", a.name) for a in found if a.error is None]
        useless = " · ".join(f"{short(a.draft)}: {a.error}" for a in found if a.error)
        return gr.update(choices=choices, value=None, visible=bool(found), label=f"Drafts for {short(target)}, the best first", info=useless)

    def chosen(self, draft: str) -> tuple[str, str]:
        """Into the boxes: Load takes it from there."""
        return self.stage.advice[0], draft

    @staticmethod
    def pairs() -> dict:
        """The names to choose from, and which of them are here by now."""
        return gr.update(choices=[(_label(entry), entry.name) for entry in catalogue()])

    def cancel_load(self) -> str:
        self.stage.cancel()
        return self.banner_html()

    def banner_html(self) -> str:
        bar = "<progress></progress>" if self.stage.kind == "loading" else ""
        return f'<div class="banner {self.stage.kind}">{text.escape(self.stage.status)}{bar}</div>'


def _label(entry: Any) -> str:
    return f"{entry.name} · {entry.size_bytes / 1e9:.1f} GB · {'here' if entry.on_disk else 'download'} · {entry.note}"


def options_of(settings: Sequence[Any]) -> dict[str, Any]:
    """Options from the widgets' values. Raises ValueError for a seed that is no number."""
    options = dict(zip(OPTIONS, settings))
    seed = (options["seed"] or "").strip()
    if seed and not (seed.isdecimal() and int(seed) < 2**64):
        raise ValueError(f"seed must be a whole number below 2**64, or empty for a new one; got {seed!r}")
    k = options["num_draft_tokens"]
    whole = {name: int(options[name]) for name in WHOLE} | {"num_draft_tokens": k if k == DEFAULT_K else int(k)}
    return options | whole | {"prefill_step_size": CHUNK, "seed": int(seed) if seed else None}


def place_html(said: str, bad: bool = False) -> str:
    return f'<div class="place{" bad" if bad else ""}" role="status">{text.escape(" ".join(said.split()))}</div>'


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="app.py", description="Plain and speculative decoding race in the browser.")
    one = made.add_mutually_exclusive_group()
    one.add_argument("--pair", metavar="NAME", help="a pair by name, see `mlx_spec pairs` (default: the largest one on this machine)")
    one.add_argument("--target", metavar="MODEL", help="the model that answers: owner/name on the hub, or a folder")
    made.add_argument("--draft", metavar="MODEL", help="the model that proposes (default: the pair's; with --target, none)")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    made.add_argument("--port", type=_port, metavar="N", help="port (default: the first free one from 7860)")
    made.add_argument("--no-browser", action="store_true", help="don't open a browser")
    return made


def _port(said: str) -> int:
    if not (said.isdecimal() and 0 < int(said) < 2**16):
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 65535; got {said!r}")
    return int(said)


def check_address(host: str, port: int | None) -> None:
    """Whether a server can listen there. Raises ValueError, which says what to change."""
    try:
        socket.create_server((host, port or 0)).close()  # IPv4, as Gradio's
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is taken: give another --port, or none for the first free one") from error
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ValueError(f"can't listen on {host}{f', port {port}' if port else ''}: {reason}") from error


def theme() -> gr.themes.Base:
    """System fonts, so that nothing is fetched; labels are words, not badges; every text has a contrast of 4.5."""
    made = gr.themes.Soft(primary_hue="emerald", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    words = {"background_fill": "transparent", "text_color": "*body_text_color"}
    green = {f"{widget}{mode}": f"*primary_{shade}" for mode in ("", "_dark") for widget, shade in GREEN.items()}
    return made.set(body_text_color_subdued="*neutral_600", **green, **{
        f"block_{kind}_{name}{mode}": value for kind in ("title", "label") for mode in ("", "_dark") for name, value in words.items()})


def serve(page: Page, host: str = "127.0.0.1", port: int | None = None) -> str:
    """Starts the server and returns its address; whoever calls decides how long it runs."""
    _, address, _ = page.blocks.launch(
        server_name=host, server_port=port, share=False, prevent_thread_lock=True, quiet=True, ssr_mode=False,
        css_paths=LOOK / "look.css", head_paths=LOOK / "look.html", theme=theme())
    return address


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.pair:
        need(args.pair)
    check_address(args.host, args.port)
    page = Page(Stage())
    address = serve(page, args.host, args.port)
    print(f"mlx_spec: {address}  (Ctrl-C ends it)", flush=True)
    page.stage.load(args.target or args.pair or best_pair(), args.draft)
    if not args.no_browser:
        webbrowser.open(address)
    try:
        page.blocks.block_thread()
    except (KeyboardInterrupt, OSError):
        pass


if __name__ == "__main__":
    try:
        main()
    except (SpecError, ValueError, OSError) as error:
        raise SystemExit(f"app.py: error: {' '.join(str(error).split())}")
