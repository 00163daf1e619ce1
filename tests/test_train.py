"""Training: what is learnt is what the engine then accepts, whatever was interrupted.

The target is tiny and sharp: an id has few likely successors, so that a draft can learn it in seconds.
"""

import json
import os
import signal
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
from helpers import decode, heads
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import mlx_spec
from mlx_spec.errors import SpecError
from mlx_spec.pairs import Pair
from mlx_spec.train import states as stored_states
from mlx_spec.train.batches import LENGTH_STEP, load, shuffled, split
from mlx_spec.train.loop import Schedule, Trainer
from mlx_spec.train.loss import loss, score
from mlx_spec.train.run import Recipe, train
from mlx_spec.train.states import Example, States, collect, make_card
from mlx_spec.train.students import KINDS, begun

QUICK = dict(epochs=3, batch_tokens=512, learning_rate=3e-3, warmup=10, every=20, judged_texts=16)
HOT = 16  # ids that occur


@lru_cache(maxsize=None)
def target():
    """A tiny llama that only ever says HOT different ids."""
    model = tiny.make("llama")
    weight = model.lm_head.weight
    model.lm_head.weight = mx.concatenate([weight[:HOT] * 1.5, mx.zeros_like(weight[HOT:]) - 0.0], axis=0)
    model.lm_head.weight[HOT:] = model.lm_head.weight[HOT:] - 1e-3
    return model


@lru_cache(maxsize=None)
def texts(count=240, length=40, seed=0):
    """What the target writes after three random ids; every second text greedily."""
    prompts = np.random.default_rng(seed).integers(0, HOT, (count, 3))
    cache, y, answers = make_prompt_cache(target()), mx.array(prompts), []
    heat = mx.array(np.where(np.arange(count) % 2 == 0, 1e-6, 0.5))[:, None]
    for key in mx.random.split(mx.random.key(seed), length):
        logits = target()(y, cache=cache)[:, -1, :HOT]
        y = mx.random.categorical(logits / heat, key=key)[:, None]
        answers.append(y)
    ids = np.array(mx.concatenate(answers, axis=1)).tolist()
    return tuple(Example(p, a, 0.0 if i % 2 == 0 else 0.5) for i, (p, a) in enumerate(zip(prompts.tolist(), ids)))


def stored(folder, examples=None, depths=(1,)):
    store = States(folder, make_card("tiny", depths, 64, "test"))
    collect(store, target(), depths, iter(texts() if examples is None else examples))
    return store


def student(seed=3):
    head = heads(target(), depths=(1,), vocab=200, seed=seed)
    head.ids = mx.arange(200, dtype=mx.int32)
    head.bind(target(), mx.float32)
    return head


def trainer(folder, store, head=None, resume=False, **changed):
    return Trainer(head or student(), store, Schedule(**QUICK | changed), folder, resume=resume)


def weights(student):
    return {k: np.array(v) for k, v in tree_flatten(student.trainable_parameters())}


def same(a, b):
    return all(np.array_equal(a[k], b[k]) for k in a.keys() | b.keys())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run = trainer(folder, stored(folder / "states"))
    before, seen = run.judge(), []
    return run, before, run.run(seen.append), seen


def test_loss_falls_and_acceptance_rises_on_held_out_text(trained):
    run, before, after, seen = trained
    assert seen[-1].loss < 0.7 * seen[0].loss
    assert (after.acceptance > before.acceptance + 0.15).all() and (after.sampled > before.sampled + 0.1).all()
    assert seen[-1].step == run.steps == len(seen) and seen[-1].left_s == 0


def test_the_engine_accepts_what_training_says(trained):
    """Every draft of a greedy reply, judged offline on the same text, stands or falls as in the engine."""
    run, expected, got = trained[0], [], []
    p = Pair(target(), run.student)
    for text in texts()[-24::2]:
        decoder, ids = decode(p, text.prompt, max_tokens=40, num_draft_tokens=3)
        assert ids == text.answer
        kept = _kept(run.student, text)
        assert sum(kept) <= decoder.stats.accepted <= sum(kept) + 3  # the last round may be shorter
        expected.append(sum(kept))
        got.append(decoder.stats.accepted)
    assert sum(got) > 60, (got, expected)


