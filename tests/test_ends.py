"""Where a reply ends: end tokens, stop strings, budgets, half characters; and what is counted."""

import math

import mlx.core as mx
import pytest
import tiny
from helpers import decode, pair, plain, text_pair

import mlx_spec
from mlx_spec.emit import Emitter
from mlx_spec.pairs import Pair
from mlx_spec.types import Stats, Token

KS = [0, 1, 4, 8]


def script(text, draft=None, end=None):
    """A pair whose target writes `text` (bytes) after a prompt of one token, then the end token.

    draft: what the draft writes instead; by default the same, so that blocks are accepted whole.
    """
    def model(data):
        rows = [*data, tiny.EOS if end is None else end]
        table = mx.full((len(rows), tiny.VOCAB), -10.0)
        table[mx.arange(len(rows)), mx.array(rows)] = 10.0
        return tiny.ScriptModel(table, by_position=True)

    text = text.encode() if isinstance(text, str) else text
    draft = text if draft is None else draft.encode() if isinstance(draft, str) else draft
    return Pair(model(text), model(draft), tiny.byte_tokenizer())


def streamed(pair, prompt=(65,), **options):
    return list(mlx_spec.stream_generate(pair, list(prompt), **options))


def whole(pair, prompt=(65,), **options):
    return mlx_spec.generate(pair, list(prompt), **options)


@pytest.mark.parametrize("k", KS)
def test_nothing_after_the_end_token_is_shown_or_counted(k):
    """A31: the end token comes in the middle of a block whose drafts are all accepted."""
    result = whole(script(b"Hi." + bytes([0]) * 0), num_draft_tokens=k)
    assert (result.text, result.ids, result.finish_reason) == ("Hi.", list(b"Hi."), "stop")
    assert result.stats.generation_tokens == 3


@pytest.mark.parametrize("k", KS)
def test_every_end_token_of_the_stop_set_ends_a_reply(k):
    """A32: the union of the tokenizer's and the generation config's end tokens; inside blocks too."""
    tokenizer = tiny.byte_tokenizer(eos_token_ids=[ord("#")])
    base = script("one#two")
    p = Pair(base.target, base.draft, tokenizer)
    assert p.end_ids >= {ord("#"), tiny.EOS}
    assert whole(p, num_draft_tokens=k).text == "one"


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("stop, text", [
    (["END"], "foo "), (["bar", "END"], "foo "), (["zzz"], "foo END bar baz qux"), (["x"], "foo END bar baz qu"),
    (["foo"], ""), (["END b", "ND"], "foo E"), ("baz", "foo END bar "),
])
def test_a_stop_string_is_found_wherever_it_lies_in_a_block(stop, text, k):
    """A33, A35: matched on text, across tokens and rounds, early or late in a block."""
    p = script("foo END bar baz qux")
    result = whole(p, stop=stop, num_draft_tokens=k)
    assert result.text == text
    assert result.finish_reason == ("stop_string" if text != "foo END bar baz qux" else "stop")
    assert bytes(result.ids).decode() == text
    assert "".join(c.text for c in streamed(p, stop=stop, num_draft_tokens=k)) == text


@pytest.mark.parametrize("k", KS)
def test_ids_log_probabilities_and_counts_end_where_the_text_ends(k):
    """A34: nothing is left behind a stop string, in any of them."""
    chunks = streamed(script("na na ha ha ha"), stop=[" ha ha"], num_draft_tokens=k)
    tokens = [t for c in chunks for t in c.tokens]
    stats = chunks[-1].stats
    assert bytes(t.id for t in tokens) == b"na na"
    assert stats.generation_tokens == len(tokens) == 5
    assert sum(t.origin == "accepted" for t in tokens) == stats.accepted == sum(stats.accepted_by_position)
    assert stats.drafted >= stats.accepted and stats.drafted == sum(stats.drafted_by_position)
    assert all(math.isfinite(t.logprob) for t in tokens)


