"""Checks before the operator starts: the cluster has what the operator needs, and grants its rights. One line for each
problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kestrl._shared.spec.crd import VERSION, crd, sft_crd
from kestrl.errors import UserInputError
from kestrl_operator.apiserver.client import Api, ApiProblem, Gone
from kestrl_operator.apiserver.kinds import (
    APPLIED,
    BATCH_JOB,
    DEFINITION,
    EVENT,
    JOB,
    KUEUE_WORKLOAD,
    LEASE,
    NODE,
    OLD_EVENT,
    POD,
    RESOURCE_FLAVOR,
    REVIEW,
    SFT_JOB,
    WORKLOAD_PRIORITY,
    Kind,
)
from kestrl_operator.config import OperatorConfig
from kestrl_operator.watch.streams import watched

WRITTEN = ("create", "patch")


class Right(NamedTuple):
    """A right that the operator needs."""

    verb: str
    kind: Kind
    subresource: str = ""
    namespace: str | None = None
    """The namespace; None for all."""
    name: str = ""
    """The name of the one object that the right is for; empty for all."""

    def __str__(self) -> str:
        resource = f"{self.kind.plural}{'/' if self.subresource else ''}{self.subresource}"
        group = f".{self.kind.group}" if self.kind.group else ""
        which = f" {self.name}" if self.name else ""
        return f"{self.verb} {resource}{group}{which}" + (f" in namespace {self.namespace}" if self.namespace else "")


def needed(config: OperatorConfig) -> Iterator[Right]:
    """All rights that the operator cannot work without. Pure."""
    kinds = watched(kueue=config.kueue)
    for namespace in config.namespaces or (None,):
        yield from (Right(verb, JOB, "", namespace) for verb in ("list", "watch", "delete"))
        yield from (Right("patch", kind, "status", namespace) for kind in (JOB, SFT_JOB))
        yield from (Right(verb, BATCH_JOB, "", namespace) for verb in ("get", "create"))
        yield from (Right(verb, kind, "", namespace) for kind in kinds if kind != JOB for verb in ("list", "watch"))
        yield from (Right(verb, kind, "", namespace) for kind in (*APPLIED, EVENT) for verb in WRITTEN)
        yield Right("delete", POD, "", namespace)
        yield Right("list", OLD_EVENT, "", namespace)
        if config.kueue:
            yield from (Right(verb, KUEUE_WORKLOAD, "", namespace) for verb in ("create", "patch", "delete"))
            yield Right("patch", KUEUE_WORKLOAD, "status", namespace)
            yield from (Right("patch", BATCH_JOB, subresource, namespace) for subresource in ("", "status"))
    if config.kueue:
        yield from (Right("get", kind) for kind in (RESOURCE_FLAVOR, WORKLOAD_PRIORITY))
    yield from (Right(verb, LEASE, "", config.lease.namespace, config.lease.name) for verb in ("get", "update"))
    yield Right("create", LEASE, "", config.lease.namespace)


async def preflight(api: Api, config: OperatorConfig) -> bool:
    """Runs all checks; returns whether nodes may be listed, which is optional.

    Raises:
        UserInputError: Something is missing; the message has a line for each.
        ApiProblem: The API server does not answer.
    """
    rights = list(needed(config))
    allowed = await asyncio.gather(*(_may(api, right) for right in (*rights, Right("list", NODE))))
    denials = [f"not allowed: {right}" for right, has in zip(rights, allowed, strict=False) if not has]
    if denials:
        raise UserInputError("\n".join([*denials, "the chart's ClusterRole (or Roles, with `namespaces`) grants them"]))
    for definition in (crd(), sft_crd()):
        await _check_definition(api, definition)
    if config.kueue:
        await _check_kueue(api, config)
    return allowed[-1]


async def _may(api: Api, right: Right) -> bool:
    attributes: dict[str, Any] = {
        "verb": right.verb,
        "group": right.kind.group,
        "resource": right.kind.plural,
        "subresource": right.subresource,
        **({} if right.namespace is None else {"namespace": right.namespace}),
        **({"name": right.name} if right.name else {}),
    }
    review = {"apiVersion": REVIEW.api_version, "kind": REVIEW.name, "spec": {"resourceAttributes": attributes}}
    answer = await api.create(REVIEW, {**review, "metadata": {}})
    return bool(answer["status"].get("allowed"))


async def _check_kueue(api: Api, config: OperatorConfig) -> None:
    """Checks that the cluster serves the Workloads that this operator writes."""
    try:
        async for _ in api.marks(KUEUE_WORKLOAD, next(iter(config.namespaces), None)):
            return
    except Gone as error:
        raise UserInputError(
            f"kueue.enabled is true, and this cluster serves no {KUEUE_WORKLOAD.name} of {KUEUE_WORKLOAD.api_version}: "
            "install Kueue, or set kueue.enabled to false"
        ) from error


async def _check_definition(api: Api, ours: Mapping[str, Any]) -> None:
    """Checks that a CRD is installed and has every field that this operator reads and writes."""
    name = ours["metadata"]["name"]
    try:
        installed_crd = await api.get(DEFINITION, name)
    except Gone as error:
        raise UserInputError(
            f"the CRD {name} is not installed; `helm upgrade` with crds.install, or kubectl apply it"
        ) from error
    except ApiProblem as error:
        if error.status == 403:
            return
        raise
    fields = missing_fields(ours, installed_crd)
    if fields:
        raise UserInputError(
            f"the CRD {name} is older than this operator: it has no {', '.join(fields[:5])}; upgrade it with the chart"
        )


def missing_fields(ours: Any, theirs: Any) -> list[str]:
    """Fields that this version of the CRD has and another does not. Pure."""
    have = {
        path
        for version in theirs["spec"]["versions"]
        if version["name"] == VERSION
        for path in _fields(_schema(version))
    }
    return [path for path in _fields(_schema(ours["spec"]["versions"][0])) if path not in have]


def _schema(version: Any) -> Any:
    return version["schema"]["openAPIV3Schema"]


def _fields(schema: Any, path: str = "") -> Iterator[str]:
    for name, property_schema in schema.get("properties", {}).items():
        field = f"{path}.{name}" if path else name
        yield field
        yield from _fields(property_schema, field)
    if isinstance(schema.get("items"), dict):
        yield from _fields(schema["items"], f"{path}[]")
