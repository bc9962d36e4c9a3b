"""What `kestrl validate` says of files that rows name by their uri."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app import downloads
from kestrl._app.cli.main import app
from kestrl._shared.spec.scalars import PinnedFile

pytestmark = pytest.mark.share
CODE = '''
from pathlib import Path


def check_row(*, database: str) -> None:
    if not Path(database).is_file():
        raise ValueError(f"{database} is gone")


class Search:
    """Searches."""

    check_row = staticmethod(check_row)

    def __init__(self, *, database: str) -> None: ...

    def __call__(self, word: str) -> str:
        """Finds a word.

        Args:
            word: The word.
        """
        return word
'''
DIGEST = hashlib.sha256(b"mail").hexdigest()
URI = f"s3://bucket/mail.sqlite#sha256={DIGEST}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(downloads.VARIABLE, str(tmp_path / "kept"))
    (tmp_path / "mine.py").write_text(CODE)
    row = {"question": "?", "ground_truth": "1", "tools": {"search": {"create_kwargs": {"database": URI}}}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def validated(folder: Path, *files: dict[str, str]) -> dict[str, Any]:
    spec = {
        "model": {"base": "demo://tiny"},
        "data": {"train": {"uri": "rows.jsonl"}, "files": list(files)},
        "tools": [{"name": "search", "use": "mine:Search"}],
        "rewards": [{"rule": "exact_answer"}],
        "algorithm": {"groupsPerStep": 1},
    }
    document = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"name": "mail"}, "spec": spec}
    (folder / "job.yaml").write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["validate", str(folder / "job.yaml"), "--json", "--no-model"])
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_a_row_names_a_listed_file_and_no_other(folder: Path) -> None:
    (problem,) = validated(folder)["problems"]
    assert problem.startswith(f"{folder}/rows.jsonl:1: search: {URI} is not one of spec.data.files")


def test_a_file_that_is_not_here_is_a_warning_and_one_that_is_gets_checked(folder: Path) -> None:
    listed = {"uri": URI, "size": "1Mi"}
    printed = validated(folder, listed)
    assert (printed["problems"], printed["warnings"]) == (
        [],
        [f"spec.data.files: {URI} is not here yet; what rows say of it is not checked"],
    )
    pinned = PinnedFile.read(URI)
    assert pinned is not None
    here = Path(pinned.place(str(folder / "kept")))
    here.parent.mkdir(parents=True)
    here.write_bytes(b"mail")
    printed = validated(folder, listed)
    assert (printed["problems"], printed["warnings"]) == ([], [])