@pytest.mark.parametrize("k", KS)
def test_text_held_back_for_a_stop_string_is_sent_once(k):
    """A36: ' Alice!' looks like the beginning of ' Alice:' for six characters."""
    p = script("Hi Alice! Alice: no")
    chunks = streamed(p, stop=["\n", " Alice:"], num_draft_tokens=k)
    assert "".join(c.text for c in chunks) == "Hi Alice!" == whole(p, stop=["\n", " Alice:"], num_draft_tokens=k).text
    assert bytes(t.id for c in chunks for t in c.tokens).decode() == "Hi Alice!"


@pytest.mark.parametrize("k", [0, 1, 3, 8, 64])
@pytest.mark.parametrize("text, stop, shown", [
    ("héllo", "l", "hé"), ("e\u0301x", "\u0301", "e"), ("I say 🥑\nnext", "\n", "I say 🥑"), ("🥑🥑", "🥑", ""), ("né né", "é n", "n")])
def test_a_character_of_many_tokens_before_a_stop_string_keeps_all_of_them(text, stop, shown, k):
    """A34: half a character is as long as a whole one, so it is the text that is compared."""
    result = whole(script(text), stop=[stop], num_draft_tokens=k)
    assert result.text == shown and bytes(result.ids).decode() == shown
    assert result.stats.generation_tokens == len(shown.encode())


def test_a_stop_string_that_never_completes_is_shown_at_the_end():
    result = whole(script("abc EN"), stop=["END"], num_draft_tokens=4)
    assert (result.text, result.finish_reason, result.stats.generation_tokens) == ("abc EN", "stop", 6)


@pytest.mark.parametrize("k", [0, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
def test_a_budget_is_kept_to_the_token(n, k):
    """A37: also inside a block, and equal to plain's beginning."""
    p = pair()
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=n, num_draft_tokens=k)
    assert ids == plain(p.target, tiny.PROMPT, n)
    assert decoder.finish == "length" and decoder.stats.generation_tokens == n


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(temperature=1.0, seed=4), dict(temperature=1.0, seed=4, verify="match")])
def test_ids_that_only_pad_a_head_are_never_emitted(options, swap):
    """A01: heads of 264 and 320 rows for 259 ids, each with a padded row that is nearly always the best."""
    models = tiny.padded_pair()
    for model in models:
        model.lm_head.weight[260] = 20 * model.lm_head.weight[100]
        model.lm_head.weight[261] = -20 * model.lm_head.weight[100]
    target, draft = models[::-1] if swap else models
    p = Pair(target, draft, tiny.byte_tokenizer())
    results = [mlx_spec.generate(p, tiny.PROMPT, max_tokens=60, num_draft_tokens=k, **options) for k in (0, 4)]
    assert all(0 <= i < tiny.VOCAB for result in results for i in result.ids)
    if options.get("verify") == "match" or not options:
        assert results[0].ids == results[1].ids
    assert any(i >= tiny.VOCAB for i in plain(target, tiny.PROMPT, 60))  # mlx-lm itself does emit them


@pytest.mark.parametrize("limit", [-1, None])
@pytest.mark.parametrize("k", [0, 4])
def test_no_limit_runs_to_the_end_token(limit, k):
    """A38."""
    result = whole(script("twelve chars"), max_tokens=limit, num_draft_tokens=k)
    assert (result.text, result.finish_reason) == ("twelve chars", "stop")


@pytest.mark.parametrize("k", [0, 4])
def test_a_budget_of_nothing_is_an_empty_result(k):
    """A39."""
    result = whole(script("never"), max_tokens=0, num_draft_tokens=k)
    assert (result.text, result.tokens, result.finish_reason) == ("", (), "length")
    assert result.stats.acceptance_rate is None and result.stats.tokens_per_round is None


EMOJI = "a😀é👩‍👩‍👧 ü\n日本"


@pytest.mark.parametrize("k", KS)
def test_a_character_split_over_tokens_and_rounds_comes_out_whole(k):
    """A69: one detokeniser a request, finalised once."""
    chunks = streamed(script(EMOJI), num_draft_tokens=k)
    assert "".join(c.text for c in chunks) == EMOJI
    assert all("\ufffd" not in c.text for c in chunks)


