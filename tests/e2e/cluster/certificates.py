"""The cluster's certificates and kubeconfigs, created by openssl and signed by one authority."""

from __future__ import annotations

import base64
import json

from .commands import run
from .layout import DOMAIN, NODE_NAME, Layout

AUTHORITY = "authority"
SERVERS = ("apiserver", "kubelet-server")
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kubelet": f"/O=system:nodes/CN=system:node:{NODE_NAME}",
    "proxy": "/CN=system:kube-proxy",
    "front-proxy": "/CN=front-proxy-client",
}
"""Kubernetes users and groups of the clients."""


def make_certificates(layout: Layout) -> None:
    """Writes all keys and certificates, and a kubeconfig for every client."""
    folder = layout.certificates
    folder.mkdir(mode=0o700)
    _certificate(layout, AUTHORITY, "/CN=kestrl-e2e", "keyUsage=critical,keyCertSign,cRLSign")
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}"]
    hosts = [f"DNS:{name}" for name in (*names, "localhost", NODE_NAME)]
    hosts += [f"IP:{address}" for address in (layout.kubernetes_service, layout.node_address, "127.0.0.1")]
    for name in SERVERS:
        _certificate(layout, name, f"/CN={name}", f"subjectAltName={','.join(hosts)}", signed=True)
    for name, subject in CLIENTS.items():
        _certificate(layout, name, subject, "extendedKeyUsage=clientAuth", signed=True)
        layout.kubeconfig(name).touch(mode=0o600)
        layout.kubeconfig(name).write_text(_kubeconfig(layout, name))
    run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", folder / "tokens.key")
    run("openssl", "pkey", "-in", folder / "tokens.key", "-pubout", "-out", folder / "tokens.pub")


def _certificate(layout: Layout, name: str, subject: str, extension: str, *, signed: bool = False) -> None:
    folder = layout.certificates
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "365",
    ]
    command += ["-subj", subject, "-addext", extension]
    command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
    if signed:
        command += ["-CA", str(folder / f"{AUTHORITY}.crt"), "-CAkey", str(folder / f"{AUTHORITY}.key")]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    run(*command)


def _kubeconfig(layout: Layout, user: str) -> str:
    """A self-contained kubeconfig that can be passed to a pod."""

    def content(name: str) -> str:
        return base64.b64encode((layout.certificates / name).read_bytes()).decode()

    cluster = {"server": layout.server, "certificate-authority-data": content(f"{AUTHORITY}.crt")}
    keys = {"client-certificate-data": content(f"{user}.crt"), "client-key-data": content(f"{user}.key")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": layout.name, "cluster": cluster}],
        "users": [{"name": user, "user": keys}],
        "contexts": [{"name": layout.name, "context": {"cluster": layout.name, "user": user}}],
        "current-context": layout.name,
    }
    return json.dumps(config, indent=1)
