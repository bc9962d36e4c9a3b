"""Connection parameters for requests and watch streams: the pod's service account, or KUBECONFIG."""

from __future__ import annotations

import dataclasses
import os
import ssl

import kopf
import yaml

from kestrl.errors import UserInputError

HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


def log_in() -> kopf.ConnectionInfo:
    """Address of the API server and the client's credential. Read again at each call, because a service account token
    expires after an hour.

    Raises:
        UserInputError: There is neither, or it cannot be read.
    """
    settings = kopf.OperatorSettings()
    try:
        pod = kopf.login_with_service_account(settings=settings)
        if pod is not None:
            return _by_address(pod)
        made = kopf.login_with_kubeconfig(settings=settings)
    except (OSError, yaml.YAMLError, kopf.LoginError, LookupError, TypeError, AttributeError, ValueError) as error:
        # Kopf's reader raises many kinds of exceptions for an invalid kubeconfig.
        raise _unusable(error) from error
    if made is None or not made.server:
        raise UserInputError("no cluster: neither a service account nor a kubeconfig; run in a pod, or set KUBECONFIG")
    return made


def secure(known: kopf.ConnectionInfo) -> ssl.SSLContext | bool:
    """The TLS settings for aiohttp: the authority of the API server, and the client certificate if there is one.

    Raises:
        UserInputError: A certificate or a key cannot be read.
    """
    if not known.server.startswith("https"):
        return True
    try:
        return known.as_ssl_context()
    except (OSError, ValueError) as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> UserInputError:
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return UserInputError(
        f"no cluster: {what}; fix the file that KUBECONFIG names, or in a pod its service account's token"
    )


def _by_address(pod: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """The API server by the address in the pod's environment, as other clients use it. Kopf uses its name, which needs
    a working DNS.
    """
    host, port = os.environ.get(HOST, ""), os.environ.get(PORT, "443")
    if not host:
        return pod
    return dataclasses.replace(pod, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