def test_two_replies_that_take_turns_do_not_mix():
    """A69: two runs at once in one thread."""
    p, q = script(EMOJI), script("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    texts = ["", ""]
    streams = [mlx_spec.stream_generate(p, [65], num_draft_tokens=3), mlx_spec.stream_generate(q, [65], num_draft_tokens=2)]
    alive = [0, 1]
    while alive:
        for i in list(alive):
            chunk = next(streams[i], None)
            if chunk is None:
                alive.remove(i)
            else:
                texts[i] += chunk.text
    assert texts == [EMOJI, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]


def test_a_reply_cut_inside_a_character_says_so_with_one_replacement_mark():
    result = whole(script("é"), max_tokens=1, num_draft_tokens=4)
    assert result.text == "\ufffd" and result.finish_reason == "length"


def test_counts_are_exact_for_known_accepts():
    """A100: three drafted a round; 0, 1, 2, 3 of them right; the last round is cut by the budget."""
    target = "xaxbcxdefghijkl"
    # Where the draft must be wrong: the token after 0, 1, 2 accepted ones.
    draft = "?a?bc?defghijkl"
    p = script(target, draft)
    result = whole(p, num_draft_tokens=3, max_tokens=10)
    s = result.stats
    assert result.text == target[:10]
    assert [t.origin[0] for t in result.tokens] == list("cacaacaaab")
    assert (s.rounds, s.drafted, s.accepted, s.corrections, s.bonuses, s.plain) == (4, 12, 6, 3, 1, 0)
    assert (s.drafted_by_position, s.accepted_by_position) == ([4, 4, 4], [3, 2, 1])
    assert (s.acceptance_rate, s.tokens_per_round) == (0.5, 2.5)


def test_a_round_cut_by_the_budget_counts_only_what_is_in_the_reply():
    """A100: four drafted and kept by the rule, two in the reply."""
    s = Stats()
    s.add_round(4, ["accepted"] * 4 + ["bonus"])
    s.add_round(4, ["accepted"] * 2, cut=True)
    assert (s.drafted, s.accepted, s.bonuses, s.generation_tokens) == (6, 6, 1, 7)
    s.drop(3)
    assert (s.rounds, s.drafted, s.accepted, s.bonuses, s.generation_tokens) == (1, 4, 4, 0, 4)


def test_a_bonus_or_correction_is_never_counted_as_drafted():
    """A101: flags and counts agree, and text that the draft copies shows a higher rate."""
    same = whole(script("abcdefgh"), num_draft_tokens=3).stats
    other = whole(script("abcdefgh", "ABCDEFGH"), num_draft_tokens=3).stats
    assert same.acceptance_rate == 1 and other.acceptance_rate == 0
    assert same.bonuses == 2 and other.corrections == 8


def test_speed_is_counted_from_ids_with_prompt_and_reply_apart():
    """A102: not from chunks, and not over the prompt's time."""
    chunks = streamed(script("abcdefghij"), num_draft_tokens=4)
    s = chunks[-1].stats
    assert s.generation_tokens == 10 > len(chunks)
    assert s.generation_tps == 10 / s.generation_s and s.prompt_tps == s.prompt_tokens / s.prompt_s
    assert s.ttft_s >= s.prompt_s


@pytest.mark.parametrize("k", [0, 4])
def test_log_probabilities_are_the_targets_for_every_origin(k):
    """A103: accepted tokens are not certain because they were accepted."""
    p = pair()
    steps = plain_logprobs(p.target, tiny.PROMPT, 40)
    chunks = list(mlx_spec.stream_generate(p, tiny.PROMPT, max_tokens=40, num_draft_tokens=k))
    tokens = [t for c in chunks for t in c.tokens]
    assert {t.origin for t in tokens} == ({"plain"} if k == 0 else {"accepted", "correction", "bonus"})
    assert max(abs(t.logprob - steps[i][t.id]) for i, t in enumerate(tokens)) < 1e-3


def plain_logprobs(model, ids, n):
    from mlx_lm.generate import generate_step

    return [row.tolist() for (_, row), _ in zip(generate_step(mx.array(ids), model, max_tokens=n), range(n))]


def test_log_probabilities_are_at_temperature_one_before_filters():
    result = mlx_spec.generate(text_pair(), tiny.PROMPT, temperature=0.5, top_k=3, seed=1, max_tokens=5, num_draft_tokens=2)
    rows = plain_logprobs(text_pair().target, [*tiny.PROMPT, *result.ids], 1)
    cold = mlx_spec.generate(text_pair(), [*tiny.PROMPT, *result.ids[:-1]], temperature=0, max_tokens=1)
    row = plain_logprobs(text_pair().target, [*tiny.PROMPT, *result.ids[:-1]], 1)[0]
    assert rows and abs(result.tokens[-1].logprob - row[result.ids[-1]]) < 1e-3
    assert cold.tokens[0].logprob == pytest.approx(max(row), abs=1e-3)


def test_logits_that_are_not_numbers_are_an_error_not_token_zero():
    """A04, A27."""
    model = tiny.ScriptModel(mx.full((4, tiny.VOCAB), float("nan")), by_position=True)
    with pytest.raises(mlx_spec.SpecError, match="not numbers"):
        mlx_spec.generate(Pair(model, None, tiny.byte_tokenizer()), [65])


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.8), dict(temperature=0.8, verify="match")])
def test_processors_that_leave_nothing_to_choose_are_named(options):
    """Not the model's files: an error that says where to look, never token 0 for ever."""
    for spoil in (-math.inf, math.nan, math.inf):
        spoiler = mlx_spec.pure(lambda tokens, logits: logits + spoil)
        with pytest.raises(mlx_spec.SpecError, match="check logit_bias, the penalties and the logits processors"):
            mlx_spec.generate(text_pair(), [65], logits_processors=[spoiler], max_tokens=8, **options)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize("top_p", [1e-300, 1e-17])
