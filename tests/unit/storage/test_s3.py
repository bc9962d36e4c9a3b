"""A real S3 server that is slow, broken, away, or not ours: bounded time, one clear message, nothing half there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from tests.fakes.s3 import S3Server

from kestrl.errors import KestrlError, PlaceError, StorageError
from kestrl.storage import adapter_folder, fetch_adapter, objects, open_store, publish_adapter, read_manifest
from kestrl.storage.adapters import WEIGHTS

from .conftest import Fault, Handler, Proxy
from .test_adapters import FILES, manifest

pytestmark = pytest.mark.servers


def address() -> str:
    return f"s3://runs/{uuid.uuid4().hex}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RETRIES", {**objects.RETRIES, "retry_timeout": timedelta(seconds=1)})
    monkeypatch.setattr(objects, "REQUEST_SECONDS", 1)


def answering(status: int, times: int) -> Fault:
    left = [times]

    def fault(handler: Handler, body: bytes) -> bool:
        if not left[0]:
            return False
        left[0] -= 1
        handler.close_connection = True
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return fault


def test_what_exists_is_not_created_again(s3_environment: S3Server) -> None:
    """The store decides, not a look before the write. (Swift decides for writers one after another; AWS for those at
    once too.)"""
    store = open_store(address())
    store.put("manifest.json", b"first", create=True)
    with pytest.raises(StorageError, match="exists already") as caught:
        store.put("manifest.json", b"second", create=True)
    assert caught.value.code == "exists"
    assert store.get("manifest.json") == b"first"


def test_stored_objects_survive_a_restart_of_the_server(s3_environment: S3Server) -> None:
    store = open_store(address())
    publish_adapter(store, FILES, manifest())
    s3_environment.stop()
    s3_environment.start()
    assert read_manifest(store, adapter_folder(manifest().policy)) == manifest()


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_short_outage_is_survived_by_retries(proxy: Proxy, tmp_path: Path, status: int) -> None:
    store = open_store(address())
    proxy.fault = answering(status, 2)
    where = publish_adapter(store, FILES, manifest())
    proxy.fault = answering(status, 2)
    assert fetch_adapter(open_store(where), tmp_path / "fetched") == manifest()


@pytest.mark.usefixtures("impatient")
def test_a_lasting_outage_is_reported_in_bounded_time(proxy: Proxy) -> None:
    proxy.fault = answering(503, 1000)
    began = time.monotonic()
    with pytest.raises(StorageError, match="cannot write s3://runs/") as caught:
        open_store(address()).put("a", b"x")
    assert caught.value.retryable
    assert "Debug source" not in str(caught.value)
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("impatient")
def test_a_server_that_never_answers_is_reported_in_bounded_time(proxy: Proxy) -> None:
    proxy.fault = lambda handler, body: proxy.over.wait()
    began = time.monotonic()
    with pytest.raises(StorageError, match="cannot read s3://runs/"):
        open_store(address()).get("a")
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("impatient")
def test_an_unavailable_server_is_reported_in_bounded_time(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot list s3://runs/"):
        open_store(address()).check()


def test_an_interrupted_upload_is_retried(proxy: Proxy) -> None:
    cuts = [2]

    def cut(handler: Handler, body: bytes) -> bool:
        if not cuts[0]:
            return False
        cuts[0] -= 1
        handler.close_connection = True
        return True

    proxy.fault = cut
    store = open_store(address())
    store.put("a", bytes(300_000))
    assert store.get("a") == bytes(300_000)
    assert proxy.asked.count("PUT") == 3


def test_a_write_whose_answer_was_lost_is_not_a_conflict(proxy: Proxy) -> None:
    """The answer of a successful write is lost; the retry finds an existing manifest and compares it."""
    store = open_store(address())
    heard = open_store(store.uri)
    publish_adapter(heard, FILES, manifest())
    assert publish_adapter(store, FILES, manifest()).startswith(store.uri)
    other = {**FILES, "adapter_config.json": b"{ }"}
    with pytest.raises(StorageError) as caught:
        publish_adapter(store, other, manifest(other))
    assert caught.value.code == "exists"
    assert read_manifest(store, adapter_folder(manifest().policy)) == manifest()


def test_a_publisher_killed_half_way_leaves_nothing_visible(proxy: Proxy, tmp_path: Path) -> None:
    where = address()
    proxy.fault = lambda handler, body: handler.command == "PUT" and proxy.over.wait()
    code = f"from kestrl.storage import open_store; open_store({where!r}).put('adapters/x/{WEIGHTS}', bytes(5_000_000))"
    with subprocess.Popen([sys.executable, "-c", code]) as publisher:
        assert proxy.half_way.wait(30)
        publisher.send_signal(signal.SIGKILL)
        assert publisher.wait(10) == -signal.SIGKILL
    proxy.fault = lambda handler, body: False
    store = open_store(where)
    assert store.list("adapters") == []
    with pytest.raises(StorageError) as caught:
        fetch_adapter(store, tmp_path / "fetched", "adapters/x")
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("verb", ["check", "put", "get"])
def test_wrong_credentials_are_reported_with_the_fix(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(address())
    with pytest.raises(PlaceError, match="access is denied; check the credentials") as caught:
        {"check": store.check, "put": lambda: store.put("a", b""), "get": lambda: store.get("a")}[verb]()
    assert "SignatureDoesNotMatch" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("verb", ["check", "put", "get"])
def test_a_missing_bucket_is_reported_with_the_fix(s3_environment: S3Server, verb: str) -> None:
    store = open_store("s3://nowhere/run")
    with pytest.raises(
        PlaceError, match=r"there is no such bucket; create it, or name another in storage\.uri"
    ) as caught:
        {"check": store.check, "put": lambda: store.put("a", b""), "get": lambda: store.get("a")}[verb]()
    assert isinstance(caught.value, KestrlError)
