"""`python -m kestrl_operator --config FILE`: runs the operator."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import uvloop

from kestrl._shared.log_lines import set_level, start_log
from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.service import collect_rarely, exit_code
from kestrl._shared.telemetry import set_up
from kestrl_operator.config import OperatorConfig, read_config


def main() -> int:
    """Runs the operator to its end; returns the exit code of the process: 2 for an error that the user can fix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file rendered from the chart's values")
    path = parser.parse_args().config

    def run() -> None:
        start_log()
        set_level("kestrl_operator")
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        config = read_config(path)
        name = os.environ.get("POD_NAME", "operator-0")
        set_up(name, job="", run="", endpoint=config.otlp, metrics_listen=config.metrics_listen)
        uvloop.run(_operate(config))

    return exit_code(run)


async def _operate(config: OperatorConfig) -> None:
    from kestrl_operator.apiserver.client import Api
    from kestrl_operator.operator import Operator

    api = Api()
    collect_rarely()
    try:
        await Operator(config, api).run()
    finally:
        await api.close()


if __name__ == "__main__":
    sys.exit(main())