def test_a_tiny_top_p_leaves_the_best_token(top_p, rule):
    """A50: it is zero in float32."""
    options = dict(max_tokens=12, temperature=1.0, top_p=top_p, verify=rule, seed=1)
    assert mlx_spec.generate(text_pair(), tiny.PROMPT, **options).ids == plain(text_pair().target, tiny.PROMPT, 12)


def test_something_else_than_a_pair_is_refused():
    for wrong in (None, 3):
        with pytest.raises(ValueError, match="pair must be a Pair"):
            mlx_spec.generate(wrong, [65])


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_of_one_and_two_tokens_are_plains(n, k):
    """A18: no empty arrays, no other first token."""
    p = pair()
    assert decode(p, [10, 7][:n], max_tokens=20, num_draft_tokens=k)[1] == plain(p.target, [10, 7][:n], 20)


@pytest.mark.parametrize("name", ["llama", tiny.TINY_SW, "gemma3n"])
@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 64, 65])
def test_the_first_token_does_not_depend_on_where_prefill_chunks_end(name, n):
    """A16: lengths around the prefill step of 32."""
    p, ids = pair(name), (tiny.PROMPT * 4)[:n]
    _, got = decode(p, ids, max_tokens=3, num_draft_tokens=4, prefill_step_size=32)
    assert got == plain(p.target, ids, 3, prefill_step_size=32)


@pytest.mark.parametrize("k", range(1, 9))
def test_a_target_that_drafts_for_itself_is_accepted_throughout(k):
    """A19."""
    p = pair(draft="same")
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=64, num_draft_tokens=k)
    assert decoder.stats.acceptance_rate == 1 and ids == plain(p.target, tiny.PROMPT, 64)


def test_a_shorter_request_after_a_longer_one_starts_afresh():
    """A62."""
    p = pair()
    for ids in (tiny.PROMPT * 9, [3, 4]):
        for k in (1, 2, 4):
            assert decode(p, ids, max_tokens=12, num_draft_tokens=k)[1] == plain(p.target, ids, 12)


@pytest.mark.parametrize("limit", [30, 64])
def test_past_the_drafts_context_decoding_goes_on_plain_and_says_so(limit):
    """A63: and a prompt that is longer than the draft can read never reaches it."""
    target = tiny.make("llama")
    p = Pair(target, tiny.noisy_copy(target), draft_max_length=limit)
    ids = tiny.PROMPT * 2
    decoder, got = decode(p, ids, max_tokens=60, num_draft_tokens=4)
    assert got == plain(target, ids, 60)
    assert f"the draft reads at most {limit} tokens" in decoder.stats.mode
    assert (decoder.stats.drafted == 0) == (limit == 30)


