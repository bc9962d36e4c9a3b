"""How this process speaks to the apiserver, for requests and watch streams alike: as the pod's service account, or as KUBECONFIG says."""

from __future__ import annotations

import dataclasses
import os
import ssl

import kopf
import yaml

from kestrl.errors import UserInputError

HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


def log_in() -> kopf.ConnectionInfo:
    """Where the apiserver is, and who we are. Read anew at each call: a service account's token lives for an hour.

    Raises:
        UserInputError: Neither is there, or it cannot be read.
    """
    settings = kopf.OperatorSettings()
    try:
        pod = kopf.login_with_service_account(settings=settings)
        if pod is not None:
            return _by_address(pod)
        made = kopf.login_with_kubeconfig(settings=settings)
    except (OSError, yaml.YAMLError, kopf.LoginError, LookupError, TypeError, AttributeError, ValueError) as error:
        # What Kopf's reader raises of a kubeconfig that is none is as various as what can be wrong with it.
        raise _unusable(error) from error
    if made is None or not made.server:
        raise UserInputError("no cluster: neither a service account nor a kubeconfig; run in a pod, or set KUBECONFIG")
    return made


def secure(known: kopf.ConnectionInfo) -> ssl.SSLContext | bool:
    """How the apiserver shows that it is the one, and we that we are, as aiohttp takes it.

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
        f"no cluster: {what}; mend the file that KUBECONFIG names, or in a pod its service account's token"
    )


def _by_address(pod: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """The apiserver by the address that the kubelet tells, as other clients take it; Kopf takes its name, which needs a DNS that works."""
    host, port = os.environ.get(HOST, ""), os.environ.get(PORT, "443")
    if not host:
        return pod
    return dataclasses.replace(pod, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
