"""Penalties, biases and processors: the same tokens as plain decoding, drafts or not."""

import json

import mlx.core as mx
import numpy as np
import pytest
import tiny
from helpers import Counting, decode, pair, plain, text_pair
from mlx_lm.sample_utils import make_logits_processors

import mlx_spec

LOOP = list(b"la la la la")
KS = [0, 1, 2, 4, 8]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("prompt", [LOOP[:1], LOOP, LOOP * 4])
@pytest.mark.parametrize("penalties", [
    dict(repetition_penalty=1.3), dict(presence_penalty=0.8), dict(frequency_penalty=0.8),
    dict(repetition_penalty=1.3, repetition_context_size=7, frequency_penalty=0.5, frequency_context_size=40,
         presence_penalty=0.2, logit_bias={5: 3.0, 9: -4.0}),
])
def test_penalties_give_mlx_lms_tokens(penalties, prompt, k):
    """A40, A42: in the graph, for every row, on the history and the drafts before that row; prompts
    shorter than the penalties' context too, where there is less to look at."""
    p = pair()
    expected = plain(p.target, prompt, 60, logits_processors=make_logits_processors(**penalties))
    assert decode(p, prompt, max_tokens=60, num_draft_tokens=k, **penalties)[1] == expected
    assert expected != plain(p.target, prompt, 60)


class Recorder:
    """Keeps what it was shown, as a processor with state does."""

    def __init__(self, processor=lambda tokens, logits: logits):
        self.seen, self.processor = [], processor

    def __call__(self, tokens, logits):
        self.seen.append(tokens.tolist())
        return self.processor(tokens, logits)


@pytest.mark.parametrize("k", KS)
def test_a_processor_sees_the_whole_prompt_and_every_kept_token_once(k):
    """A41: also over two prefill chunks; rejected drafts are never shown."""
    recorder = Recorder()
    _, ids = decode(pair(), [2, 5, 7, 9], max_tokens=12, num_draft_tokens=k, prefill_step_size=2, logits_processors=[recorder])
    text = [2, 5, 7, 9, *ids]
    assert recorder.seen[:12] == [text[: 4 + i] for i in range(12)]


@pytest.mark.parametrize("k", [2, 8, 48])
def test_a_processor_with_state_counts_emitted_tokens_only(k):
    """A42."""
    p, ours = pair(), Counting()
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=30, num_draft_tokens=k, logits_processors=[ours])
    assert ids == plain(p.target, tiny.PROMPT, 30, logits_processors=[Counting()])
    counted = [i for i, n in ours.counts.items() for _ in range(n)]
    assert sorted(counted) == sorted(ids[:-1])  # the last token is not followed by a call
    assert "position by position" in decoder.stats.mode


def test_penalties_work_beside_a_processor_with_state():
    """A40: neither switches the other off."""
    p, penalties = pair(), dict(repetition_penalty=1.3, logit_bias={5: 3.0})
    ours = decode(p, LOOP, max_tokens=40, num_draft_tokens=3, logits_processors=[Counting()], **penalties)[1]
    theirs = plain(p.target, LOOP, 40, logits_processors=[*make_logits_processors(**penalties), Counting()])
    assert ours == theirs != plain(p.target, LOOP, 40, logits_processors=[Counting()])


@pytest.mark.parametrize("verify", ["token", "block", "match"])
def test_a_processor_with_state_keeps_the_law_at_a_temperature(verify):
    """The control is the same processor, marked as pure: one seed under match gives one text."""
    p = pair()
    def halve(tokens, logits):
        return logits * 0.5

    runs = {}
    for name, processor in (("state", Recorder(halve)), ("pure", mlx_spec.pure(lambda t, x: halve(t, x)))):
        decoder, ids = decode(p, tiny.PROMPT, max_tokens=40, num_draft_tokens=3, temperature=0.7, seed=5,
                              verify=verify, logits_processors=[processor])
        runs[name] = ids
        assert decoder.stats.accepted > 0
    plain_ids = decode(p, tiny.PROMPT, max_tokens=40, num_draft_tokens=0, temperature=0.7, seed=5,
                       logits_processors=[Recorder(halve)])[1]
    if verify == "match":
        assert runs["state"] == runs["pure"] == plain_ids