@pytest.mark.parametrize("n", [8, 200, 256, 257])
def test_no_length_of_reply_bypasses_speculation(n):
    """A10: every result says its mode and what was drafted."""
    decoder, ids = decode(pair(), tiny.PROMPT, max_tokens=n, num_draft_tokens=2)
    assert decoder.stats.mode == "speculative" and decoder.stats.drafted > 0 and len(ids) == n


def test_no_draft_tokens_is_plain_decoding_that_never_asks_the_draft():
    """A09: the draft is not called; nothing is divided by zero."""
    target = tiny.make("llama")

    class Never:
        hears = False

        def propose(self, *args):
            raise AssertionError("asked")

        start = grow = propose

    p = Pair(target, None)
    decoder, ids = decode(p, tiny.PROMPT, num_draft_tokens=0, max_tokens=20, drafter=Never())
    s = decoder.stats
    assert ids == plain(target, tiny.PROMPT, 20)
    assert (s.drafted, s.acceptance_rate, s.plain, s.rounds) == (0, None, 20, 20) and s.mode.startswith("plain")


@pytest.mark.parametrize("options, message", [
    (dict(max_tokens=-2), "max_tokens must be a whole number from 0"),
    (dict(max_tokens=1.5), "max_tokens"), (dict(temperature=-1), "temperature must be a number from 0"),
    (dict(temperature=float("nan")), "temperature"), (dict(top_p=1.1), "top_p must be a number from 0 to 1"),
    (dict(min_p=-0.1), "min_p"), (dict(top_k=-1), "top_k"), (dict(top_k=tiny.VOCAB), f"top_k must be 0 .off. to {tiny.VOCAB - 1}"),
    (dict(seed=-1), "seed"), (dict(num_draft_tokens=65), "num_draft_tokens must be a whole number from 0 to 64"),
    (dict(verify="fast"), "verify must be one of token, block, match"), (dict(stop=[""]), "stop"),
    (dict(kv_bits=7), "kv_bits"), (dict(kv_bits=8, kv_group_size=48), "kv_group_size"),
    (dict(prefill_step_size=0), "prefill_step_size"), (dict(max_kv_size=1), "max_kv_size"),
    (dict(kv_bits=8, max_kv_size=64), "max_kv_size must be None when kv_bits"),
    (dict(logit_bias={tiny.VOCAB: 1.0}), f"logit_bias: token id {tiny.VOCAB}"), (dict(logit_bias={1: float("inf")}), "logit_bias"),
    (dict(repetition_penalty=0), "repetition_penalty"), (dict(logits_processors=[3]), "logits_processors"),
    (dict(temprature=1), "unknown option 'temprature'"), (dict(stop=5), "stop must be a list"),
    (dict(logits_processors=len), "logits_processors must be a list"), (dict(should_cancel=True), "should_cancel"),
    (dict(on_progress=1), "on_progress"), (dict(kv_bits=4.0), "kv_bits"), (dict(logit_bias={3: 1e39}), "logit_bias"),
])
def test_a_wrong_option_is_one_line_that_says_the_range(options, message):
    """A38, A39, A50: before any work."""
    with pytest.raises(ValueError, match=message) as error:
        mlx_spec.stream_generate(text_pair(), [65], **options)
    assert "\n" not in str(error.value)


def test_a_prompt_of_foreign_ids_is_refused():
    with pytest.raises(ValueError, match="259"):
        mlx_spec.generate(text_pair(), [65, 259])


def test_an_emitter_without_a_tokenizer_passes_ids_through():
    emitter = Emitter(None, frozenset({9}), (), 5)
    tokens = [Token(i, -1.0, "plain") for i in (1, 2, 9, 4)]
    emission = emitter.feed(tokens)
    assert (emission.text, emission.kept, emission.finish_reason, len(emission.tokens)) == ("", 2, "stop", 2)
