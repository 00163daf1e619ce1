"""GGUF files: a tiny one written here, and the real demo model."""

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

from mlx_spec import gguf, pairs, prompts
from mlx_spec.errors import PairError

PIECES = tiny.hf_tokenizer().convert_ids_to_tokens(range(256)) + ["<bos>", "<eos>", "<pad>", "th", "the", "<tool>"]
KINDS = [1] * 256 + [3, 3, 3, 1, 1, 4]
BLOCK = {v: k for k, v in gguf._BLOCK_NAMES.items()}
TOP = {v: k for k, v in gguf._NAMES.items()}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{BLOCK[part]}.{kind}"


def metadata(args) -> dict:
    numbers = {
        "embedding_length": args.hidden_size, "block_count": args.num_hidden_layers, "context_length": args.max_position_embeddings,
        "feed_forward_length": args.intermediate_size, "attention.head_count": args.num_attention_heads,
        "attention.head_count_kv": args.num_key_value_heads, "attention.key_length": args.head_dim,
    }
    ids = {"eos": tiny.EOS, "bos": tiny.BOS, "padding": tiny.PAD}
    return {
        **{f"llama.{k}": mx.array(v, mx.uint32) for k, v in numbers.items()},
        **{f"tokenizer.ggml.{k}_token_id": mx.array(v, mx.uint32) for k, v in ids.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(args.rms_norm_eps),
        "llama.rope.freq_base": mx.array(args.rope_theta),
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.token_type": mx.array(KINDS, mx.int32), "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
    }


def make(**overrides):
    return tiny.make("llama", rope_traditional=True, vocab_size=len(PIECES), **overrides)


def write(path, model, without=(), more_weights=None, **changes):
    """A GGUF file of the model. `changes` of the metadata have __ for a dot."""
    meta = metadata(model.args) | {k.replace("__", "."): v for k, v in changes.items()}
    weights = {gguf_name(k): v for k, v in tree_flatten(model.parameters())} | (more_weights or {})
    keep = {k: v for k, v in weights.items() if k not in without}
    mx.save_gguf(str(path), keep, {k: v for k, v in meta.items() if k not in without})
    return path


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_runs_as_the_model_it_was_written_from(tmp_path, tied):
    model = make(tie_word_embeddings=tied)
    loaded, _ = gguf.load_gguf(write(tmp_path / "m.gguf", model), mx.float32)
    tokens = mx.array([tiny.PROMPT])
    assert mx.allclose(loaded(tokens), model(tokens), atol=1e-4).item()
    assert loaded.args.tie_word_embeddings == tied


def test_a_gguf_path_is_a_model_name_and_a_draft_name(tmp_path, model):
    path = write(tmp_path / "m.gguf", model)
    pair = pairs.load(path, path)
    assert pair.draft is pair.target and pair.vocab_size == len(PIECES) and pair.end_ids == {tiny.EOS}
    assert pair.draft_max_length == model.args.max_position_embeddings


def test_the_tokenizer_splits_merges_and_knows_special_tokens(tmp_path, model):
    _, tokenizer = gguf.load_gguf(write(tmp_path / "m.gguf", model), mx.float32)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the<eos>th<tool>")) == ["the", "<eos>", "th", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("<eos>the<tool>"), skip_special_tokens=True) == "the<tool>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (tiny.BOS, tiny.EOS, tiny.PAD)
    assert prompts.encode(tokenizer, [{"role": "user", "content": "hi"}])[1] == ()


@pytest.mark.parametrize("variable, expected", [("float32", mx.float32), ("bfloat16", mx.bfloat16)])
def test_the_weights_have_the_type_that_is_asked_for(tmp_path, model, monkeypatch, variable, expected):
    monkeypatch.setenv("MLX_SPEC_DTYPE", variable)
    target = pairs.load(write(tmp_path / "m.gguf", model)).target
    assert {v.dtype for _, v in tree_flatten(target.parameters())} == {expected}


def test_packed_weights_are_unpacked_in_full_precision():
    packed, scales, biases = mx.quantize(mx.random.normal((4, 64)), group_size=32, bits=4)
    weights = {"a.weight": packed, "a.scales": scales.astype(mx.float16), "a.biases": biases.astype(mx.float16)}
    plain = gguf._unpacked(weights, mx.float32)
    assert list(plain) == ["a.weight"] and plain["a.weight"].dtype == mx.float32
    levels = mx.dequantize(packed, mx.ones_like(scales), mx.zeros_like(biases), group_size=32, bits=4).reshape(4, 2, 32)
    exact = levels * weights["a.scales"].astype(mx.float32)[..., None] + weights["a.biases"].astype(mx.float32)[..., None]
    assert mx.allclose(plain["a.weight"], exact.reshape(4, 64), rtol=1e-6, atol=1e-6).item()


def test_a_type_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("MLX_SPEC_DTYPE", "int8")
    with pytest.raises(PairError, match="use float32 or bfloat16"):
        gguf.default_dtype()


@pytest.mark.parametrize("options, said", [
    ({"general__architecture": "mamba"}, "general.architecture is 'mamba'"),
    ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model is 'llama'"),
    ({"tokenizer__ggml__pre": "deepseek-v3"}, "pre-tokenizer 'deepseek-v3'"),
    ({"more_weights": {"blk.0.attn_q_norm.weight": mx.ones(8)}}, "attn_q_norm"),
    ({"more_weights": {"rope_freqs.weight": mx.ones(8)}}, "scaled rotary"),
    ({"without": ["llama.block_count"]}, "block_count"),
    ({"without": ["tokenizer.ggml.tokens"]}, "tokens"),
    ({"without": ["blk.1.ffn_up.weight"]}, "up_proj"),
])
def test_what_can_not_be_read_is_refused_in_one_line(tmp_path, model, options, said):
    path = write(tmp_path / "m.gguf", model, **options)
    with pytest.raises(PairError) as caught:
        gguf.load_gguf(path, mx.float32)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [lambda b: b"", lambda b: b[:20], lambda b: b[: len(b) // 2], lambda b: b[:-8], lambda b: b"x" * 99])
def test_a_file_cut_short_says_to_fetch_it_again_a97(tmp_path, model, cut):
    path = write(tmp_path / "m.gguf", model)
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(PairError, match="fetch it again") as caught:
        gguf.load_gguf(path, mx.float32)
    assert "\n" not in str(caught.value)


# --- the real one

TEXT = "In 2024, we paid 3.75€ 🙂👩‍🔬 for:\n\tdef f(x):\n        return x**10  # naïve\r\n\n  Ünïcödé, 你好!  "


@pytest.fixture(scope="module")
def demo():
    return pairs.load("demo")


@pytest.mark.real
def test_the_demo_answers_a_question(demo):
    ids, notes = prompts.encode(demo.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    assert demo.tokenizer.decode(ids).endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n") and notes == ()
    reply = []
    for _ in range(8):
        reply.append(int(demo.target(mx.array([ids + reply]))[0, -1].argmax()))
        if reply[-1] in demo.end_ids:
            break
    assert demo.tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real
def test_the_demo_and_its_draft_compute_in_the_platforms_type(demo):
    assert demo.vocab_size == demo.draft_vocab_size == 49152 and demo.draft.norm.weight.dtype == gguf.default_dtype()
    assert {v.dtype for _, v in tree_flatten(demo.target.parameters())} == {gguf.default_dtype()}
    assert demo.end_ids == {2} and demo.draft_max_length is None


@pytest.mark.real
def test_the_demo_tokenizer_gives_text_back_whole_and_streaming(demo):
    ids = demo.tokenizer.encode(TEXT)
    assert demo.tokenizer.decode(ids) == TEXT
    stream = demo.tokenizer.detokenizer
    for i in ids:
        stream.add_token(i)
    stream.finalize()
    assert stream.text == TEXT
    assert "2024" not in demo.tokenizer.convert_ids_to_tokens(ids) and "<|im_end|>" not in demo.tokenizer.decode([2], skip_special_tokens=True)