@pytest.mark.parametrize("k", [0, 4])
def test_a_pure_processor_runs_in_the_round(k, monkeypatch):
    """One submission and one read; nothing runs ahead, because it wants the exact history."""
    seen = []

    @mlx_spec.pure
    def discourage_newest(tokens, logits):
        seen.append(tokens.shape[0])
        return logits.at[:, tokens[-1:]].add(-3.0)

    p = pair()
    expected = plain(p.target, tiny.PROMPT, 40, logits_processors=[discourage_newest])
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=40, num_draft_tokens=k, logits_processors=[discourage_newest])
    assert ids == expected
    assert decoder.stats.mode == ("speculative" if k else "plain (no draft tokens asked for)")


@pytest.mark.parametrize("options", [dict(), dict(temperature=1.0, seed=3)])
def test_a_banned_token_is_never_emitted_though_the_prompt_is_full_of_it(options):
    """A43: nor drafted and accepted."""
    banned = tiny.PROMPT[2]
    _, ids = decode(pair(draft="same"), [banned] * 30, max_tokens=200, num_draft_tokens=3,
                    logit_bias={banned: float("-inf")}, **options)
    assert banned not in ids


class Grammar:
    """Lets through only {"name": "<letters>", "age": <digits>}, byte by byte, keeping its position."""

    def __init__(self, start):
        self.read, self.state, self.count = start, 0, 0

    def allowed(self):
        head, middle = b'{"name": "', b'", "age": '
        if self.state < len(head):
            return [head[self.state]]
        if self.state == len(head):
            return ([*range(97, 123)] if self.count < 8 else []) + ([middle[0]] if self.count else [])
        if self.state < len(head) + len(middle):
            return [middle[self.state - len(head)]]
        if self.state == len(head) + len(middle):
            return ([*range(49, 58)] if self.count < 3 else []) + ([ord("}")] if self.count else [])
        return [tiny.EOS]

    def advance(self, byte):
        letters = self.state == 10 and 97 <= byte < 123
        digits = self.state == 20 and 49 <= byte < 58
        self.count = self.count + 1 if letters or digits else 0
        self.state += not (letters or digits)

    def __call__(self, tokens, logits):
        for byte in tokens[self.read :].tolist():
            assert byte in self.allowed(), "a rejected draft reached the grammar"
            self.advance(byte)
        self.read = tokens.shape[0]
        mask = np.full(logits.shape, -np.inf, np.float32)
        mask[0, self.allowed()] = 0
        return logits + mx.array(mask)


@pytest.mark.parametrize("k", [0, 2, 4])
@pytest.mark.parametrize("options", [dict(), dict(temperature=1.0, verify="token"), dict(temperature=1.0, verify="match")])
def test_a_grammar_with_drafts_gives_valid_json_every_time(options, k):
    """A44, A45: one grammar object keeps one position."""
    texts = set()
    for seed in range(4):
        grammar = Grammar(len(tiny.PROMPT))
        result = mlx_spec.generate(text_pair(), tiny.PROMPT, max_tokens=60, num_draft_tokens=k, seed=seed,
                                   logits_processors=[grammar], **options)
        record = json.loads(result.text)
        assert record["name"].isalpha() and isinstance(record["age"], int) and result.finish_reason == "stop"
        texts.add(result.text)
    if not options:
        reference = mlx_spec.generate(text_pair(), tiny.PROMPT, max_tokens=60, num_draft_tokens=0,
                                      logits_processors=[Grammar(len(tiny.PROMPT))])
        assert texts == {reference.text}


@pytest.mark.parametrize("mark", [mlx_spec.pure, lambda f: f])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_processor_may_answer_in_half_precision(dtype, k, mark):
    p = pair()
    processor = mark(lambda tokens, logits: logits.astype(dtype))
    expected = plain(p.target, tiny.PROMPT, 12, logits_processors=[processor])
    assert decode(p, tiny.PROMPT, max_tokens=12, num_draft_tokens=k, logits_processors=[processor])[1] == expected


@pytest.mark.parametrize("wrong", [None, np.zeros((1, tiny.VOCAB)), mx.zeros((tiny.VOCAB,))])
def test_a_processor_that_returns_something_else_is_told_what_to_return(wrong):
    with pytest.raises(ValueError, match="must return an mx.array of shape .1, 259."):
        decode(pair(), tiny.PROMPT, logits_processors=[lambda tokens, logits: wrong])


def test_a_processor_that_fails_stops_the_request_and_leaves_the_engine_free():
    """A45: an error of its own, not unconstrained text; the next request works."""
    def broken(tokens, logits):
        raise RuntimeError("bad schema")

    with pytest.raises(RuntimeError, match="bad schema"):
        mlx_spec.generate(text_pair(), tiny.PROMPT, logits_processors=[broken])
    assert len(mlx_spec.generate(text_pair(), tiny.PROMPT, max_tokens=5).tokens) == 5
