"""The messages of a slot over a WebSocket, `GET /v1/slot` of `kestrl sandbox serve`, as JSON with bytes in base64.

The server greets with `Greeting`; every `SlotRequest` gets one `SlotAnswer`. A connection has at most one session,
which ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from kestrl_sandbox.contract import Echo, Isolation, Language, Limits, Outcome, Result, Run, SandboxFailure

SLOT_PATH = "/v1/slot"
MAX_MESSAGE = 96 << 20
"""Bytes of a message: standard input and files of a run in base64."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Greeting(_Message):
    """The first message of a server."""

    backend: str
    isolation: Isolation
    mechanisms: dict[str, str]
    memory_mb: int
    """Largest memory limit of a run."""


class SlotRequest(_Message):
    """A run. Code is bytes, since it may have characters that UTF-8 does not encode."""

    session: bool
    """Whether the run continues the session of the connection."""
    code: bytes
    language: Language
    echo: Echo
    stdin: bytes
    files: dict[str, bytes]
    fetch: list[str]
    seconds: float
    memory_mb: int | None
    output_bytes: int
    file_bytes: int

    @classmethod
    def of(cls, run: Run, *, session: bool) -> SlotRequest:
        limits = run.limits
        return cls(
            session=session,
            code=run.code.encode("utf-8", "surrogatepass"),
            language=run.language,
            echo=run.echo,
            stdin=run.stdin,
            files=dict(run.files),
            fetch=list(run.fetch),
            seconds=limits.seconds,
            memory_mb=limits.memory_mb,
            output_bytes=limits.output_bytes,
            file_bytes=limits.file_bytes,
        )

    def run(self) -> Run:
        return Run(
            code=self.code.decode("utf-8", "surrogatepass"),
            language=self.language,
            echo=self.echo,
            stdin=self.stdin,
            files=self.files,
            fetch=self.fetch,
            limits=Limits(
                seconds=self.seconds,
                memory_mb=self.memory_mb,
                output_bytes=self.output_bytes,
                file_bytes=self.file_bytes,
            ),
        )


class ResultMessage(_Message):
    """A `Result`."""

    outcome: Outcome
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    seconds: float
    files: dict[str, bytes]
    missing: dict[str, str]
    display: str | None
    error: dict[str, str] | None
    message: str

    @classmethod
    def of(cls, result: Result) -> ResultMessage:
        return cls(
            outcome=result.outcome,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout=result.stdout,
            stderr=result.stderr,
            stdout_truncated=result.stdout_truncated,
            stderr_truncated=result.stderr_truncated,
            seconds=result.seconds,
            files=dict(result.files),
            missing=_encodable(result.missing),
            display=None if result.display is None else _text(result.display),
            error=None if result.error is None else _encodable(result.error),
            message=_text(result.message),
        )

    def result(self) -> Result:
        return Result(**{name: getattr(self, name) for name in type(self).model_fields})


class FailureMessage(_Message):
    """A failure of the sandbox."""

    code: str
    message: str
    retryable: bool

    @classmethod
    def of(cls, error: SandboxFailure) -> FailureMessage:
        return cls(code=error.code, message=_text(str(error)), retryable=error.retryable)

    def error(self) -> SandboxFailure:
        return SandboxFailure(self.message, code=self.code, retryable=self.retryable)


class SlotAnswer(_Message):
    """The answer to a `SlotRequest`: one of `result`, `failure` and `refused`."""

    result: ResultMessage | None = None
    failure: FailureMessage | None = None
    refused: str | None = None
    """Why the run was not started: its fields cannot be used."""
    alive: bool = True
    """Whether the session's state is still there."""


def request_of(text: str) -> SlotRequest | SlotAnswer:
    """The request in a message, or the answer that refuses it."""
    try:
        request = SlotRequest.model_validate_json(text)
        request.code.decode("utf-8", "surrogatepass")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return SlotAnswer(refused=f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}")
    except UnicodeDecodeError as error:
        return SlotAnswer(refused=f"code: is no UTF-8 ({error.reason})")
    return request


def _encodable(texts: Mapping[str, str]) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in texts.items()}


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
