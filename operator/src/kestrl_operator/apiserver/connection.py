"""The log-in at the API server, with the pod's service account or KUBECONFIG: of the client, and of kopf's streams."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any

import kopf
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, incluster_config, kube_config
from kubernetes.aio.dynamic import DynamicClient

from kestrl.errors import UserInputError

HOST, PORT = incluster_config.SERVICE_HOST_ENV_NAME, incluster_config.SERVICE_PORT_ENV_NAME
NAMED = "kubernetes.default.svc"
"""The API server's name, for a pod without its address in the environment."""
LOGIN_SECONDS = 60.0
"""Seconds for which a credential is used before it is read again: service account tokens are rotated."""
INVALID = (OSError, yaml.YAMLError, ConfigException, LookupError, TypeError, AttributeError, ValueError)
"""What the client raises for files that it cannot read, or that are no kubeconfig."""


async def connect() -> Any:
    """A client of the cluster. Its calls read the credential again when it is `LOGIN_SECONDS` old.

    Raises:
        UserInputError: There is no cluster, or a file cannot be read; later, a call raises this too.
    """
    configuration, read_at = await log_in(), monotonic()

    async def refresh(config: Any) -> None:
        nonlocal read_at
        if monotonic() - read_at > LOGIN_SECONDS:
            config.api_key, read_at = (await log_in()).api_key, monotonic()

    configuration.refresh_api_key_hook = refresh
    try:
        return DynamicClient(ApiClient(configuration))
    except INVALID as error:
        raise _unusable(error) from error


async def watch_login() -> kopf.ConnectionInfo:
    """The log-in of kopf's streams, which is repeated when the API server refuses the credential.

    Raises:
        UserInputError: There is no cluster, or a file cannot be read.
    """
    configuration = await log_in()
    scheme, _, token = configuration.api_key.get("BearerToken", "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme.capitalize() or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )


async def log_in() -> Any:
    """Address of the API server, and the credential.

    Raises:
        UserInputError: There is neither, or it cannot be read.
    """
    # Kopf takes no proxy from the environment either.
    configuration: Any = Configuration(host="", client_session_kwargs={"trust_env": False})
    try:
        if not _load_of_pod(configuration):
            files = _kubeconfig()
            if files:
                untyped: Any = kube_config  # its types are incomplete
                await untyped.load_kube_config(files, client_configuration=configuration, persist_config=False)
    except INVALID as error:
        raise _unusable(error) from error
    if not configuration.host:
        raise UserInputError("no cluster: neither a service account nor a kubeconfig; run in a pod, or set KUBECONFIG")
    return configuration


def _kubeconfig() -> str:
    """The kubeconfig files, as in KUBECONFIG; empty if none exists."""
    files = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    return files if any(Path(file).exists() for file in files.split(os.pathsep)) else ""


def _load_of_pod(configuration: Any) -> bool:
    """Loads the pod's service account; False where there is none."""
    if not Path(incluster_config.SERVICE_TOKEN_FILENAME).exists():
        return False
    loader: Any = incluster_config.InClusterConfigLoader(
        token_filename=incluster_config.SERVICE_TOKEN_FILENAME,
        cert_filename=incluster_config.SERVICE_CERT_FILENAME,
        try_refresh_token=False,
        environ={HOST: os.environ.get(HOST) or NAMED, PORT: os.environ.get(PORT) or "443"},
    )
    loader.load_and_set(configuration)
    return True


def _unusable(error: Exception) -> UserInputError:
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return UserInputError(
        f"no cluster: {cause}; fix the file that KUBECONFIG names, or in a pod its service account's token"
    )
