"""Drafts on hidden states in folders: written, read, told apart, refused in one line."""

import json
import resource
import signal
from contextlib import contextmanager
from types import SimpleNamespace

import mlx.core as mx
import pytest
import tiny
from fakehub import FakeHub
from helpers import decode, heads, mlp, plain
from huggingface_hub import constants
from mlx.utils import tree_flatten

from mlx_spec import hub, names, pairs
from mlx_spec.drafters.mlp import Mlp, MlpArgs
from mlx_spec.drafters.saved import KINDS, about, is_saved, load_saved, save
from mlx_spec.errors import PairError, SpecError
from mlx_spec.pairs import load

MAKE = {
    "heads": lambda: heads(tiny.make("llama")),
    "reduced heads": lambda: heads(tiny.make("llama"), depths=(1,), vocab=200),
    "mlp": lambda: mlp(tiny.make("llama")),
    "reduced mlp": lambda: mlp(tiny.make("llama"), vocab=200, tie_weights=True, scale_input=True),
}
KIND = pytest.mark.parametrize("kind", MAKE)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("target") / "tiny-llama")


@pytest.fixture
def folder(tmp_path):
    """A saved speculator."""
    save(tmp_path / "draft", MAKE["mlp"]())
    return tmp_path / "draft"


def refusal(call, *args, kind=PairError, **options) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def edit(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(module) -> dict:
    return tree_flatten(module.parameters(), destination={})


# --- there and back


@KIND
def test_in_16_bits_a_draft_comes_back_as_it_was(kind, tmp_path):
    draft = MAKE[kind]()
    draft.set_dtype(mx.float16)
    save(tmp_path / "d", draft, 16, {"target": "org/T", "tokens": 5})
    back = load_saved(tmp_path / "d")
    assert type(back) is type(draft) and back.args == draft.args
    assert about(tmp_path / "d") == {"target": "org/T", "tokens": 5}
    ours, theirs = weights(draft), weights(back)
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in ours)
    assert theirs["ids"].dtype == mx.int32 and "ids" not in tree_flatten(back.trainable_parameters(), destination={})


def logits_of(draft) -> mx.array:
    draft.bind(tiny.make("llama"), mx.float32)
    tokens = mx.array([[1, 200, 30, 4]])
    states = [mx.random.normal((1, 4, 64), key=mx.random.key(i)) for i in range(len(draft.depths) + 1)]
    return mx.stack([draft.logits(out[0], step) for step, out in enumerate(draft.unroll(tokens, states, 2))])


@KIND
def test_in_8_and_4_bits_its_logits_are_close_and_it_stays_as_it_was_itself(kind, tmp_path):
    draft = MAKE[kind]()
    before = weights(draft)
    exact, sizes, apart = logits_of(draft), [], []
    for bits in (16, 8, 4):
        save(tmp_path / "d", draft, bits)
        sizes.append((tmp_path / "d/model.safetensors").stat().st_size)
        apart.append((mx.linalg.norm(logits_of(load_saved(tmp_path / "d")) - exact) / mx.linalg.norm(exact)).item())
    assert apart[0] < 2e-3 < apart[1] < 0.06 and apart[1] < apart[2] < 0.6
    assert sizes[0] > sizes[1] > sizes[2]
    assert all(mx.array_equal(v, before[k]) and v.dtype == mx.float32 or k == "ids" for k, v in weights(draft).items())


def test_the_packing_is_written_down_as_mlx_lm_does(tmp_path):
    save(tmp_path / "d", Mlp(MlpArgs(64, 2, 40, 96, tie_weights=True)), 4)
    packing = json.loads((tmp_path / "d/config.json").read_text())["quantization"]
    narrow = {"group_size": 32, "bits": 4}
    assert packing == {"group_size": 64, "bits": 4, "mode": "affine"} | dict.fromkeys(("emb.0", "proj.1", "head.0"), narrow)
    stored = mx.load(str(tmp_path / "d/model.safetensors"))
    assert stored["proj.0.scales"].shape == (96, 1) and stored["proj.1.scales"].shape == (96, 3)
    assert stored["ln.0.weight"].dtype == stored["proj.0.scales"].dtype == mx.float16
    assert stored["ids"].dtype == mx.int32


def test_on_a_cpu_it_is_unpacked_and_on_a_gpu_it_stays_packed(tmp_path, monkeypatch):
    save(tmp_path / "d", MAKE["heads"](), 8)
    unpacked = weights(load_saved(tmp_path / "d"))
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    packed = load_saved(tmp_path / "d")
    assert "fuse.scales" in weights(packed) and "fuse.scales" not in unpacked
    assert mx.allclose(logits_of(packed), logits_of(load_saved(tmp_path / "d")))


# --- published checkpoints