def _kept(student, text):
    """Drafts kept in each round of three, from the drafts that `unroll` makes at every row at once."""
    batch = load(*stored_batch(text))
    outs = student.unroll(batch.tokens, batch.states, 3)
    drafts = [student.ids[mx.argmax(student.logits(out[0], i), axis=-1)].tolist() for i, out in enumerate(outs)]
    at, whole, found = len(text.prompt) - 1, text.prompt + text.answer, []
    while at + 4 < len(whole):
        found.append(next((i for i in range(3) if drafts[i][at] != whole[at + 1 + i]), 3))
        at += found[-1] + 1
    return found


def stored_batch(example):
    found = stored_states._pass(stored_states.Inside(target(), (1,)), [example])[0]
    ids = np.array(example.prompt + example.answer, np.int32)
    return ids, found, np.array([[0, len(example.prompt), len(ids), 0]], np.int32)


def test_a_run_that_was_interrupted_ends_where_an_uninterrupted_one_does(tmp_path):
    """Ctrl-C between two checkpoints, and a kill, which loses what came after the last one."""
    store, settings = stored(tmp_path / "states", texts()[:60]), dict(epochs=2, every=4)
    whole = trainer(tmp_path / "whole", store, **settings)
    whole.run()

    def stop(at, error):
        def told(progress):
            if progress.step == at:
                raise error
        return told

    for name, at, error in (("ctrl-c", 6, KeyboardInterrupt), ("killed", 6, SystemExit)):
        cut = trainer(tmp_path / name, store, **settings)
        with pytest.raises(error):
            cut.run(stop(at, error))
        again = trainer(tmp_path / name, store, student(seed=8), resume=True, **settings)
        assert again.step == (6 if error is KeyboardInterrupt else 4)
        again.run()
        assert same(weights(again.student), weights(whole.student)), name
    with pytest.raises(SpecError, match="other settings or other text"):
        trainer(tmp_path / "killed", store, resume=True, **settings | {"learning_rate": 1e-4})


def test_the_same_seed_trains_the_same_draft(tmp_path):
    store, runs = stored(tmp_path / "states", texts()[:40]), []
    for seed in (0, 0, 1):
        run = trainer(tmp_path / str(len(runs)), store, epochs=1, seed=seed)
        run.run()
        runs.append(weights(run.student))
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2])


def test_states_are_what_the_target_says_and_survive_a_kill(tmp_path):
    examples = [Example(e.prompt, e.answer[: 5 + i % 7], e.temperature) for i, e in enumerate(texts()[:100])]
    store = stored(tmp_path / "a", examples[:64])
    for name, bytes_ in (("tokens", 8), ("states", 100), ("rows", 7)):  # a text that was being written
        with open(tmp_path / "a" / f"{name}.bin", "ab") as f:
            f.write(b"x" * bytes_)
    again = stored(tmp_path / "a", examples)
    whole = stored(tmp_path / "b", examples)
    for x, y in zip((again.rows, *again.open()), (whole.rows, *whole.open())):
        assert np.array_equal(x, y)
    tokens, held = whole.open()
    start, prompt, length, heat = whole.rows[70]
    assert tokens[start : start + length].tolist() == examples[70].prompt + examples[70].answer
    assert (prompt, heat) == (3, round(examples[70].temperature * 1000))
    logits = target()(mx.array(tokens[None, start : start + length].astype(np.int64)))
    final = mx.array(held[start : start + length, -1].astype(np.float32))
    assert mx.abs(target().lm_head(final) - logits[0]).max().item() < 2e-2 * mx.abs(logits).max().item()
    assert States(tmp_path / "b", make_card("other", (1,), 64, "test")).size == 0 != store.size


