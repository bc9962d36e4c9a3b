"""Hostile programs that look for what is outside of the sandbox: networks, the node, the service."""

from __future__ import annotations

from kestrl_sandbox.checks.verdicts import checks


def _connect(host: str, port: int, kind: str = "SOCK_STREAM", family: str = "AF_INET") -> str:
    return (
        f"def reach():\n    s = socket.socket(socket.{family}, socket.{kind}); s.settimeout(.3)\n"
        f"    s.connect(({host!r}, {port})); s.send(b'x')\nattempt(reach)"
    )


NETWORK = checks(
    "network",
    {
        "TCP to the internet": _connect("1.1.1.1", 443),
        "UDP to the internet": _connect("8.8.8.8", 53, "SOCK_DGRAM"),
        "IPv6": _connect("2606:4700:4700::1111", 443, family="AF_INET6"),
        "loopback of the host": _connect("127.0.0.1", 22),
        "cloud metadata": _connect("169.254.169.254", 80),
        "cloud metadata, IPv6": _connect("fd00:ec2::254", 80, family="AF_INET6"),
        "cloud metadata of another cloud": _connect("100.100.100.200", 80),
        "kubelet": _connect("10.0.0.1", 10250),
        "a name": "attempt(socket.getaddrinfo, 'kubernetes.default.svc', 443)",
        "raw socket": "attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)",
        "packet socket": "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)",
        "netlink socket": "attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "vsock": "attempt(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM, 0)",
        "crypto socket": "attempt(socket.socket, socket.AF_ALG, socket.SOCK_SEQPACKET, 0)",
        "listen": "def listen():\n    s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\nattempt(listen)",
        "interfaces": (
            "try:\n    names = [line.split(':')[0].strip() for line in open('/proc/self/net/dev').readlines()[2:]]\n"
            "except FileNotFoundError:\n    names = []\n"
            "print('BREACH', names) if set(names) - {'lo'} else print('held')"
        ),
        "connections of the node": (
            "found = []\nfor name in ('tcp', 'tcp6', 'udp', 'udp6', 'raw', 'packet', 'arp', 'route', 'fib_trie'):\n"
            "    try:\n        found += open('/proc/self/net/' + name).readlines()[1:]\n"
            "    except FileNotFoundError:\n        pass\n"
            "print('BREACH', found[:3]) if found else print('held')"
        ),
        # One name is listed, which the kernel gives the supervisor's end of a connection; nothing listens there.
        "names of sockets": (
            "try:\n    lines = open('/proc/self/net/unix').readlines()[1:]\n"
            "except FileNotFoundError:\n    lines = []\n"
            "for name in [line.split()[7] for line in lines if line.count(' @')]:\n"
            "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n"
            "        try:\n            socket.socket(socket.AF_UNIX, kind).connect(chr(0) + name[1:])\n"
            "            print('BREACH', name)\n        except OSError:\n            pass\n"
            "print('held')"
        ),
        "a proxy in the environment": (
            "found = [n for n in os.environ if 'proxy' in n.lower()]\n"
            "print('BREACH', found) if found else print('held')"
        ),
    },
    seconds=5,
)

IDENTITY = checks(
    "identity",
    {
        "secrets in the environment": (
            "found = [n for n in os.environ if any(w in n for w in ('KEY', "
            "'TOKEN', 'SECRET', 'KESTRL', 'AWS', 'KUBE'))]\n"
            "print('BREACH', found) if found else print('held')"
        ),
        "name of the host": "print('held') if os.uname().nodename == 'sandbox' else "
        "print('BREACH', os.uname().nodename)",
        "users of the host": (
            "import pwd\nnames = sorted(u.pw_name for u in pwd.getpwall())\n"
            "print('held') if names == ['nobody', 'root', 'sandbox'] else print('BREACH', names)"
        ),
        "processes of the host": (
            "pids = {int(n) for n in os.listdir('/proc') if n.isdigit()}\n"
            "print('held') if pids <= {1, os.getpid()} else print('BREACH', pids)"
        ),
        "cgroups of the host": (
            "found = os.path.exists('/sys/fs/cgroup') or os.path.exists('/sys')\n"
            "print('BREACH') if found else print('held')"
        ),
        "home folders": (
            "found = [p for p in ('/home', '/root/.cache', '/srv', '/opt', '/boot') "
            "if os.path.exists(p) and os.listdir(p)]\n"
            "print('BREACH', found) if found and not sys.base_prefix.startswith(tuple(found)) else print('held')"
        ),
        "objects of the service in memory": (
            "import gc\nfound = [type(o).__name__ for o in gc.get_objects() if "
            "type(o).__module__.startswith('kestrl')]\n"
            "print('BREACH', found[:5]) if found else print('held')"
        ),
        "name of the host that modules remember": (
            "import platform\nnames = {platform.node(), platform.uname().node, socket.gethostname()}\n"
            "print('held') if names == {'sandbox'} else print('BREACH', names)"
        ),
    },
)
