"""Runs the episodes of an agent in a pod of the user's image: `python3 pod_program.py --settings FILE`.

It runs from a folder with our packages, which is not on the agent's own path, and needs the standard library alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this file's folder
    from kestrl_rollout.hosts.pod_server import main

    sys.exit(main(sys.argv[1:]))
