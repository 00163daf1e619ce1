"""`mlx_spec chat` on a tiny pair: lines in, replies on stdout, figures and errors on stderr."""

import io
import signal
import sys

import pytest
import tiny
from helpers import drafts_pay

from mlx_spec import Chat, cli, generate
from mlx_spec.commands import chat as command
from mlx_spec.pairs import Pair


@pytest.fixture
def pair(monkeypatch):
    target = tiny.make("llama")
    made = Pair(target, tiny.noisy_copy(target), tiny.byte_tokenizer())
    monkeypatch.setattr(command, "load_pair", lambda args: made)
    drafts_pay(monkeypatch)
    return made


@pytest.fixture
def talk(pair, monkeypatch, capsys):
    """Runs `mlx_spec chat` on these lines; returns exit code, stdout and stderr."""

    def call(*lines, flags=("--max-tokens", "12")):
        data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = cli.main(["chat", *flags])
        return code, *capsys.readouterr()

    return call


def cold(pair, *said, max_tokens=12):
    """The text of a reply to turns by user and assistant in turn, read from the start."""
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said)]
    return generate(pair, messages, max_tokens=max_tokens).text


def printed(*replies):
    return "".join(reply if reply.endswith("\n") else reply + "\n" for reply in replies)


def test_replies_go_to_stdout_and_a_line_of_figures_to_stderr(talk, pair):
    code, out, err = talk("hello", "", "   ", "and then?")
    first = cold(pair, "hello")
    assert (code, out) == (0, printed(first, cold(pair, "hello", first, "and then?")))
    assert err.count("12 tokens, ") == 2 and err.count("accepted, ") == 2 and "end: length]" in err


def test_a_reply_can_be_had_anew_and_a_turn_said_differently(talk, pair):
    _, out, _ = talk("hello", "/retry", "/edit good bye", "/clear", "hello", "/quit now", "never said")
    hello = cold(pair, "hello")
    assert out == printed(hello, hello, cold(pair, "good bye"), hello)


def test_a_conversation_is_saved_and_goes_on_elsewhere(talk, pair, tmp_path):
    path = tmp_path / "talk.json"
    talk("hello", f"/save {path}")
    saved = Chat(pair)
    saved.load(path)
    _, out, _ = talk(f"/load {path}", "more")
    assert out == printed(cold(pair, "hello", saved.messages[1]["content"], "more"))


def test_what_is_wrong_is_one_line_and_the_talk_goes_on(talk, pair):
    code, out, err = talk("/retry", "/save", "/load no-such-file", "/shout", "/edit x", "/help", "hello")
    assert code == 0 and out == printed(cold(pair, "hello")) and err.count("mlx_spec: error: ") == 5
    for words in ("no turn to retry", "a file's name", "no-such-file can't be read", "no such command: /shout", "0 user turns", "/quit"):
        assert words in err


def test_a_line_may_go_on_in_the_next_and_need_not_be_a_command(talk, pair):
    _, out, _ = talk("a\\", "b", "/clear", " /clear means what?")
    assert out == printed(cold(pair, "a\nb"), cold(pair, "/clear means what?"))


def test_whatever_a_pipe_carries_is_read(talk, pair):
    """A67."""
    _, out, _ = talk(b"ok \x9d done")
    assert out == printed(cold(pair, "ok \ufffd done"))


def test_ctrl_c_ends_the_reply_keeps_it_and_not_the_talk(talk, pair, tmp_path, monkeypatch):
    """A76: the next turn builds on what there was."""
    calls, handled = [], signal.getsignal(signal.SIGINT)

    def show(text, shown=command.show):
        calls.append(text)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        shown(text)

    monkeypatch.setattr(command, "show", show)
    code, out, err = talk("hello", f"/save {tmp_path / 'a'}", "go on", flags=("--max-tokens", "30"))
    saved = Chat(pair)
    saved.load(tmp_path / "a")
    partial = saved.messages[1]["content"]
    assert code == 0 and "end: cancelled]" in err and cold(pair, "hello", max_tokens=30).startswith(partial)
    assert out == printed(partial, cold(pair, "hello", partial, "go on", max_tokens=30))
    assert signal.getsignal(signal.SIGINT) is handled


def test_ctrl_c_at_the_prompt_says_how_to_leave(talk, monkeypatch):
    answers = iter([KeyboardInterrupt, EOFError])

    def ask(_):
        raise next(answers)

    monkeypatch.setattr("builtins.input", ask)
    code, out, err = talk()
    assert (code, out) == (0, "") and "Ctrl-D or /quit leaves" in err


def test_a_note_is_told_once(talk, pair):
    pair.notes = ("draft off: none was given",)
    _, _, err = talk("hello", "more")
    assert err.count("note: draft off: none was given") == 1