def test_batches_hold_every_text_once_an_epoch_and_little_padding():
    lengths = np.random.default_rng(0).integers(5, 300, 500)
    for epoch in (0, 1):
        batches = shuffled(lengths, 2048, 5, epoch)
        assert sorted(np.concatenate(batches)) == list(range(500))
        padded = sum(len(b) * -(-lengths[b].max() // LENGTH_STEP) * LENGTH_STEP for b in batches)
        assert padded < 1.25 * lengths.sum() and all(len(b) * lengths[b].max() <= 2048 for b in batches)
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(shuffled(lengths, 2048, 5, 0), batches))


def test_the_last_texts_are_never_learnt_from():
    rows = np.arange(400).reshape(100, 4)
    learnt, judged = split(rows, 0.05)
    assert len(learnt) == 95 and (judged == rows[95:]).all()


def test_the_gradient_that_is_said_outright_is_that_of_the_cross_entropy(tmp_path):
    store, head = stored(tmp_path, texts()[:4]), student()
    batch = load(*store.open(), store.rows)

    def plain_loss(params):
        head.update(params)
        total = 0.0
        for step, out in enumerate(head.unroll(batch.tokens, batch.states, 2)):
            rows = batch.rows(step)
            logits = head.logits(out.reshape(-1, 64)[mx.array(rows)])
            law = mx.softmax(head.shared.head(batch.states[-1].reshape(-1, 64)[mx.array(rows + step)]), axis=-1)
            total = total - 0.5 * (law * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(-1).mean()
        return total

    def ours(params):
        head.update(params)
        return loss(head, batch, [1.0, 1.0])

    params = head.trainable_parameters()
    (a, da), (b, db) = (mx.value_and_grad(f)(params) for f in (plain_loss, ours))
    assert abs(a.item() - b.item()) < 1e-4
    for (name, x), (_, y) in zip(tree_flatten(da), tree_flatten(db)):
        assert mx.abs(x - y).max().item() < 1e-4 * max(1, mx.abs(x).max().item()), name


def test_a_score_counts_drafts_only_where_the_earlier_ones_stood(tmp_path):
    """Against the drafts of every row, looked at one by one."""
    store, head = stored(tmp_path, texts()[:6]), student()
    batch = load(*store.open(), store.rows)
    found = score(head, batch, 3)
    best = lambda x: np.array(mx.argmax(x, axis=-1))  # noqa: E731
    drafts = [best(head.logits(out.reshape(-1, 64))).reshape(batch.tokens.shape) for out in head.unroll(batch.tokens, batch.states, 3)]
    theirs = best(target().lm_head(batch.states[-1]))
    reached, kept = np.zeros(3), np.zeros(3)
    for row, (prompt, length) in enumerate(zip(batch.prompt, batch.length)):
        for i in range(prompt - 1, length):
            for step in range(3):
                if i + step >= length:
                    break
                reached[step] += 1
                if drafts[step][row, i] != theirs[row, i + step]:
                    break
                kept[step] += 1
    assert (found.reached == reached).all() and (found.kept == kept).all() and 0 < kept[0] < reached[0]
    assert (0 <= found.sampled).all() and (found.sampled <= 1).all()


# the command, end to end


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("target"), model=target())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(json.dumps(e._asdict()) + "\n" for e in texts()))
    return path


def recipe(folder, data, out, kind="heads", **changed):
    facts = dict(tokens=9000, data=data, vocab=64, schedule=Schedule(**QUICK | dict(epochs=1, every=10)))
    return Recipe(str(folder), kind, out, **facts | changed)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_trained_saved_and_loaded_by_one_command(folder, data, tmp_path, kind):
    report = train(recipe(folder, data, tmp_path / "draft", kind))
    said = report.to_dict()
    assert said["judged_rows"] > 50 and len(said["v"]) == 8 and said["c"] > 0
    pair = mlx_spec.load(str(folder), draft=str(tmp_path / "draft"))
    prompt = texts()[-1].prompt
    drafted, plain = (mlx_spec.generate(pair, prompt, max_tokens=40, num_draft_tokens=k) for k in (3, 0))
    assert drafted.ids == plain.ids and drafted.stats.accepted > 0


def test_training_goes_on_from_what_is_there(folder, data, tmp_path):
    """A second run with --resume computes no states again and trains no step again."""
    train(recipe(folder, data, tmp_path))
    told = []
    train(recipe(folder, data, tmp_path, resume=True), told.append)
    assert not [stage for stage in told if stage.name in ("text", "train", "states")]
    card = json.loads((tmp_path / "work/states/card.json").read_text())
    assert card["texts"].endswith(", 9000, 512")  # as before there were other texts beside the data


def test_without_data_the_target_writes_its_own_text(tmp_path):
    """Magpie: the chat template as far as a user's turn, continued by the target."""
    chatty = tiny.write_folder(tmp_path / "target")
    stages = []
    facts = dict(tokens=1000, vocab=259, schedule=Schedule(**QUICK | dict(epochs=0.2)))
    try:
        train(Recipe(str(chatty), "heads", tmp_path / "out", **facts), stages.append)
    except SpecError as error:  # a random model may end no turn; that is said in one line
        assert "--data" in str(error)
    else:
        assert {stage.name for stage in stages} == {"text", "states", "train"}