def published(path, draft, prefix="speculator.", copies=True) -> None:
    """A folder in IBM's layout: no ids, no kind of ours in the config, tied weights once a head."""
    path.mkdir()
    args, found = draft.args, {}
    for name, w in weights(draft).items():
        part, _, rest = name.partition(".")
        index, _, last = rest.partition(".")
        if part == "ids":
            continue
        repeated = args.tie_weights and copies and (part != "proj" or index == "1")
        for i in range(int(index), args.n_predict) if repeated else [index]:
            found[f"{prefix}{part}.{i}.{last}"] = w.astype(mx.float16)
    mx.save_safetensors(str(path / "model.safetensors"), found)
    (path / "config.json").write_text(json.dumps(dict(
        architectures=["MLPSpeculatorPreTrainedModel"], model_type="mlp_speculator", emb_dim=args.emb_dim,
        inner_dim=args.inner_dim, n_predict=args.n_predict, n_candidates=5, vocab_size=args.vocab_size,
        tie_weights=args.tie_weights, scale_input=args.scale_input, top_k_tokens_per_head=[4, 3, 2],
        torch_dtype="float16")))


@pytest.mark.parametrize("prefix, copies", [("speculator.", True), ("", True), ("speculator.", False)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_published_checkpoint_loads_with_or_without_prefix_and_copies(tied, prefix, copies, tmp_path):
    draft = mlp(tiny.make("llama"), tie_weights=tied, scale_input=tied, n_predict=4)
    draft.set_dtype(mx.float16)
    published(tmp_path / "p", draft, prefix, copies)
    back = weights(load_saved(tmp_path / "p"))
    assert back.keys() == weights(draft).keys() and all(mx.array_equal(v, back[k]) for k, v in weights(draft).items())
    assert is_saved(tmp_path / "p") and about(tmp_path / "p") == {}


# --- a pair


@KIND
def test_a_pair_tells_by_itself_what_a_draft_folder_is(kind, target, tmp_path):
    for bits in (16, 4):
        save(tmp_path / "d", MAKE[kind](), bits, {"target": "somewhere/Tiny-Llama"})
        pair = load(target, tmp_path / "d")
        assert (type(pair.draft).__name__.lower(), pair.notes) == (kind.split()[-1], ())
        decoder, ids = decode(pair, tiny.PROMPT, max_tokens=24, num_draft_tokens=3)
        assert decoder.stats.drafted > 12 and ids == plain(pair.target, tiny.PROMPT, len(ids))


def test_a_published_checkpoint_drafts_in_a_pair(target, tmp_path):
    published(tmp_path / "p", mlp(tiny.make("llama"), tie_weights=True, n_predict=4))
    pair = load(target, tmp_path / "p")
    decoder, ids = decode(pair, tiny.PROMPT, max_tokens=24, num_draft_tokens=9)
    assert decoder.k_max == 4 and ids == plain(pair.target, tiny.PROMPT, len(ids))


def test_a_draft_that_was_made_for_another_target_is_a_note(target, tmp_path):
    save(tmp_path / "d", MAKE["mlp"](), facts={"target": "org/Other-3B"})
    assert load(target, tmp_path / "d").notes == (
        f"the draft was made for org/Other-3B: acceptance may be low with {target}",)


def test_a_catalogue_name_and_its_target_are_the_same_model():
    demo = names.find("demo")
    assert pairs._last_part("demo") == pairs._last_part(demo.target) == pairs._last_part(f"/x/{demo.target}/")
    assert pairs._last_part("./SmolLM2-135M-Instruct.gguf") == pairs._last_part("demo") != pairs._last_part("org/other")


def test_a_draft_of_another_width_is_refused_or_off_and_the_target_stays(target, tmp_path):
    wide = tiny.make("llama", hidden_size=128)
    for i, draft in enumerate((heads(wide), mlp(wide))):
        save(tmp_path / f"{i}", draft)
        text = refusal(load, target, tmp_path / f"{i}")
        assert text.startswith(f"draft {tmp_path / str(i)}: ") and "width 128" in text
        pair = load(target, tmp_path / f"{i}", draft_required=False)
        assert pair.draft is None and "width 128" in pair.notes[0] and decode(pair, tiny.PROMPT, max_tokens=4)[1]


def test_a_draft_is_no_target_and_takes_no_adapter(target, folder):
    assert "give it as the draft of its target" in refusal(load, folder)
    assert "takes no adapter" in refusal(load, target, folder, draft_adapter_path=folder)


def test_a_hub_name_means_a_draft_too_and_is_found_again_without_the_network(target, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    server = FakeHub()
    for name, value in (("ENDPOINT", server.url),
                        ("HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")):
        monkeypatch.setattr(constants, name, value)
    server.folders["org/draft"] = folder
    assert isinstance(load(target, "org/draft").draft, Mlp)
    server.close()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert isinstance(load(target, "org/draft").draft, Mlp)
    assert set(KINDS) == set(hub.NO_TOKENIZER)


def test_a_draft_of_the_catalogue_may_ship_beside_it(target, folder, tmp_path, monkeypatch):
    entry = names.Entry("t", str(target), f"models/{folder.name}", 2, 1, 4, "MIT")
    monkeypatch.setattr(names, "_entries", lambda: {"t": entry})
    monkeypatch.setattr(names, "_target_on_disk", lambda entry, revision=None: target)
    monkeypatch.setattr(names, "models_folder", lambda: tmp_path / "models")
    folder.rename((tmp_path / "models").mkdir() or tmp_path / "models" / folder.name)
    monkeypatch.chdir(target)
    assert entry.on_disk and names.pull("t") == [target, tmp_path / "models" / folder.name]
    assert isinstance(load("t").draft, Mlp) and load("t", False).draft is None


# --- faults on reading


def test_a_folder_without_whole_weights_is_named(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert "cut short or damaged" in refusal(load_saved, folder)
    path.write_bytes(b"")
    assert f"{path} is not a whole safetensors file" in refusal(load_saved, folder)
    path.unlink()
    assert "the weights are missing" in refusal(load_saved, folder)


def test_missing_weights_are_named(folder):
    path = str(folder / "model.safetensors")
    left = {k: v for k, v in mx.load(path).items() if k != "proj.1.weight"}
    mx.save_safetensors(path, left)
    assert "Missing 1 parameters: proj.1.weight" in refusal(load_saved, folder)


@pytest.mark.parametrize("change", [
    {"inner_dim": 47}, {"vocab_size": 10}, {"n_predict": 2}, {"n_predict": 0}, {"n_predict": "three"},
    {"emb_dim": None}, {"reduced": True}, {"quantization": {"bits": 4}}, {"quantization": 4}, {"vocab_size": 10**12},
])
def test_a_config_that_does_not_fit_the_weights_is_named(folder, change):
    edit(folder / "config.json", **change)
    assert f"{folder / 'config.json'} does not fit the weights beside it" in refusal(load_saved, folder)


def test_a_config_that_lacks_a_value_or_names_another_kind_or_is_no_json(folder, target):
    path = folder / "config.json"
    edit(path, model_type="eagle9")
    assert "model type 'eagle9' is no draft on hidden states" in refusal(load_saved, folder) and not is_saved(folder)
    assert "eagle9" in refusal(load, target, folder)
    path.write_text('{"model_type": "mlp_speculator", "emb_dim": 64}')
    assert "n_predict" in refusal(load_saved, folder)
    path.write_text("{")
    assert f"{path} can't be read" in refusal(load_saved, folder) and not is_saved(folder)
    assert f"{path} can't be read" in refusal(load, target, folder)
    path.unlink()
    assert "can't be read" in refusal(load_saved, folder) and not is_saved(folder)


@pytest.mark.parametrize("ids", [mx.arange(-1, tiny.VOCAB - 1), mx.zeros((tiny.VOCAB,))])
def test_ids_that_are_no_ids_are_refused(folder, ids):
    path = str(folder / "model.safetensors")
    mx.save_safetensors(path, dict(mx.load(path)) | {"ids": ids})
    assert "its output ids are no token ids" in refusal(load_saved, folder)


# --- faults on writing


@contextmanager
def small_disk():
    """No file may become larger than 4 kB; not for the length of a test, whose runner writes too."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_half_draft(tmp_path):
    module = MAKE["mlp"]()
    with small_disk():
        assert "make room" in refusal(save, tmp_path / "d", module, kind=SpecError)
    assert not (tmp_path / "d").exists()


def test_a_full_disk_leaves_the_draft_that_was_there(folder):
    before, other = weights(load_saved(folder)), mlp(tiny.make("llama"), seed=9)
    with small_disk():
        assert "can't be written" in refusal(save, folder, other, kind=SpecError)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert all(mx.array_equal(v, before[k]) for k, v in weights(load_saved(folder)).items())


def test_a_model_that_is_no_draft_is_never_overwritten(target, tmp_path):
    before = (target / "config.json").read_text()
    assert "holds another model" in refusal(save, target, MAKE["mlp"](), kind=SpecError)
    assert (target / "config.json").read_text() == before
    (tmp_path / "file").write_text("")
    assert "can't be written" in refusal(save, tmp_path / "file", MAKE["mlp"](), kind=SpecError)
    assert "16, 8 or 4 bits" in refusal(save, tmp_path / "d", MAKE["mlp"](), 3, kind=SpecError)
