"""Credentials that are rotated while programs hold a store open, on a real S3 server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.fakes.mounted_secret import MountedSecret
from tests.fakes.s3 import S3Server

from kestrl.errors import StorageInaccessible, StorageUnavailable, UserInputError
from kestrl.storage import open_store
from kestrl.storage.credentials import FOLDER_VARIABLE, mounted_configuration

OPTIONS = {"AWS_HTTP1_ONLY": "true", "AWS_POOL_MAX_IDLE_PER_HOST": "3", "AWS_USER_AGENT": "a test"}
Mount = Callable[[Mapping[str, str]], None]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Mounts a Secret with the credentials of this process, or changes it."""
    secret = MountedSecret(tmp_path / "secret")
    monkeypatch.setenv(FOLDER_VARIABLE, str(secret.folder))
    return secret.write


@pytest.mark.servers
def test_a_store_that_is_open_uses_a_rotated_credential(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, mount: Mount
) -> None:
    for name in s3_environment.environment():
        monkeypatch.delenv(name)
    mount(
        {**s3_environment.environment(secret="the old one"), "HF_TOKEN": "x", "AWS_UNKNOWN_TO_OBSTORE": "x", **OPTIONS}
    )
    store = open_store(f"s3://runs/{uuid.uuid4().hex}")
    with pytest.raises(StorageInaccessible, match="access is denied") as caught:
        store.put("a", b"1")
    assert (caught.value.code, caught.value.retryable) == ("storage_inaccessible", True)
    mount(s3_environment.environment())
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert store.list("") == ["a"]
    mount(s3_environment.environment(secret="revoked"))
    with pytest.raises(StorageInaccessible):
        store.get("a")


@pytest.mark.servers
def test_a_missing_bucket_is_outside_of_the_run(s3_environment: S3Server) -> None:
    with pytest.raises(StorageInaccessible, match="there is no such bucket"):
        open_store("s3://nowhere/run").get("a")


def test_a_malformed_credential_is_reported_and_heals(mount: Mount) -> None:
    mount({"AZURE_STORAGE_ACCOUNT_NAME": "account"})
    store = open_store("az://container/run")
    mount({"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "not base64"})
    with pytest.raises(StorageInaccessible, match="changed credentials"):
        store.get("a")
    with pytest.raises(UserInputError, match=r"storage\.uri"):
        open_store("az://container/run")


def test_each_kind_of_storage_reads_its_own_files(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount({"AWS_ACCESS_KEY_ID": "key\n", "GOOGLE_BUCKET": "b", "HF_TOKEN": "token"})
    assert mounted_configuration("s3") == {"AWS_ACCESS_KEY_ID": "key"}
    assert mounted_configuration("gs") == {"GOOGLE_BUCKET": "b"}
    assert mounted_configuration("file") == {}
    mount({"AWS_SECRET_ACCESS_KEY": "other"})
    assert mounted_configuration("s3") == {"AWS_SECRET_ACCESS_KEY": "other"}, "what was removed is gone"
    monkeypatch.setenv(FOLDER_VARIABLE, os.devnull)
    assert mounted_configuration("s3") == {}


@pytest.mark.parametrize(
    ("address", "variables"),
    [
        (
            "s3://bucket/run",
            {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_REGION": "r", "AWS_WEB_IDENTITY_TOKEN_FILE": "{}/token"},
        ),
        (
            "az://container/run",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_CLIENT_ID": "client",
                "AZURE_TENANT_ID": "tenant",
                "AZURE_FEDERATED_TOKEN_FILE": "{}/token",
            },
        ),
    ],
    ids=["IRSA", "AKS"],
)
def test_a_cloud_s_webhook_s_token_is_read_for_its_identity(
    address: str, variables: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are those that the webhooks set. Without the file nothing is asked of a cloud."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text.format(tmp_path))
    with pytest.raises(StorageUnavailable, match="token file"):
        open_store(address).exists("a")
