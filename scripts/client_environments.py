"""Makes an environment for each agent framework, one for verifiers, and one for libraries that read episodes.

`client_environments.py FOLDER [NAME...]`. What is there is kept.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

UV = Path(__file__).parents[1] / ".tools" / "bin" / "uv"
ENVIRONMENTS = {
    "openai2": ["openai>=2,<3"],
    "openai3": ["openai>=3.52,<4"],
    "langgraph": ["langchain>=1.5,<2", "langchain-openai>=1.7,<2", "langchain-anthropic>=1.7,<2"],
    "openai-agents": ["openai-agents>=0.24,<1"],
    "pydantic-ai": ["pydantic-ai-slim[openai,anthropic]>=2.68,<3"],
    "litellm": ["litellm>=1.80,<2"],
    "smolagents": ["smolagents[openai]>=1.26,<2"],
    "verifiers": ["verifiers>=0.4,<0.5", "docstring-parser>=0.16", "jsonschema-rs>=0.33"],
    "readers": ["datasets>=5.2,<6", "pandas>=3.1,<4", "polars>=2.1,<3", "pyarrow>=24"],
}
"""Requirements by name: frameworks that ask for other versions of one client cannot live together."""


def make(folder: Path, name: str) -> None:
    """Makes an environment; an unfinished one is made anew."""
    environment = folder / name
    done = environment / "done"
    if done.exists():
        return
    subprocess.run([UV, "venv", "--quiet", "--clear", "--python", "3.11", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *ENVIRONMENTS[name]], check=True
    )
    done.touch()


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or ENVIRONMENTS:
        make(folder, name)
        print(f"{name}: {folder / name}", flush=True)


if __name__ == "__main__":
    main()
