"""A repository of models on the Hugging Face Hub, to which a folder is uploaded by the Hub's own client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kestrl.errors import StorageError, UserInputError

ADDRESS = re.compile(r"hf://([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)", re.ASCII)
LOGIN = "set HF_TOKEN to one that may write, or log in with `hf auth login`"
LONGEST = 300
"""Characters of the Hub's answer that a message has."""


class ModelRepository:
    """A repository to which the holder of the token may write.

    Args:
        address: Such as hf://ORG/NAME.

    Raises:
        UserInputError: The address is none, there is no token, the Hub refuses it, or its client is not installed.
        StorageError: The Hub cannot be reached.
    """

    def __init__(self, address: str) -> None:
        matched = ADDRESS.fullmatch(address)
        if matched is None:
            raise UserInputError(f"--push: {address!r} is not of the form hf://ORG/NAME")
        self.id = matched[1]
        try:
            import huggingface_hub
        except ModuleNotFoundError as error:
            raise UserInputError(f"--push needs the package {error.name}: pip install {error.name}") from error
        if huggingface_hub.get_token() is None:
            raise UserInputError(f"--push: there is no token for the Hub; {LOGIN}")
        self._api: Any = huggingface_hub.HfApi(library_name="kestrl")
        self._asked(self._api.whoami)

    def upload(self, folder: Path, texts: Mapping[str, str], message: str) -> str:
        """Uploads the files of a folder as one commit, into a repository that is made if it is not there; returns the
        address of the commit.

        Args:
            folder: The files.
            texts: Texts by file name, uploaded beside the folder's files or in place of them.
            message: The commit's.

        Raises:
            UserInputError: The Hub refuses.
            StorageError: The Hub cannot be reached.
        """
        from huggingface_hub import CommitOperationAdd

        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        contents: dict[str, str | bytes] = {str(path.relative_to(folder)): str(path) for path in files}
        contents |= {name: text.encode() for name, text in texts.items()}
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in contents.items()]
        self._asked(self._api.create_repo, repo_id=self.id, repo_type="model", exist_ok=True)
        commit = self._asked(self._api.create_commit, repo_id=self.id, operations=added, commit_message=message)
        return str(commit.commit_url)

    def _asked(self, request: Any, **arguments: Any) -> Any:
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return request(**arguments)
        except HfHubHTTPError as error:
            status, answer = error.response.status_code, " ".join(str(error).split())[:LONGEST]
            if status in {401, 403}:
                raise UserInputError(f"--push: the Hub refuses the token for {self.id}; {LOGIN}: {answer}") from error
            raise StorageError(f"--push: the Hub answered {status} about {self.id}: {answer}") from error
        except httpx2.TransportError as error:
            raise StorageError(f"--push: the Hub cannot be reached: {error}", retryable=True) from error
