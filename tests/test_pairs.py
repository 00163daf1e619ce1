"""Loaded pairs: what is checked, what is refused, and what one model's faults do to the other."""

import json
import shutil
import threading

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken

from mlx_spec import pairs
from mlx_spec.errors import PairError, SpecError
from mlx_spec.pairs import Pair, load
from mlx_spec.probe import Profile

IDS = mx.array([tiny.PROMPT])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def refusal(*args, **options) -> str:
    with pytest.raises(SpecError) as caught:
        load(*map(str, args), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shards(folder) -> None:
    """Splits the weights in two files with an index."""
    weights = sorted(mx.load(str(folder / "model.safetensors")).items())
    halves = {"model-00001-of-00002.safetensors": weights[:5], "model-00002-of-00002.safetensors": weights[5:]}
    for name, part in halves.items():
        mx.save_safetensors(str(folder / name), dict(part))
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {key: name for name, part in halves.items() for key, _ in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --- vocabularies (A01-A04)


def test_padded_heads_pair_up_and_no_id_past_the_tokenizer_may_be_emitted_a01():
    for target, draft in (tiny.padded_pair(), tiny.padded_pair()[::-1]):
        pair = Pair(target, draft, tiny.byte_tokenizer(), draft_tokenizer=tiny.byte_tokenizer())
        assert (pair.vocab_size, pair.draft_vocab_size, pair.notes) == (259, 259, ())


def test_without_a_tokenizer_the_head_bounds_the_ids_a01():
    target, draft = tiny.padded_pair()
    pair = Pair(target, draft)
    assert (pair.vocab_size, pair.draft_vocab_size, pair.tokenizer, pair.end_ids) == (264, 264, None, frozenset())
    assert Pair(target).draft_vocab_size is None
    with pytest.raises(PairError, match="target must be a loaded mlx-lm model; got NoneType"):
        Pair(None)


def test_folders_with_padded_heads_load_first_time_a02(tmp_path):
    target = tiny.write_folder(tmp_path / "target", vocab_size=264)
    draft = tiny.write_folder(tmp_path / "draft", vocab_size=320, seed=1)
    pair = load(target, draft)
    assert (pair.vocab_size, pair.draft_vocab_size, pair.notes) == (259, 259, ())


def permuted(tokenizer):
    """The same vocabulary size, the ids of 'A' and 'B' exchanged."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    return type(tokenizer)(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(state)), eos_token="<eos>")


def test_a_draft_whose_ids_mean_other_strings_is_refused_naming_the_first_a03():
    model = tiny.make("llama")
    with pytest.raises(PairError, match="id 65 is 'A' for the target and 'B' for the draft"):
        Pair(model, tiny.make("llama", 1), tiny.hf_tokenizer(), draft_tokenizer=permuted(tiny.hf_tokenizer()))


def with_added(count: int, word: str = "extra"):
    tokenizer = tiny.hf_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<{word}{i}>", special=True) for i in range(count)])
    return tokenizer


def test_a_few_special_tokens_that_differ_are_a_note_and_many_a_refusal_a04():
    same, missing = pairs.compare_tokenizers(with_added(2), with_added(2)), pairs.compare_tokenizers(with_added(2), with_added(0))
    assert same == () and "2 places, first at id 259 ('<extra0>')" in missing[0]
    assert "3 places" in pairs.compare_tokenizers(with_added(3), with_added(3, "other"))[0]
    with pytest.raises(PairError, match="id 259"):
        pairs.compare_tokenizers(with_added(17), with_added(17, "other"))


def test_ids_that_only_the_draft_has_do_no_harm():
    assert pairs.compare_tokenizers(with_added(0), with_added(30)) == ()


def test_the_end_token_is_the_targets_a04():
    pair = Pair(tiny.make("llama"), tiny.make("llama", 1), tiny.hf_tokenizer(), draft_tokenizer=tiny.hf_tokenizer("<pad>"))
    assert pair.end_ids == {tiny.EOS} and "end token" in pair.notes[0]


# --- end tokens (A32)


def test_the_stop_set_is_the_union_of_all_that_name_an_end_token_a32(tmp_path):
    target = tiny.write_folder(tmp_path / "t", eos=7, tokenizer_eos="<pad>", generation_config={"eos_token_id": [5]})
    draft = tiny.write_folder(tmp_path / "d", eos=66, generation_config={"eos_token_id": [77]}, seed=1)
    template_end = tiny.EOS
    assert load(target, draft).end_ids == {5, 7, tiny.PAD, template_end}


def test_a_template_without_a_token_after_a_turn_adds_no_end(tmp_path):
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert load(tiny.write_folder(tmp_path / "t", chat_template=template)).end_ids == {tiny.EOS}


# --- drafts that fail (A05, A97)


def test_a_failed_draft_is_an_error_with_its_reason_or_a_note_on_the_kept_target_a05(good, tmp_path):
    draft = shutil.copytree(good, tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    assert refusal(good, draft).startswith(f"draft {draft}: ")
    pair = load(good, draft, draft_required=False)
    assert pair.draft is None and pair.notes[0].startswith("draft off: ") and "weights are missing" in pair.notes[0]
    assert pair.target(IDS).shape[-1] == tiny.VOCAB


def test_a_draft_with_another_tokenizer_is_off_with_the_reason_a05(good, tmp_path):
    draft = tiny.write_folder(tmp_path / "draft")
    permuted(tiny.hf_tokenizer()).save_pretrained(draft)
    assert "id 65 is 'A'" in refusal(good, draft)
    assert "id 65 is 'A'" in load(good, draft, draft_required=False).notes[0]


def test_the_context_of_a_short_draft_is_known_a63(tmp_path, good):
    draft = tiny.write_folder(tmp_path / "draft", max_position_embeddings=64)
    assert load(good, draft).draft_max_length == 64
    assert load(good).draft_max_length is None
    nested = tiny.make("mistral3")
    assert Pair(nested, nested).draft_max_length == 4096


# --- adapters (A74)


@pytest.fixture
def adapter(tmp_path, good):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    model = load(good).target
    linear_to_lora_layers(model, config["num_layers"], config["lora_parameters"])
    weights = {k: mx.ones_like(v) * 0.3 for k, v in tree_flatten(model.parameters()) if "lora_" in k}
    path = tmp_path / "adapter"
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_the_targets_adapter_never_reaches_the_draft_a74(good, adapter):
    plain = load(good).target(IDS)

    def changed(model) -> bool:
        return not mx.allclose(model(IDS), plain).item()

    for options, expected in (
        ({"adapter_path": adapter}, (True, False)),
        ({"draft_adapter_path": adapter}, (False, True)),
        ({"adapter_path": adapter, "draft_adapter_path": adapter}, (True, True)),
    ):
        pair = load(good, good, **options)
        assert (changed(pair.target), changed(pair.draft)) == expected


@pytest.mark.parametrize("draft", [None, "none"])
@pytest.mark.parametrize("given", ["draft_adapter_path", "draft_revision"])
def test_what_is_said_of_a_draft_that_is_not_there_is_not_ignored(good, draft, given):
    with pytest.raises(PairError, match="^draft: there is none that could take"):
        load(good, draft, **{given: "x"})
    assert load(good, False, **{given: "x"}).draft is None  # for this reply only: nothing is to be drafted


def test_a_model_that_drafts_for_itself_is_loaded_once_unless_an_adapter_is_between_a74(good, adapter):
    pair = load(good, "self")
    assert pair.draft is pair.target
    pair = load(good, "self", adapter_path=adapter)
    assert pair.draft is not pair.target


def test_a_wrong_adapter_folder_names_what_is_missing_a74(good, adapter, tmp_path):
    assert "has no adapter_config.json" in refusal(good, adapter_path=tmp_path)
    other = tiny.write_folder(tmp_path / "wide", hidden_size=128)
    assert "does not fit the model" in refusal(other, adapter_path=adapter)


# --- threads (A82, A83)


@pytest.mark.parametrize("rope", [None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}])
def test_a_pair_made_here_works_in_another_thread_a82_a83(rope, monkeypatch):
    from mlx_lm.models import llama

    # Running the models at load would hide an array that was left lazy.
    def unprobed(self):
        self.target_profile = self.draft_profile = Profile(head_rows=tiny.VOCAB)

    monkeypatch.setattr(Pair, "_probe", unprobed)

    args = llama.ModelArgs.from_dict(tiny.config("llama", rope_scaling=rope))
    pair = Pair(llama.Model(args), llama.Model(args))
    seen = []

    def run():
        for model in (pair.target, pair.draft):
            logits = model(IDS)
            mx.eval(logits)
            seen.append(logits.shape)
        mx.synchronize()

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(seen) == 4


# --- folders (A96, A97, A99)


def test_a_truncated_shard_is_named_a97(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    text = refusal(folder)
    assert str(path) in text and "cut short" in text and "download it again" in text


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 64, (5).to_bytes(8, "little") + b"[[[[[", (2).to_bytes(8, "little") + b"[]"])
def test_a_file_that_is_no_safetensors_file_is_named_a97(folder, content):
    path = folder / "model.safetensors"
    path.write_bytes(content)
    text = refusal(folder)
    assert str(path) in text and "download it again" in text


def test_shards_load_and_a_missing_one_is_named_a97(folder):
    shards(folder)
    assert load(folder).target(IDS).shape[-1] == tiny.VOCAB
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert str(folder / "model-00002-of-00002.safetensors") + " is missing" in refusal(folder)


def test_an_index_that_names_an_absent_shard_is_refused_a97(folder):
    index = {"weight_map": {"model.norm.weight": "model-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00009.safetensors is missing" in refusal(folder)


@pytest.mark.parametrize("change", [{"hidden_size": 128}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}])
def test_a_config_that_does_not_fit_the_weights_names_the_file_a97(folder, change):
    edit(folder / "config.json", **change)
    text = refusal(folder)
    assert str(folder / "config.json") in text and "does not fit the weights" in text and "download it again" in text


def test_a_config_that_is_no_json_or_lacks_a_value_is_named_a97(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "hidden_size" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json can't be read" in refusal(folder)


def test_a_missing_tokenizer_is_one_line(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert str(folder) in refusal(folder)


def test_an_unknown_model_type_names_the_version_of_mlx_lm_a99(good, folder):
    edit(folder / "config.json", model_type="zzz")
    assert "model type 'zzz' is not supported by mlx-lm 0." in refusal(folder)
    assert refusal(good, folder).startswith(f"draft {folder}: ")
    edit(folder / "config.json", model_type=None)
    assert "names no model_type" in refusal(folder)


def test_a_name_that_is_not_there_is_refused_for_either_model_a96(good, tmp_path):
    assert "no such folder" in refusal(tmp_path / "nothing")
    assert "no such folder" in refusal(good, tmp_path / "nothing")


# --- code that a model brings (A98)

TOKENIZER_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()
class Own(PreTrainedTokenizerFast):
    pass
"""
MODEL_CODE = """
from pathlib import Path
from mlx_lm.models.llama import Model, ModelArgs
Path({marker!r}).touch()
"""


@pytest.fixture(params=["tokenizer", "model"])
def own_code(request, folder, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    if request.param == "tokenizer":
        (folder / "own.py").write_text(TOKENIZER_CODE.format(marker=str(marker)))
        edit(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    else:
        (folder / "own.py").write_text(MODEL_CODE.format(marker=str(marker)))
        edit(folder / "config.json", model_file="own.py")
    return folder, marker


def test_code_that_a_model_brings_runs_only_when_it_is_allowed_a98(good, own_code):
    folder, marker = own_code
    assert "trust_remote_code" in refusal(folder) and not marker.exists()
    assert "trust_remote_code" in refusal(good, folder) and not marker.exists()
    load(folder, trust_remote_code=True)
    assert marker.exists()


def test_code_for_another_library_is_no_reason_to_refuse_a98(folder):
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    assert load(folder).vocab_size == tiny.VOCAB


def test_weights_stay_in_the_type_they_are_stored_in(tmp_path):
    pair = load(tiny.write_folder(tmp_path / "half", dtype=mx.bfloat16))
    dtypes = set(v for _, v in tree_flatten(tree_map(lambda w: str(w.dtype), pair.target.parameters())))
    assert dtypes == {"mlx.core.bfloat16"}
