"""The container of an environment, with the user's image, in the pods of the tool service. Pure.

A container of these pods and not a Deployment of its own: the service forks an episode's process and is the first to
know of its end, over descriptors that containers of a pod can share and pods cannot; a session is where its service is.
The container shares one socket with the service and no credential, process, settings or data.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.environments import LAUNCHER, stepped_environment
from kestrl._shared.spec.job import JobSpec
from kestrl_operator.render.pods import CONTAINER_SECURITY, Object
from kestrl_operator.render.resources import resources_of
from kestrl_operator.state.chart_values import Cluster
from kestrl_operator.state.cluster import HOME, PACKAGES

CONTAINER = "environment"
PACKAGED = ("kestrl", "kestrl_tools")
"""What runs an environment in the user's image."""
FOLDER = str(PurePosixPath(LAUNCHER).parent)
SHARED: Object = {"name": CONTAINER, "mountPath": FOLDER}
PROGRAM = f"{PACKAGES}/kestrl_tools/process/launcher.py"


def with_environment(template: Object, role: Role, spec: JobSpec, cluster: Cluster) -> Object:
    """The pods of a role; those of the tool service with the container of an environment that is stepped."""
    environment = stepped_environment(spec)
    if role is not Role.TOOLS or environment is None:
        return template
    pods = template["spec"]
    (service,) = pods["containers"]
    beside: Object = {
        "name": CONTAINER,
        "image": environment.image,
        "imagePullPolicy": cluster.images.pull_policy,
        "command": ["python3", PROGRAM, LAUNCHER],
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            # Of what is prepared for the service, it sees the packages alone.
            {
                "name": "home",
                "mountPath": PACKAGES,
                "subPath": str(PurePosixPath(PACKAGES).relative_to(HOME)),
                "readOnly": True,
            },
            {"name": "environment-tmp", "mountPath": "/tmp"},  # noqa: S108
            SHARED,
        ],
        "resources": resources_of(CONTAINER, cluster),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    volumes: list[Object] = [{"name": name, "emptyDir": {}} for name in (CONTAINER, "environment-tmp")]
    sharing = {**service, "volumeMounts": [*service["volumeMounts"], SHARED]}
    extended: Object = {**pods, "containers": [sharing, beside], "volumes": [*pods["volumes"], *volumes]}
    return {**template, "spec": extended}
