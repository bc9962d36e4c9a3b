"""`python -m benchmarks.gpu`: what is known of a machine with a GPU within ten minutes.

Parts run one after the other, the most important first, each in a process of its own and within its time budget: a part
that is over time, fails or cannot run says so, and the next one begins. One JSON line a figure is printed when it is
measured; a table follows at the end. `--write` keeps the lines in docs/measured/gpu.jsonl, with device, driver and
versions. `--device cpu --quick` runs all of it with tiny shapes, which proves the script and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from benchmarks.gpu.lines import Line, table
from benchmarks.gpu.parts import PARTS, Place

from kestrl._shared.plan.components import TORCH_DEFAULTS

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured" / "gpu.jsonl"
PACKAGES = ("torch", "transformers", "peft", "vllm", "trl")
QUICK_SECONDS = 300.0
"""Seconds of each part: a bound for busy machines, not an expectation."""


def machine(device: str) -> dict[str, str]:
    """Device, driver and versions."""
    import torch

    facts = {"device": platform.processor() or platform.machine(), "python": platform.python_version()}
    if device == "cuda":
        facts |= {"device": torch.cuda.get_device_name(), "count": str(torch.cuda.device_count())}
        facts["cuda"] = str(torch.version.cuda)
        facts["driver"] = driver()
    distributions = metadata.packages_distributions()  # vLLM's has another name on a CPU
    for name in PACKAGES:
        facts[name] = metadata.version(distributions[name][0]) if name in distributions else "not installed"
    return facts


def driver() -> str:
    """The driver's version, as nvidia-smi names it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


async def run_part(name: str, place: Place, seconds: float, report: Callable[[Line], None]) -> None:
    """Runs a part in a process of its own, and ends it with all that it started when its time is up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.gpu.parts",
        name,
        json.dumps(place.facts()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**TORCH_DEFAULTS, **os.environ},
        cwd=ROOT,
        start_new_session=True,
        limit=2**20,
    )
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018 - both are pipes
    said = asyncio.create_task(process.stderr.read())
    try:
        async with asyncio.timeout(seconds):
            async for text in process.stdout:
                report(Line.read(text.decode()))
            ended = await process.wait()
    except TimeoutError:
        report(Line(part=name, name=PARTS[name].title, status="over time", note=f"ended after {seconds:g} s"))
        ended = 0
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    last = (await said).decode(errors="replace").strip().splitlines()
    if ended:
        report(Line(part=name, name=PARTS[name].title, status="failed", note=last[-1] if last else f"code {ended}"))


async def run(names: str, place: Place, report: Callable[[Line], None]) -> None:
    for name in names:
        await run_part(name, place, QUICK_SECONDS if place.quick else PARTS[name].seconds, report)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--parts", default="".join(PARTS), help="letters of the parts; all by default")
    parser.add_argument("--write", action="store_true", help="keep the lines in docs/measured/gpu.jsonl")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"--parts: {''.join(sorted(unknown))} is none of {''.join(PARTS)}")
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch sees no CUDA device here; --device cpu --quick proves the script without one")
    lines: list[Line] = []

    def report(line: Line) -> None:
        print(line.text(), flush=True)
        lines.append(line)

    facts = machine(arguments.device)
    print(json.dumps(facts), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(device=arguments.device, quick=arguments.quick, folder=Path(folder))
        asyncio.run(run(arguments.parts, place, report))
    print(table(lines))
    if arguments.write:
        MEASURED.write_text("".join(f"{text}\n" for text in (json.dumps(facts), *(line.text() for line in lines))))
    return 1 if any(line.status == "failed" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
