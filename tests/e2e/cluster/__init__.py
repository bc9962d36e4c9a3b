"""A real Kubernetes for tests: a single node, brought up in some six seconds on any Linux machine where tests are root.

It needs, on Debian: runc containernetworking-plugins iptables nftables conntrack catatonit busybox-static iproute2
util-linux openssl. `tests/e2e/kit` builds every program from its Go module; nothing is pulled from a registry of
images. Tests ask for a cluster by the fixtures of `tests/e2e/conftest.py`, and for capabilities by their names
(`fake_devices`, `network_policies`, ...). By hand:

    python -m tests.e2e.cluster up          # this checkout's, until `down`; see `--help`
    KESTRL_E2E_KEEP=1 pytest tests/e2e      # uses it, and leaves it running

Reading order: `node` (namespaces, up, down), `daemons` (their command lines), `images`, `objects` (what a fresh cluster
is given), `client` (what tests use), `choice` (which cluster they get). `policies` and `devices` are programs that run
within the node.
"""
