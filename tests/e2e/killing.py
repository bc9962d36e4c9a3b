"""A seeded chaos test on a cluster: every component of a job, and the leading operator, is killed at named moments, by
SIGKILL or with its pod.

It kills like an outage: a program by its processes on the node, a pod by force, without a termination period.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .cluster.commands import CommandFailed, eventually
from .installation import SYSTEM, Installation

Object = dict[str, Any]
OPERATOR = "operator"
VICTIMS = ("learner", "engine", "inference", "rollout", "tools", "judge", OPERATOR)
"""Containers of a job, by their roles, and the leading operator pod."""
DAEMONS = ("kube-apiserver", "kube-controller-manager", "etcd", "kubelet")
"""Daemons of the cluster."""
BACK_SECONDS = 240.0
"""A killed program often waits for the kubelet's back-off: 10 s, doubled each time."""


class Moment(StrEnum):
    """Moments in a job's life."""

    STARTING = "starting"
    TRAINING = "training"
    DRAINING = "draining"
    ENDING = "ending"


class Manner(StrEnum):
    """Ways to kill."""

    SIGKILL = "SIGKILL"
    POD = "pod deleted by force"


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill, planned or done."""

    victim: str
    moment: Moment
    manner: Manner


def schedule(seed: int, *, rounds: int) -> dict[Moment, list[Kill]]:
    """Every victim at the start, at the drain and at the end, and `rounds` times in training, in random order and
    manner."""
    chance = random.Random(seed)

    def shuffled(moment: Moment) -> list[Kill]:
        kills = [Kill(name, moment, chance.choice(list(Manner))) for name in VICTIMS]
        chance.shuffle(kills)
        return kills

    made = {moment: shuffled(moment) for moment in (Moment.STARTING, Moment.DRAINING, Moment.ENDING)}
    return {**made, Moment.TRAINING: [kill for _ in range(rounds) for kill in shuffled(Moment.TRAINING)]}


@dataclass
class Killer:
    """Carries out a schedule on one job."""

    installation: Installation
    job: str
    namespace: str
    done: list[Kill] = field(default_factory=list[Kill])

    def carry_out(self, kill: Kill, *, over: Callable[[], bool] = lambda: False) -> bool:
        """Waits until the victim's program runs, and kills it; False if there was none until `over`."""
        struck = False

        def done() -> bool:
            nonlocal struck
            container = self._container(kill.victim)
            struck = bool(container) and self._strike(kill, *container.split("/"))
            return struck or over()

        eventually(f"{kill.victim} runs and is killed", done, BACK_SECONDS)
        if struck:
            self.done.append(kill)
        return struck

    def _strike(self, kill: Kill, pod: str, program: str) -> bool:
        """Kills a program or its pod; False if it had ended by itself a moment before."""
        cluster = self.installation.cluster
        if kill.manner is Manner.SIGKILL:
            return cluster.node.kill_container(program) > 0
        place = SYSTEM if kill.victim == OPERATOR else self.namespace
        try:
            cluster.kubectl("delete", "pod", pod, f"--namespace={place}", "--grace-period=0", "--force")
        except CommandFailed:
            return False
        return True

    def _container(self, victim: str) -> str:
        """`pod/id` of the victim's container, if it runs."""
        cluster = self.installation.cluster
        if victim == OPERATOR:
            leader = self.installation.leader()
            pods = [pod for pod in self.installation.operators() if pod["metadata"]["name"] == leader]
        else:
            pods = cluster.list("pods", self.namespace, f"kestrl.dev/job={self.job}")
        for pod in pods:
            for item in pod["status"].get("containerStatuses", ()):
                here = (
                    item["name"] == victim and "running" in item["state"] and "deletionTimestamp" not in pod["metadata"]
                )
                if here:
                    return f"{pod['metadata']['name']}/{item['containerID'].rpartition('/')[2]}"
        return ""

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            "by victim": dict(Counter(kill.victim for kill in self.done)),
            "by moment": dict(Counter(str(kill.moment) for kill in self.done)),
            "by manner": dict(Counter(str(kill.manner) for kill in self.done)),
        }