def test_the_target_writes_beside_the_data(tmp_path, monkeypatch):
    """Both kinds of text are in the store, the data first."""
    folder = tiny.write_folder(tmp_path / "target", model=target())
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps(e._asdict()) + "\n" for e in texts()[:8]))
    own = [[i % 50 + 1 for i in range(n, n + 9)] for n in range(12)]
    monkeypatch.setattr("mlx_spec.train.text._turns", lambda pair, seed, seen: iter([own]))
    made = recipe(folder, data, tmp_path / "out", own=100)
    train(made)
    rows = np.fromfile(made.work / "states" / "rows.bin", np.int32).reshape(-1, 4)
    assert len(rows) == 8 + 12 and (rows[8:, 1] == 9).all()
    with pytest.raises(ValueError, match="own needs data"):
        recipe(folder, None, tmp_path / "out", own=100)


def test_a_draft_goes_on_from_an_earlier_one(folder, data, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    train(recipe(folder, data, first, bits=16))
    began = begun("heads", mlx_spec.load(str(folder), draft=False).target, first, ())
    saved = mlx_spec.load(str(folder), draft=str(first)).draft
    assert mx.allclose(began.fuse.weight, saved.fuse.weight.astype(mx.float32), atol=1e-3)
    again = train(recipe(folder, data, second, begin=first, schedule=Schedule(**QUICK | dict(epochs=0.01))))
    fresh = train(recipe(folder, data, tmp_path / "fresh", schedule=Schedule(**QUICK | dict(epochs=0.01))))
    assert again.score.acceptance[0] > fresh.score.acceptance[0] + 0.1
    with pytest.raises(SpecError, match="is not one of kind mlp"):
        train(recipe(folder, data, tmp_path / "other", "mlp", begin=first))


@pytest.mark.parametrize("changed, said", [
    (dict(kind="tail"), "kind must be one of"), (dict(tokens=3), "tokens must be"), (dict(vocab=1), "vocab must be"),
    (dict(layers=0), "layers must be"), (dict(bits=3), "bits must be"), (dict(max_length=2), "max_length must be"),
    (dict(schedule=Schedule(epochs=-1)), "epochs must be above 0"), (dict(data=Path("nowhere")), "nowhere does not exist"),
])
def test_a_wrong_option_is_one_line(tmp_path, changed, said):
    with pytest.raises(ValueError, match=said):
        Recipe(**dict(target="x", kind="heads", out=tmp_path) | changed)


def test_what_can_not_be_trained_is_one_line(folder, data, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for wrong, said in (
        (recipe(folder, empty, tmp_path / "a"), "no text"),
        (recipe(folder, data, tmp_path / "c", depths=(9,)), "depths must lie between"),
        (recipe(folder, data, tmp_path / "d", kind="draft", layers=7), "layers must be"),
    ):
        with pytest.raises(SpecError, match=said) as error:
            train(wrong)
        assert "\n" not in str(error.value)
    recurrent = tiny.write_folder(tmp_path / "mamba", "mamba2")
    with pytest.raises(SpecError, match="no draft can be trained for this target: layers with recurrent state"):
        train(recipe(recurrent, data, tmp_path / "e", kind="draft"))


def test_a_full_disk_is_one_line_and_what_was_written_stays(tmp_path, monkeypatch):
    store = stored(tmp_path / "states", texts()[:8])
    run = trainer(tmp_path / "run", store, epochs=1)
    run.checkpoint()
    before = (tmp_path / "run/checkpoint.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(SpecError, match="No space left on device.*--resume"):
        run.checkpoint()
    assert (tmp_path / "run/checkpoint.safetensors").read_bytes() == before
    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(SpecError, match="make room"):
        store.append(texts()[:1], [np.zeros((43, 2, 64), np.float16)])


def test_a_draft_cut_from_its_target_shares_its_embedding_and_head(folder, data, tmp_path):
    from mlx_lm import load as mlx_lm_load

    from mlx_spec.hidden import embedding, output

    train(recipe(folder, data, tmp_path / "draft", "draft"))
    pair = mlx_spec.load(str(folder), draft=str(tmp_path / "draft"))
    assert embedding(pair.draft)[1] is embedding(pair.target)[1] and output(pair.draft) is output(pair.target)
    alone, _ = mlx_lm_load(str(tmp_path / "draft"))  # and it runs without it
    assert alone(mx.array([[1, 2]])).shape == (1, 2, tiny.VOCAB)


def test_ctrl_c_inside_a_step_waits_for_its_end(tmp_path):
    store = stored(tmp_path / "states", texts()[:40])
    run, step = trainer(tmp_path / "run", store, epochs=1), Trainer._step

    def pressed_inside(self):
        os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    run._step = lambda: pressed_inside(run)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.step == 1 and trainer(tmp_path / "run", store, resume=True, epochs=1).step == 1
