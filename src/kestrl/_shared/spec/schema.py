"""The JSON Schema of a manifest, for editors and for the CRD."""

from __future__ import annotations

from typing import Any

from kestrl._shared.spec.job import AgentRLJob


def job_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `AgentRLJob`, as the manifest is written."""
    schema = AgentRLJob.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
