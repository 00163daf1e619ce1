"""The command line on tiny models: what goes to stdout, what to stderr, and the exit codes.

Offline, with a home and caches of their own. Commands run in this process where they can.
"""

import dataclasses
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import tiny

import mlx_spec
from mlx_spec import cli, engine, hub, names
from mlx_spec.commands import arguments, generate
from mlx_spec.errors import DownloadError

TEXT = "The quick brown fox"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name, value in {"HOME": tmp_path, "HF_HOME": tmp_path / "hf", "MLX_SPEC_CACHE": tmp_path / "cache",
                        "HF_HUB_OFFLINE": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would hide a missing flush
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft that agrees in part; neither ends a reply by itself."""
    folder = tmp_path_factory.mktemp("models")
    target = endless(tiny.make("llama"))
    tiny.write_folder(folder / "target", model=target)
    tiny.write_folder(folder / "draft", model=tiny.noisy_copy(target))
    tiny.write_folder(folder / "bare", model=target, chat_template=None)
    return folder


def endless(model):
    """The model with logits of 0 for its special tokens: they never win."""
    head = model.lm_head.weight
    model.lm_head.weight = mx.concatenate([head[:256], mx.zeros_like(head[256:])])
    mx.eval(model)
    return model


@pytest.fixture
def run(folders, capsys):
    """Runs `mlx_spec generate` on the tiny pair; returns exit code, stdout and stderr."""

    def call(*arguments, target="target", draft="draft", prompt=TEXT):
        models = ["--target", str(folders / target), *(["--draft-model", str(folders / draft)] if draft else [])]
        capsys.readouterr()
        code = cli.main(["generate", *models, "--prompt", prompt, *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def library(folders, prompt=TEXT, template=True, **options):
    pair = mlx_spec.load(folders / "target", folders / "draft")
    return mlx_spec.generate(pair, [{"role": "user", "content": prompt}] if template else prompt, **options)


def process(*arguments, **options):
    command = [sys.executable, "-m", "mlx_spec", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def one_line(err: str) -> str:
    assert err.startswith("mlx_spec: error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


# --- starting


def test_help_imports_nothing_heavy():
    code = ("import sys\nfrom mlx_spec.cli import main\n"
            "try: main(['generate', '--help'])\n"
            "except SystemExit: pass\n"
            "print([m for m in ('mlx', 'mlx.core', 'mlx_lm', 'numpy', 'transformers', 'huggingface_hub') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("usage: mlx_spec generate") and out.endswith("\n[]\n")


def test_the_module_runs_as_the_command():
    with process("--version") as p:
        assert p.communicate() == (f"mlx_spec {mlx_spec.__version__}\n".encode(), b"") and p.returncode == 0


@pytest.mark.parametrize("line", [
    [], ["generate"], ["generate", "--prompt"], ["nonsense"], ["pull"], ["generate", "--prompt", "a", "--max-tokens", "x"],
    ["generate", "--prompt", "a", "--verify", "maybe"], ["generate", "--prompt", "a", "--pair", "demo", "--target", "b"],
    ["generate", "--prompt", "a", "--max", "3"],
])
def test_a_wrong_command_line_exits_with_2(line, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(line)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and err.startswith("usage: mlx_spec")


# --- a reply


def test_text_goes_to_stdout_and_statistics_to_stderr(run, folders):
    code, out, err = run("--max-tokens", 30, "--num-draft-tokens", 4)
    expected = library(folders, max_tokens=30, num_draft_tokens=4)
    assert (code, out) == (0, expected.text + "\n")
    s = expected.stats
    for line in (f"prompt:      {s.prompt_tokens} tokens, ", "generation:  30 tokens, ", "end: length\n", "peak memory: ",
                 f"acceptance:  {s.accepted} of {s.drafted} drafted ({s.acceptance_rate:.0%}), {s.tokens_per_round:.2f} tokens",
                 "mode:        speculative, seed "):
        assert line in err, line


def test_text_is_written_as_it_is_made(run, monkeypatch):
    written, shown, real = [], [], engine.Decoder.chunks

    def chunks(self):
        for chunk in real(self):
            yield chunk
            shown.append(chunk.text)
            assert "".join(written) == "".join(shown)

    monkeypatch.setattr(engine.Decoder, "chunks", chunks)
    monkeypatch.setattr(generate, "show", written.append)
    assert run("--max-tokens", 20)[0] == 0 and len(shown) > 4


@pytest.mark.parametrize("options", [
    dict(max_tokens=60),
    dict(max_tokens=60, num_draft_tokens=3, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=7),
    dict(max_tokens=60, num_draft_tokens=3, temperature=0.8, seed=7, verify="token"),
    dict(max_tokens=60, num_draft_tokens=2, temperature=0.8, seed=2**64 - 1, verify="match"),
    dict(max_tokens=40, num_draft_tokens=0),
    dict(max_tokens=40, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.2),
    dict(max_tokens=40, prefill_step_size=4, max_kv_size=16),
    dict(max_tokens=40, kv_bits=8, kv_group_size=32, quantized_kv_start=30),
], ids=str)
def test_the_library_and_the_command_give_the_same_ids_and_counts(run, folders, options):
    """A13"""
    flags = [f"--{name.replace('_', '-')}={value}".replace("--temperature", "--temp") for name, value in options.items()]
    code, out, err = run("--json", "--reproducible", *flags, prompt="Repeat: a red hen. A red hen.")
    record, expected = json.loads(out), library(folders, "Repeat: a red hen. A red hen.", reproducible=True, **options)
    assert code == 0 and err == ""
    assert [t["id"] for t in record["tokens"]] == expected.ids and len(expected.ids) == options["max_tokens"]
    for name in ("drafted", "accepted", "rounds", "accepted_by_position", "generation_tokens", "prompt_tokens"):
        assert record["stats"][name] == getattr(expected.stats, name), name


VALUES = dict(
    max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=5, num_draft_tokens=2, verify="token", stop=("a", "b"),
    repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=-0.5, prefill_step_size=64, kv_bits=4,
    kv_group_size=32, quantized_kv_start=9, max_kv_size=512, task="code", reproducible=True,
)
PYTHON_ONLY = {"logits_processors", "logit_bias", "should_cancel", "on_progress", "repetition_context_size",
               "presence_context_size", "frequency_context_size"}


def options_of(flags):
    return mlx_spec.Options(**arguments.read_options(cli._parser().parse_args(["generate", "--prompt", "a", *flags])))


def test_every_option_that_is_not_pythons_alone_has_a_flag():
    assert VALUES.keys() == {f.name for f in dataclasses.fields(mlx_spec.Options)} - PYTHON_ONLY
    assert options_of([]) == mlx_spec.Options()
    for name, value in VALUES.items():
        flag = "--temp" if name == "temperature" else f"--{name.replace('_', '-')}"
        many = value if isinstance(value, tuple) else (value,)
        assert options_of([flag if one is True else f"{flag}={one}" for one in many]) == mlx_spec.Options(**{name: value})


def test_what_is_said_of_the_models_reaches_the_loader(monkeypatch, capsys):
    def load(*arguments, **options):
        calls.append((*arguments, options))
        raise DownloadError("not today")

    calls = []
    monkeypatch.setattr("mlx_spec.pairs.load", load)
    for line in ("", "--pair qwen3-4b", "--model a --draft b --adapter-path c --draft-adapter-path d --revision e"
                 " --draft-revision f --trust-remote-code --draft-optional", "--pair qwen3-4b --draft-model b"):
        assert cli.main(["generate", "--prompt", "a", *line.split()]) == 1
    nothing = dict(adapter_path=None, draft_adapter_path=None, revision=None, draft_revision=None,
                   trust_remote_code=False, draft_required=True)
    everything = dict(adapter_path="c", draft_adapter_path="d", revision="e", draft_revision="f",
                      trust_remote_code=True, draft_required=False)
    assert calls == [("demo", None, nothing), ("qwen3-4b", None, nothing), ("a", "b", everything), ("qwen3-4b", "b", nothing)]


def test_json_is_one_record_and_nothing_else(run, folders):
    code, out, err = run("--json", "--max-tokens", 5, "--seed", 3)
    record = json.loads(out)
    expected = library(folders, max_tokens=5, seed=3).to_dict()
    assert code == 0 and err == "" and out.count("\n") == 1
    assert record.keys() == expected.keys() and record["stats"].keys() == expected["stats"].keys()
    assert (record["text"], record["tokens"][0]["id"], record["seed"]) == (
        expected["text"], expected["tokens"][0]["id"], 3)


def test_the_chat_template_is_used_unless_told_otherwise(run, folders):
    lengths = [json.loads(run("--json", "--max-tokens", 1, *flags)[1])["stats"]["prompt_tokens"]
               for flags in ([], ["--system-prompt", "Be brief"], ["--ignore-chat-template"])]
    turn = len("<user\n" + TEXT + "<\n")  # a special token is one id
    assert lengths == [turn + len("<assistant\n"), len("<system\nBe brief<\n") + turn + len("<assistant\n"), len(TEXT)]


def test_a_system_prompt_without_a_chat_template_is_refused_not_dropped(run):
    code, out, err = run("--ignore-chat-template", "--system-prompt", "Be brief")
    assert (code, out) == (1, "") and "--system-prompt needs the chat template" in err


def test_a_model_without_a_chat_template_is_given_plain_text_and_a_note(run):
    code, out, err = run("--max-tokens", 3, target="bare")
    assert code == 0 and "note:        plain-text mode" in err


def test_stop_strings_can_be_given_more_than_once(run):
    _, out, _ = run("--max-tokens", 40)
    first, second = out[10:12], out[5:7]
    assert out.index(second) < out.index(first)
    code, cut, err = run("--max-tokens", 40, "--stop", first, "--stop", second)
    assert (code, cut) == (0, out[: out.index(second)] + "\n") and "end: stop_string" in err


def test_no_tokens_asked_for_is_an_empty_reply(run):
    """A39"""
    code, out, err = run("--max-tokens", 0)
    assert (code, out) == (0, "\n") and "generation:  0 tokens" in err and "n/a (nothing was drafted)" in err
    code, out, _ = run("--max-tokens", 0, "--json")
    assert code == 0 and (json.loads(out)["tokens"], json.loads(out)["finish_reason"]) == ([], "length")


@pytest.mark.parametrize("prompt", ["", "   "])
@pytest.mark.parametrize("flags", [[], ["--ignore-chat-template"]], ids=["chat", "plain"])
def test_an_empty_prompt_is_answered_like_the_librarys(run, folders, prompt, flags):
    """A64"""
    code, out, _ = run("--max-tokens", 8, *flags, prompt=prompt)
    assert (code, out) == (0, library(folders, prompt, template=not flags, max_tokens=8).text + "\n")


# --- stdin and odd text


def stdin(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_a_dash_reads_the_prompt_from_stdin(run, monkeypatch):
    _, expected, _ = run("--max-tokens", 12)
    stdin(monkeypatch, TEXT.encode())
    assert run("--max-tokens", 12, prompt="-")[:2] == (0, expected)


@pytest.mark.parametrize("data", [
    "ok \udc9d done".encode("utf-8", "surrogatepass"), b"\x93curly\x94", "half \ud83d".encode("utf-16-le", "surrogatepass"),
    b"a\0b", b"a" * 10_000, "שלום עולם".encode(), "😀🎉".encode(), b"\xff",
], ids=["surrogate", "cp1252", "utf16", "nul", "long", "rtl", "emoji", "lone-byte"])
def test_whatever_a_pipe_carries_is_read(run, monkeypatch, data):
    """A67"""
    stdin(monkeypatch, data)
    code, out, err = run("--max-tokens", 4, "--json", prompt="-")
    assert code == 0 and err == "" and len(json.loads(out)["tokens"]) == 4


def test_half_a_character_on_the_command_line_is_read(run):
    """A67: Python hands the bytes of an argument that are not UTF-8 on as lone surrogates."""
    assert run("--max-tokens", 4, prompt="ok \udc9d done")[0] == 0


def test_a_terminal_that_lacks_a_character_gets_a_question_mark(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    generate.show("caf\u00e9 \U0001f600!")
    assert buffer.getvalue() == b"caf? ?!"


# --- errors: one line, exit code 1


@pytest.mark.parametrize("flags, words", [
    (["--temp", -1], "temperature must be a number from 0; got -1"),
    (["--temp", "nan"], "temperature must be"),
    (["--top-p", 2], "top_p must be a number from 0 to 1"),
    (["--max-tokens", -2], "max_tokens must be"),
    (["--num-draft-tokens", 65], "num_draft_tokens must be a whole number from 0 to 64"),
    (["--seed", -1], "seed must be"),
    (["--stop", ""], "stop must be"),
    (["--kv-bits", 7], "kv_bits must be one of"),
    (["--kv-bits", 8, "--max-kv-size", 64], "max_kv_size must be None when kv_bits is given"),
    (["--top-k", 100_000], "top_k must be 0 (off) to 258"),
])
def test_a_wrong_value_is_one_line_that_says_the_range(run, flags, words):
    code, out, err = run(*flags)
    assert (code, out) == (1, "") and words in one_line(err)


def test_a_wrong_value_is_found_before_anything_is_loaded(capsys):
    assert cli.main(["generate", "--prompt", "a", "--target", "owner/none", "--temp", "-1"]) == 1
    assert "temperature" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("target, words", [
    ("./models/qwn", "no such folder"), ("~/models/x", "no such folder"), ("none/at/all.gguf", "no such file"),
    ("file.txt", "is a file, not an MLX model folder"), ("empty/", "no config.json"), ("", " name is empty"),
    ("nonsense", "is no pair, folder or hub name"), ("owner/name", "HF_HUB_OFFLINE is set"),
])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_path_that_is_no_model_is_said_in_one_line(run, tmp_path, monkeypatch, target, words, role):
    """A96"""
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("hello")
    Path("empty").mkdir()
    code, out, err = run(f"--{role}", target)
    assert (code, out) == (1, "") and words in one_line(err)
    assert role == "target" or "draft" in err


@pytest.mark.parametrize("reason", ["gated: accept its licence", "no repository", "the hub refused your token"])
@pytest.mark.parametrize("role", ["--target", "--draft-model"])
def test_a_refusal_of_the_hub_is_one_line(run, monkeypatch, reason, role):
    """A95; that the three are told apart is shown where downloads are tested."""
    def refuse(repo, *_):
        raise DownloadError(f"{repo}: {reason}")

    monkeypatch.setattr(names, "download_repo", refuse)
    code, out, err = run(role, "owner/name")
    assert (code, out) == (1, "") and reason in one_line(err)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_unknown_architecture_is_one_line(run, folders, tmp_path, role):
    """A99"""
    strange = broken(folders / "draft", tmp_path, model_type="zzz")
    code, out, err = run(**{role: strange})
    assert (code, out) == (1, "") and "model type 'zzz' is not supported by mlx-lm" in one_line(err)


def broken(folder, tmp_path, **changes) -> Path:
    copy = shutil.copytree(folder, tmp_path / "broken")
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return copy


def without_weights(folder, tmp_path) -> Path:
    copy = shutil.copytree(folder, tmp_path / "weightless")
    (copy / "model.safetensors").unlink()
    return copy


def other_tokenizer(folder, tmp_path) -> Path:
    copy = shutil.copytree(folder, tmp_path / "other")
    state = json.loads((copy / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (copy / "tokenizer.json").write_text(json.dumps(state))
    return copy


@pytest.mark.parametrize("spoil, reason", [
    (without_weights, "the weights are missing"), (other_tokenizer, "the draft has another tokenizer: id "),
])
def test_a_draft_that_fails_ends_the_command_unless_it_is_optional(run, folders, tmp_path, spoil, reason):
    """A05"""
    draft = spoil(folders / "draft", tmp_path)
    code, out, err = run("--max-tokens", 9, draft=draft)
    assert (code, out) == (1, "") and reason in one_line(err) and "draft" in err
    _, plain, _ = run("--max-tokens", 9, draft=None)
    code, out, err = run("--max-tokens", 9, "--draft-optional", draft=draft)
    assert (code, out) == (0, plain) and "note:        draft off: " in err and reason in err
    assert "(no draft)" in err


def test_without_draft_tokens_the_draft_is_not_loaded(run, folders, tmp_path):
    code, out, err = run("--num-draft-tokens", 0, "--max-tokens", 5, draft=without_weights(folders / "draft", tmp_path))
    assert code == 0 and "mode:        plain (" in err


def test_an_unknown_pair_is_answered_with_the_names_there_are(capsys):
    assert cli.main(["generate", "--pair", "nonsense", "--prompt", "a"]) == 1
    assert "pairs are: demo, " in one_line(capsys.readouterr().err)


def test_without_a_target_the_demo_pair_is_meant(monkeypatch, capsys):
    assert cli.main(["generate", "--prompt", "a"]) == 1
    assert "SmolLM2-135M-Instruct is not on this machine" in one_line(capsys.readouterr().err)


# --- Ctrl-C and closed pipes


def interrupt_after(monkeypatch, rounds: int) -> None:
    real = engine.Decoder.chunks

    def chunks(self):
        for n, chunk in enumerate(real(self), start=1):
            yield chunk
            if n == rounds:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine.Decoder, "chunks", chunks)


def test_ctrl_c_keeps_what_there_is_and_says_what_was_made(folders):
    """A76: a process, a real signal, a reply without an end."""
    with process("generate", "--target", folders / "target", "--draft", folders / "draft", "--prompt", TEXT,
                 "--max-tokens", "-1") as p:
        first = p.stdout.read(1)
        p.send_signal(signal.SIGINT)
        rest, err = p.communicate(timeout=120)
    assert p.returncode == 130 and len(first + rest) > 1 and rest.endswith(b"\n")
    assert b"end: cancelled" in err and b"acceptance:  " in err and b"Traceback" not in err


def test_ctrl_c_leaves_the_same_beginning_and_ctrl_c_as_it_was(run, monkeypatch):
    _, whole, _ = run("--max-tokens", 60)
    interrupt_after(monkeypatch, rounds=3)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run("--max-tokens", 60)
    assert code == 130 and whole.startswith(out[:-1].rstrip("\ufffd")) and 3 <= len(out) < len(whole)
    assert "end: cancelled" in err and signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_with_json_prints_the_record_of_what_was_made(run, monkeypatch):
    interrupt_after(monkeypatch, rounds=3)
    code, out, err = run("--max-tokens", 60, "--json")
    record = json.loads(out)
    assert (code, err, record["finish_reason"]) == (130, "", "cancelled")
    assert 3 <= len(record["tokens"]) == record["stats"]["generation_tokens"] < 60 and record["stats"]["rounds"] == 3


@pytest.mark.parametrize("closed, message", [
    ("-p - <&-", b"stdin is closed"), ("-p a > /dev/full", b"No space left"), ("-p a >&-", None)])
def test_streams_that_are_closed_or_full_are_one_line(folders, closed, message):
    command = f"{sys.executable} -m mlx_spec generate --target {folders / 'target'} -m 5 {closed}"
    p = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert b"Traceback" not in p.stderr
    assert p.returncode == (0 if message is None else 1)
    if message:
        assert message in p.stderr


def test_a_second_ctrl_c_ends_the_process_at_once(folders):
    """The engine hangs here, so only the second can end it."""
    code = ("import sys, time\nfrom mlx_spec import cli, engine\n"
            "def stuck(self):\n"
            "    print('stuck', flush=True)\n"
            "    time.sleep(1)\n"  # the first Ctrl-C does not end a sleep
            "    print('asked', self.options.should_cancel(), flush=True)\n"
            "    time.sleep(60)\n"
            "    yield\n"
            "engine.Decoder.chunks = stuck\n"
            "cli.main(sys.argv[1:])")
    command = [sys.executable, "-c", code, "generate", "--target", str(folders / "target"), "--prompt", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout.readline() == b"stuck\n"
        p.send_signal(signal.SIGINT)
        assert p.stdout.readline() == b"asked True\n"
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=120)
    assert p.returncode == 130 and b"Traceback" not in err


def test_a_reply_without_a_token_has_no_first_one():
    from mlx_spec.types import Result, Stats

    said = generate._report(Result("", (), "cancelled", Stats(prompt_tokens=9, prompt_s=0.1, generation_s=0.1, ttft_s=0.2), 1))
    assert "generation:  0 tokens, n/a, end: cancelled" in said and "90.0 tokens/s" in said


def test_ctrl_c_while_loading_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(names, "locate", interrupted)
    monkeypatch.setattr("mlx_spec.pairs.locate", interrupted)
    assert cli.main(["generate", "--target", "x/y", "--prompt", "a"]) == 130
    assert capsys.readouterr().err == "mlx_spec: interrupted\n"


def test_a_reader_that_leaves_is_no_error(folders):
    with process("generate", "--target", folders / "target", "--prompt", TEXT, "--max-tokens", "-1") as p:
        p.stdout.read(1)
        p.stdout.close()
        err = p.stderr.read()
        code = p.wait(timeout=120)
    assert (code, err) == (141, b"")


# --- pairs and pull


def test_pairs_is_a_table_of_the_catalogue(capsys):
    assert cli.main(["pairs"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "target", "size", "draft", "size", "memory", "here", "licence"]
    assert [row.split()[0] for row in rows] == [entry.name for entry in mlx_spec.catalogue()]
    qwen = next(row for row in rows if row.startswith("qwen3-8b"))
    for cell in ("mlx-community/Qwen3-8B-4bit", "4.6 GB", "mlx-community/Qwen3-0.6B-4bit", "350.0 MB", "7.0 GB", " no ", "Apache-2.0"):
        assert cell in qwen


def test_pairs_says_which_are_on_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(names, "cached_repo", lambda repo, revision=None: Path("/") if "Qwen3" in repo else None)
    cli.main(["pairs", "--json"])
    here = {record["name"]: record["on_disk"] for record in json.loads(capsys.readouterr().out)}
    assert here == {name: name.startswith("qwen3") for name in here} and here["qwen3-4b"]


def test_pairs_as_json_has_sizes_in_bytes(capsys):
    assert cli.main(["pairs", "--json"]) == 0
    records = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    entry = names.find("qwen3-8b")
    assert records["qwen3-8b"] == dict(
        name="qwen3-8b", target=entry.target, draft=entry.draft, target_bytes=entry.target_bytes, on_disk=False,
        draft_bytes=entry.draft_bytes, memory_bytes=entry.memory_bytes, licence=entry.licence, note=entry.note)


def test_pull_says_the_size_first_and_the_folders_on_stdout(monkeypatch, capsys, tmp_path):
    def download(repo, *_):
        print("progress", file=sys.stderr)
        return tmp_path / repo

    monkeypatch.setattr(names, "download_repo", download)
    assert cli.main(["pull", "qwen3-8b"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == [str(tmp_path / f"mlx-community/Qwen3-{size}-4bit") for size in ("8B", "0.6B")]
    assert err.splitlines() == ["qwen3-8b: 5.0 GB, Apache-2.0; running it takes about 7.0 GB of memory", "progress", "progress"]


def test_a_pull_that_fails_is_one_line(capsys):
    assert cli.main(["pull", "owner/name"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "HF_HUB_OFFLINE" in one_line(err)
