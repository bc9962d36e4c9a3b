"""A folder with models that several pods share: at once, one of them killed, and with content that changes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest
from tests.fakes.hub import TOKEN, serving_hub
from tests.unit.storage.conftest import Handler, Proxy

from kestrl._shared.prepare import PrepareSettings, prepare
from kestrl.errors import StorageError
from kestrl.storage import open_store
from kestrl.storage.models import publish_model
from kestrl_demo_models.tiny import tiny

pytestmark = pytest.mark.timeout(120)
WEIGHTS = "model.safetensors"


class Pod:
    """A pod's preparation, as a process."""

    def __init__(self, folder: Path, model: str, cache: Path) -> None:
        folder.mkdir()
        self.model, path = folder / "model", folder / "prepare.json"
        settings = PrepareSettings(model=model, model_target=str(self.model), model_cache=str(cache))
        path.write_text(settings.model_dump_json())
        command = [sys.executable, "-m", "kestrl._shared.prepare", "--settings", str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """The next line that it writes."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> int:
        """Waits for its end; returns its exit code."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def folder(self) -> Path:
        """The folder in the cache."""
        return self.model.resolve(strict=True)


class HeldDownload:
    """The first download of the weights, which waits for a test."""

    def __init__(self, proxy: Proxy) -> None:
        self.begun, self.released, self.requests = threading.Event(), threading.Event(), 0
        proxy.fault = self._fault

    def _fault(self, handler: Handler, _: bytes) -> bool:
        if handler.command == "GET" and WEIGHTS in handler.path:
            self.requests += 1
            self.begun.set()
            self.released.wait(60)
        return False


@pytest.fixture
def address(proxy: Proxy) -> str:
    """A model in object storage."""
    address = f"s3://runs/{os.urandom(4).hex()}/tiny"
    put_model(address)
    return address


def put_model(address: str, **changes: bytes) -> None:
    store = open_store(address)
    for path in tiny().iterdir():
        store.put(path.name, changes.get(path.stem, path.read_bytes()))


def assert_whole(folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in tiny().iterdir()
    }


@contextmanager
def two_pods(proxy: Proxy, address: str, folder: Path) -> Generator[tuple[HeldDownload, Pod, Pod]]:
    """A pod in the middle of its download, and another that waits for it."""
    download, cache = HeldDownload(proxy), folder / "cache"
    with ExitStack() as stack:
        stack.callback(download.released.set)
        first = stack.enter_context(Pod(folder / "first", address, cache))
        assert download.begun.wait(60), "the first downloads the weights"
        second = stack.enter_context(Pod(folder / "second", address, cache))
        assert second.line().startswith("waiting for another pod, which downloads tiny-")
        yield download, first, second


@pytest.mark.servers
def test_one_of_two_pods_downloads_a_model(proxy: Proxy, address: str, tmp_path: Path) -> None:
    with two_pods(proxy, address, tmp_path) as (download, first, second):
        download.released.set()
        assert (first.end(), second.end()) == (0, 0)
        assert first.folder() == second.folder()
        assert_whole(first.folder())
        assert download.requests == 1


@pytest.mark.servers
def test_a_pod_that_is_killed_in_the_middle_leaves_nothing(proxy: Proxy, address: str, tmp_path: Path) -> None:
    with two_pods(proxy, address, tmp_path) as (download, first, second):
        (unfinished,) = (tmp_path / "cache" / "stored").glob(".tiny-*.partial")
        first.process.kill()
        download.released.set()
        assert (first.end(), second.end()) == (-9, 0)
        assert download.requests == 2
        assert_whole(second.folder())
        assert not first.model.exists()
        assert not unfinished.exists()
        assert list((tmp_path / "cache" / "stored").glob("[!.]*")) == [second.folder()]


@pytest.mark.servers
def test_a_model_that_is_there_is_not_downloaded_again(proxy: Proxy, address: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(settings(tmp_path / name, address))
    proxy.asked.clear()
    prepare(settings(tmp_path / "three", address))
    assert "GET" in proxy.asked, "the storage is asked which objects there are"
    assert (tmp_path / "one" / "model").resolve() == (tmp_path / "three" / "model").resolve()
    downloads = HeldDownload(proxy)
    downloads.released.set()
    prepare(settings(tmp_path / "four", address))
    assert downloads.requests == 0


def settings(folder: Path, address: str) -> PrepareSettings:
    return PrepareSettings(model=address, model_target=str(folder / "model"), model_cache=str(folder.parent / "cache"))


@pytest.mark.servers
def test_what_is_written_later_at_an_address_is_another_model(address: str, tmp_path: Path) -> None:
    prepare(settings(tmp_path / "before", address))
    put_model(address, model=b"other weights")
    prepare(settings(tmp_path / "after", address))
    assert_whole(tmp_path / "before" / "model")
    assert (tmp_path / "after" / "model" / WEIGHTS).read_bytes() == b"other weights"


@pytest.mark.servers
def test_a_model_that_is_written_meanwhile_is_not_kept(proxy: Proxy, address: str, tmp_path: Path) -> None:
    """The weights of the first model would be beside the tokenizer of the second."""
    download = HeldDownload(proxy)
    with Pod(tmp_path / "pod", address, tmp_path / "cache") as pod:
        assert download.begun.wait(60)
        open_store(address).put("tokenizer.json", b"{}")
        download.released.set()
        _, error = pod.process.communicate(timeout=60)
        assert pod.process.returncode == 1
        assert "was written again while it was downloaded" in error
        assert list((tmp_path / "cache" / "stored").glob("[!.]*")) == []


@pytest.mark.servers
def test_a_published_model_is_kept_if_its_digests_fit(proxy: Proxy, tmp_path: Path) -> None:
    store = open_store(f"s3://runs/{os.urandom(4).hex()}")
    manifest, address = publish_model(store, tiny(), job="warm-up", step=3, base="demo://tiny")
    prepare(settings(tmp_path / "pod", address))
    assert manifest.sha256[:32] in (tmp_path / "pod" / "model").resolve().name
    assert_whole(tmp_path / "pod" / "model")
    other, damaged = publish_model(store, tiny(), job="another", step=4, base="demo://tiny")
    open_store(damaged).put("tokenizer.json", b"{}")
    with pytest.raises(StorageError, match=r"tokenizer\.json is corrupt"):
        prepare(settings(tmp_path / "other" / "pod", damaged))
    assert list((tmp_path / "other" / "cache" / "stored").glob("[!.]*")) == []
    assert other.sha256 == manifest.sha256


def test_one_of_two_pods_downloads_a_repository_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod is killed in the middle of a file: the next one downloads that file, and not those before it."""
    cache, begun, released = tmp_path / "cache", threading.Event(), threading.Event()
    with serving_hub() as hub, ExitStack() as stack:
        hub.model = {path.name: path.read_bytes() for path in tiny().iterdir()}
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)

        def half_way(path: str) -> None:
            if path == WEIGHTS:
                begun.set()
                released.wait(60)

        hub.half_way = half_way
        stack.callback(released.set)
        first = stack.enter_context(Pod(tmp_path / "first", "hf://org/tiny", cache))
        assert begun.wait(60)
        second = stack.enter_context(Pod(tmp_path / "second", "hf://org/tiny", cache))
        assert second.line() == "waiting for another pod, which downloads models--org--tiny\n"
        first.process.kill()
        released.set()
        assert (first.end(), second.end()) == (-9, 0)
        assert_whole(second.folder())
        assert list(cache.rglob("*.incomplete")) == []
        downloads = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
        assert sum(WEIGHTS in request for request in downloads) == 2
        hub.requests.clear()
        third = stack.enter_context(Pod(tmp_path / "third", "hf://org/tiny", cache))
        assert third.end() == 0
        assert third.folder() == second.folder()
        assert not any("/resolve/" in request for request in hub.requests if request.startswith("GET"))
