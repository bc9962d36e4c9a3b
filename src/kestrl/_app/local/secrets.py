"""Secrets on one machine: the file `NAME.env` beside the manifest replaces the Kubernetes Secret NAME.

Each component gets the variables of its secrets, as on a cluster: those of the storage go to the learner and the engine
agents, and those in `patches` to their container. No value is ever printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.judges import judge_keys
from kestrl._shared.plan.tools import tool_secrets
from kestrl._shared.spec import AgentRLJob
from kestrl.errors import UserInputError, problems_of
from kestrl.storage import ObjectStore, open_store

LARGEST_FILE = 1024 * 1024
"""Maximum size in bytes, as for a Kubernetes Secret."""
STORAGE_ROLES = (Role.LEARNER, Role.INFERENCE)
"""Roles that access the storage of the run."""
ASSIGNMENT = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*(?P<value>.*)")
SINGLE = re.compile(r"'(?P<text>[^']*)'\s*(?:#.*)?")
DOUBLE = re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)"\s*(?:#.*)?')
COMMENT = re.compile(r"(?:^|\s+)#.*$")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$"}
Variables = Mapping[str, str]


def read_env(path: Path, field: str) -> dict[str, str]:
    """Reads a `.env` file: `NAME=VALUE` per line, with bare values, single quotes, or double quotes with escapes.

    Args:
        path: The file.
        field: Manifest field that references the file.

    Raises:
        UserInputError: The file is missing, unreadable or malformed. The message has file and line, never a value.
    """
    try:
        content = path.read_bytes()
        if len(content) > LARGEST_FILE:
            raise UserInputError(f"{path}: is longer than {LARGEST_FILE} bytes, the most that a Secret holds")
        lines = content.decode("utf-8-sig").splitlines()
    except FileNotFoundError as error:
        raise UserInputError(
            f"{field}: {path} does not exist; create it with the secret's entries, one NAME=VALUE per line"
        ) from error
    except OSError as error:
        raise UserInputError(f"{field}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UserInputError(f"{field}: {path} is not UTF-8") from None  # the error's text contains bytes of the file
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, value = _assignment(line.strip(), f"{path}:{number}")
        if name in variables:
            raise UserInputError(f"{path}:{number}: {name} is set twice; remove one")
        variables[name] = value
    return variables


def _assignment(line: str, where: str) -> tuple[str, str]:
    match = ASSIGNMENT.fullmatch(line)
    if match is None:
        raise UserInputError(f"{where}: is not NAME=VALUE")
    name, value = match["name"], match["value"]
    if "\0" in value:
        raise UserInputError(f"{where}: the value of {name} contains a NUL, which variables cannot")
    if value.startswith(("'", '"')):
        quoted = (SINGLE if value[0] == "'" else DOUBLE).fullmatch(value)
        if quoted is None:
            raise UserInputError(
                f"{where}: the quotes of {name} do not enclose one value on one line; write a line break as \\n"
            )
        return name, quoted["text"] if value[0] == "'" else _unescaped(quoted["text"])
    return name, COMMENT.sub("", value)


def _unescaped(text: str) -> str:
    """Replaces escapes; a backslash before any other character is kept."""
    return re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[0]), text)


class Secrets:
    """The secrets of a job, each read from its file once."""

    def __init__(self, job: AgentRLJob, manifest_dir: Path) -> None:
        self._job, self._folder = job, manifest_dir
        self._read: dict[str, dict[str, str]] = {}

    def _secret(self, name: str, field: str) -> dict[str, str]:
        if name not in self._read:
            self._read[name] = read_env(self._folder / f"{name}.env", field)
        return self._read[name]

    def storage(self) -> Variables:
        """Variables for the storage; empty if the job has no storage secret.

        Raises:
            UserInputError: The file is missing or malformed.
        """
        reference = self._job.spec.storage.secret_ref
        return {} if reference is None else self._secret(reference.name, "spec.storage.secretRef")

    def judge(self) -> dict[str, str]:
        """Variables with the API keys of judge models; empty if the job names no secret of a judge.

        Raises:
            UserInputError: A file is missing or malformed, or does not have the key.
        """
        return {name: self._entry(*reference) for name, reference in judge_keys(self._job.spec).items()}

    def tools(self) -> dict[str, str]:
        """Variables with the secrets of tools.

        Raises:
            UserInputError: A file is missing or malformed, or does not have the key.
        """
        return {name: self._entry(*reference) for name, reference in tool_secrets(self._job.spec).items()}

    def mlflow(self) -> Variables:
        """Variables for the MLflow server of `telemetry`; empty if the job has no secret for it.

        Raises:
            UserInputError: The file is missing or malformed.
        """
        tracking = self._job.spec.telemetry.mlflow
        reference = None if tracking is None else tracking.secret_ref
        return {} if reference is None else self._secret(reference.name, "spec.telemetry.mlflow.secretRef")

    def problems(self) -> Iterator[str]:
        """What is wrong with the files of all secrets, one problem for each of a role."""
        for read_secrets in (self.storage, self.judge, self.tools, self.mlflow, self._patched):
            try:
                read_secrets()
            except UserInputError as error:
                yield from problems_of(error)

    def _entry(self, secret: str, key: str, field: str) -> str:
        secret_entries = self._secret(secret, field)
        if key not in secret_entries:
            raise UserInputError(f"{field}: {self._folder / secret}.env holds no {key}")
        return secret_entries[key]

    def by_role(self) -> Mapping[Role, Variables]:
        """Variables of each role.

        Raises:
            UserInputError: A file is missing or malformed, or does not have a referenced key.
        """
        granted: dict[Role, dict[str, str]] = {role: dict(self.storage()) for role in STORAGE_ROLES}
        granted[Role.JUDGE] = self.judge()
        granted[Role.TOOLS] = self.tools()
        for role, variables in self._patched().items():
            granted.setdefault(role, {}).update(variables)
        return granted

    def _patched(self) -> dict[Role, dict[str, str]]:
        """Variables of the containers of `patches`."""
        granted: dict[Role, dict[str, str]] = {}
        for number, patch in enumerate(self._job.spec.patches):
            field = f"spec.patches[{number}].template.spec.containers"
            for container in _objects(_object(patch.template.get("spec")).get("containers")):
                name = container.get("name")
                if isinstance(name, str) and name in set(Role):
                    granted.setdefault(Role(name), {}).update(self._of_container(container, field))
        return granted

    def _of_container(self, container: Mapping[str, Any], field: str) -> dict[str, str]:
        """Variables of a container from secrets: `envFrom`, then `env`, as in Kubernetes."""
        variables: dict[str, str] = {}
        for source in _objects(container.get("envFrom")):
            if "secretRef" in source:
                secret_entries = self._secret(_text(_object(source["secretRef"]), "name", field), field)
                variables |= {f"{source.get('prefix', '')}{name}": value for name, value in secret_entries.items()}
        for entry in _objects(container.get("env")):
            reference = _object(_object(entry.get("valueFrom")).get("secretKeyRef"))
            if reference:
                value = self._entry(_text(reference, "name", field), _text(reference, "key", field), field)
                variables[_text(entry, "name", field)] = value
        return variables


def _object(value: Any) -> Mapping[str, Any]:
    """A JSON object of a patch; empty for any other value, which only the API server can validate."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [_object(item) for item in cast(Any, value)] if isinstance(value, list) else []


def _text(reference: Mapping[str, Any], key: str, field: str) -> str:
    value = reference.get(key)
    if not isinstance(value, str) or not value or "/" in value:
        raise UserInputError(f"{field}: a reference to a secret has no usable `{key}`: {value!r}")
    return value


@contextmanager
def variables_set(variables: Variables) -> Generator[None]:
    """Sets environment variables of this process within a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def open_storage(job: AgentRLJob, manifest_dir: Path, uri: str, *, create: bool = True) -> ObjectStore:
    """Opens the store at an address with the job's credentials. Child processes do not inherit the credentials.

    Raises:
        UserInputError: The address cannot be opened, or the credentials' file is missing or malformed.
    """
    with variables_set(Secrets(job, manifest_dir).storage()):
        return open_store(uri, create=create)
