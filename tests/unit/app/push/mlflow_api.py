"""What a running MLflow server says by its API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and what its API says."""

    uri: str

    def post(self, method: str, **body: Any) -> dict[str, Any]:
        answer = httpx2.post(f"{self.uri}/api/{method}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, method: str, **parameters: str) -> dict[str, Any]:
        answer = httpx2.get(f"{self.uri}/api/{method}", params=parameters, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def experiment(self, name: str) -> str:
        found = self.get("2.0/mlflow/experiments/get-by-name", experiment_name=name)
        return str(found["experiment"]["experiment_id"])

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        return self.post("2.0/mlflow/runs/search", experiment_ids=[self.experiment(experiment)]).get("runs", [])

    def traces(self, experiment: str, condition: str = "") -> dict[str, dict[str, Any]]:
        """The traces of an experiment by their episode; fails if one episode has two."""
        where = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": self.experiment(experiment)}}
        found: list[dict[str, Any]] = []
        token: dict[str, str] | None = {}
        while token is not None:
            page = self.post("3.0/mlflow/traces/search", locations=[where], filter=condition, max_results=100, **token)
            found += page.get("traces", [])
            token = {"page_token": page["next_page_token"]} if page.get("next_page_token") else None
        by_episode = {trace["tags"]["kestrl.episode.id"]: trace for trace in found}
        assert len(by_episode) == len(found)
        return by_episode

    def spans(self, trace: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The spans of a trace, with the JSON of their attributes read."""
        answer = httpx2.get(
            f"{self.uri}/ajax-api/3.0/mlflow/get-trace-artifact", params={"request_id": trace["trace_id"]}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        spans = answer.json()["spans"]
        return [{**span, **{name: json.loads(text) for name, text in span["attributes"].items()}} for span in spans]
