"""The target MLflow over HTTP: a run by REST, the traces of its episodes by OTLP."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from kestrl._app.push.mlflow.connection import ContentRefused, MLflowConnection, NotFound
from kestrl._app.push.mlflow.spans import spans_of
from kestrl._app.push.numbers import numbers_of, settings_of
from kestrl._app.push.target import PartRefused, PushedRun, Target, TargetRefused
from kestrl.errors import encodable
from kestrl.runstate.states import RunPhase
from kestrl.storage.episodes import EpisodeBatch, StoredEpisode
from kestrl.storage.summary import RunSummary

IDENTITY, RUN, STORAGE, JOB = "kestrl.identity", "kestrl.run", "kestrl.storage", "kestrl.job"
METRICS, PARAMS = 1000, 100
"""Most of each that one request may have."""
LONGEST_VALUE = 500
REQUEST_BYTES = 4_000_000
"""Size of a request with traces, if more than one episode is in it."""
NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")
ENDED = {RunPhase.SUCCEEDED: "FINISHED", RunPhase.FAILED: "FAILED"}
STOPPED = "KILLED"


class MLflow(Target):
    """An MLflow server.

    Args:
        connection: The connection to it.
        experiment: Name of the experiment; empty for that of the job.
        named: Its address as a person named it: the database where the server is one of ours.
    """

    def __init__(self, connection: MLflowConnection, experiment: str, *, location: str) -> None:
        self.key = f"mlflow {location} {experiment}"
        self._connection, self._experiment = connection, experiment
        self._experiment_id = self._run = ""

    def open(self, run: PushedRun, *, live: bool) -> str:
        self._experiment_id = self._find_experiment(self._experiment or run.job)
        identity = hashlib.sha256(f"{run.id}\n{run.storage}".encode()).hexdigest()[:32]
        info = self._find_run(identity) or self._create_run(run, identity)
        self._run = str(info["run_id"])
        if live and info.get("status") != "RUNNING":
            self._connection.post("runs/update", run_id=self._run, status="RUNNING")
        return self._run

    def _find_experiment(self, name: str) -> str:
        try:
            answer = self._connection.get("experiments/get-by-name", experiment_name=name)
        except NotFound:
            return str(self._connection.post("experiments/create", name=name)["experiment_id"])
        experiment = cast("Mapping[str, Any]", answer["experiment"])
        if experiment.get("lifecycle_stage") == "deleted":
            raise TargetRefused(
                f"the experiment {name!r} of {self._connection.uri} is deleted; restore it, or name one"
            )
        return str(experiment["experiment_id"])

    def _find_run(self, identity: str) -> Mapping[str, Any] | None:
        condition = f"tags.`{IDENTITY}` = '{identity}'"
        query = {"experiment_ids": [self._experiment_id], "filter": condition, "max_results": 1}
        answer = self._connection.post("runs/search", **query)
        return next((run["info"] for run in answer.get("runs", ())), None)

    def _create_run(self, run: PushedRun, identity: str) -> Mapping[str, Any]:
        tags = {IDENTITY: identity, RUN: run.id, STORAGE: run.storage, JOB: run.job}
        tag_list = [{"key": name, "value": encodable(text)[:LONGEST_VALUE]} for name, text in tags.items()]
        run_fields = {"run_name": run.id, "start_time": int(time.time() * 1000), "tags": tag_list}
        answer = self._connection.post("runs/create", experiment_id=self._experiment_id, **run_fields)
        info = cast("Mapping[str, Any]", answer["run"]["info"])
        params = [{"key": _name(name), "value": text[:LONGEST_VALUE]} for name, text in settings_of(run.settings)]
        for portion in _portions(params, PARAMS):
            self._connection.post("runs/log-batch", run_id=info["run_id"], params=portion)
        return info

    def metrics(self, step: int, record: Mapping[str, Any], at: float) -> None:
        self._log(step, numbers_of(record), at)

    def evaluation(self, step: int, means: Mapping[str, Any], at: float) -> None:
        self._log(step, numbers_of(means, "eval/"), at)

    def _log(self, step: int, numbers: Iterator[tuple[str, float]], at: float) -> None:
        # With the time of the stored record, a metric that is sent again is the same one.
        moment = int(at * 1000)
        metrics = [{"key": _name(key), "value": number, "timestamp": moment, "step": step} for key, number in numbers]
        for portion in _portions(metrics, METRICS):
            self._connection.post("runs/log-batch", run_id=self._run, metrics=portion)

    def episodes(self, batch: EpisodeBatch) -> None:
        pending: list[list[Span]] = []
        refused: list[str] = []
        size = 0
        for stored in batch.stored:
            for episode in stored.group.episodes:
                spans = list(spans_of(StoredEpisode(batch.purpose, batch.step, stored, episode), self._run))
                weight = sum(span.ByteSize() for span in spans)
                if pending and size + weight > REQUEST_BYTES:
                    refused += self._send(pending)
                    pending, size = [], 0
                pending.append(spans)
                size += weight
        if pending:
            refused += self._send(pending)
        if refused:
            raise PartRefused(f"{len(refused)} episodes, the others are sent: {refused[0]}")

    def _send(self, traces: Sequence[Sequence[Span]]) -> list[str]:
        """Sends traces, and returns why some are refused. The server refuses a request as a whole: each half of it is
        sent again, until the others are stored.
        """
        headers = {"x-mlflow-experiment-id": self._experiment_id, "x-mlflow-run-id": self._run}
        try:
            self._connection.post_traces(_request(traces).SerializeToString(), headers)
        except ContentRefused as error:
            if len(traces) == 1:
                return [f"episode {_episode_of(traces[0])!r}: {error}"]
            middle = len(traces) // 2
            return [*self._send(traces[:middle]), *self._send(traces[middle:])]
        return []

    def finish(self, summary: RunSummary, at: float) -> None:
        moment = int(at * 1000) or int(time.time() * 1000)
        means = [*numbers_of(summary.before or {}, "before/"), *numbers_of(summary.after or {}, "after/")]
        self._log(summary.steps, iter(means), at)
        facts = {
            "kestrl.result": str(summary.status),
            "kestrl.reason": summary.reason,
            "kestrl.policy": "" if summary.policy is None else summary.policy.version,
            "kestrl.adapter": "" if summary.policy is None else summary.policy.uri,
            "kestrl.learned": "" if summary.learned is None else str(summary.learned).lower(),
            "kestrl.failures": json.dumps(summary.failures) if summary.failures else "",
        }
        tags = [{"key": name, "value": encodable(text)[:LONGEST_VALUE]} for name, text in facts.items() if text]
        self._connection.post("runs/log-batch", run_id=self._run, tags=tags)
        status = ENDED.get(summary.status, STOPPED)
        self._connection.post("runs/update", run_id=self._run, status=status, end_time=moment)

    def close(self) -> None:
        self._connection.close()


def _request(traces: Sequence[Sequence[Span]]) -> ExportTraceServiceRequest:
    spans = [span for trace in traces for span in trace]
    service = KeyValue(key="service.name", value=AnyValue(string_value="kestrl"))
    resource = Resource(attributes=[service])
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans)])]
    )


def _episode_of(spans: Sequence[Span]) -> str:
    return next(
        attribute.value.string_value for attribute in spans[0].attributes if attribute.key == "kestrl.episode.id"
    )


def _name(name: str) -> str:
    """A name that MLflow takes for a metric or parameter."""
    return NOT_IN_NAMES.sub("_", encodable(name))[:250]


def _portions(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(entries), size):
        yield entries[begin : begin + size]
