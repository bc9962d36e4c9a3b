"""The files of a model's tokenizer, which are copied and never written anew: transformers replaces the pre-tokenizer of
some families when it loads one, so that what it saves loses every space (transformers#45488).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from kestrl._shared.text.chat_model import TOKENIZER_FILES, model_folder
from kestrl.errors import UserInputError

TEMPLATE = "chat_template.jinja"


class TokenizerFiles:
    """The tokenizer of a model.

    Args:
        model: Folder or Hugging Face id.
        template: File of a chat template in place of the model's own.

    Raises:
        UserInputError: The model has no tokenizer, or the template cannot be read.
    """

    def __init__(self, model: str, template: str | None = None) -> None:
        folder = model_folder(model)
        self._paths = [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]
        if not (folder / "tokenizer.json").is_file():
            raise UserInputError(f"spec.model.base: {model} has no tokenizer; add its files, such as tokenizer.json")
        self.template = None if template is None else _read(Path(template))
        """The text of the template; None for the model's own."""

    def save_pretrained(self, folder: Path) -> None:
        """Copies the files into a folder, as `save_pretrained` of transformers writes them."""
        for path in self._paths:
            shutil.copyfile(path, folder / path.name)
        if self.template is not None:
            (folder / TEMPLATE).write_text(self.template, encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserInputError(f"spec.template: {path} cannot be read: {error}") from error
