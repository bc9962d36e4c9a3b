"""The table of hostile programs. Sources: SandboxFusion's, Piston's and inspect's tests, and published escapes of
sandboxes (runc, Judge0, Nomad), each as the attempt that they would need.
"""

from __future__ import annotations

from kestrl_sandbox.checks.machine import FILES, KERNEL, PROCESSES, SUPERVISOR
from kestrl_sandbox.checks.outside import IDENTITY, NETWORK
from kestrl_sandbox.checks.resources import NODE, RESOURCES
from kestrl_sandbox.checks.verdicts import Check

CHECKS: tuple[Check, ...] = (*RESOURCES, *NODE, *PROCESSES, *SUPERVISOR, *FILES, *KERNEL, *NETWORK, *IDENTITY)
