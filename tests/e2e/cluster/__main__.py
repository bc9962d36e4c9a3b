"""A real Kubernetes on this machine: `python -m tests.e2e.cluster
up|down|status|start|stop|kill|restart|freeze|thaw|exec|kubectl`."""

from __future__ import annotations

import argparse
import os
import sys

from .kit import build_kit
from .layout import default_name
from .node import Node
from .up import bring_up, find

ACTIONS = ("start", "stop", "kill", "restart", "freeze", "thaw")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tests.e2e.cluster", description=__doc__)
    made.add_argument("--name", help="of the cluster; this checkout's by default")
    made.add_argument("--control-plane-only", action="store_true", help="no kubelet: objects only")
    commands = made.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring a cluster up, its programs built if they were not")
    up.add_argument("--net", type=int, help="number of its networks; a free one by default")
    up.add_argument("--proxy-mode", choices=("iptables", "nftables"), default="iptables")
    commands.add_parser("down", help="end it, and remove all of it")
    commands.add_parser("status", help="its daemons and their memory")
    for action in ACTIONS:
        commands.add_parser(action, help=f"{action} a daemon").add_argument("daemon")
    commands.add_parser("exec", help="a command in the node's namespaces").add_argument(
        "words", nargs=argparse.REMAINDER
    )
    commands.add_parser("kubectl", help="as administrator").add_argument("words", nargs=argparse.REMAINDER)
    return made


def up(arguments: argparse.Namespace) -> None:
    node = find(arguments.name) or bring_up(
        build_kit(),
        name=arguments.name,
        net=arguments.net,
        control_plane_only=arguments.control_plane_only,
        proxy_mode=arguments.proxy_mode,
    )
    say(f"export KUBECONFIG={node.layout.kubeconfig()} PATH={node.state.kit.folder}:$PATH")


def status(node: Node) -> None:
    memory = node.memory()
    for name, runs in node.runs().items():
        say(f"{name:24} {'runs' if runs else 'DOWN'} {memory[name] // 2**20:5} MiB")
    say(f"{'in all':24}      {sum(memory.values()) // 2**20:5} MiB")


def replace(*command: str) -> None:
    """Replaces this process by another program."""
    os.execvp(command[0], command)


def main() -> int:
    arguments = parser().parse_args()
    arguments.name = arguments.name or default_name(control_plane_only=arguments.control_plane_only)
    if arguments.command == "up":
        up(arguments)
        return 0
    node = find(arguments.name)
    if node is None:
        sys.stderr.write(f"no cluster {arguments.name} is up\n")
        return 1
    words = [word for index, word in enumerate(getattr(arguments, "words", [])) if (index, word) != (0, "--")]
    match arguments.command:
        case "down":
            node.down()
        case "status":
            status(node)
        case "exec":
            replace(*node.entering(*words))
        case "kubectl":
            replace(node.state.kit.program("kubectl"), f"--kubeconfig={node.layout.kubeconfig()}", *words)
        case action:
            getattr(node, action)(arguments.daemon)
    return 0


if __name__ == "__main__":
    sys.exit(main())
