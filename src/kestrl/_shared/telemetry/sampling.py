"""Sampling of traces by group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from kestrl._shared.telemetry.names import Attr, SpanName


class GroupRatio(Sampler):
    """Samples a share of the spans of groups, and all others.

    The id of the group decides, so that every attempt and process decides alike.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if name == SpanName.GROUP and not self._sampled(str((attributes or {}).get(Attr.GROUP_ID, trace_id))):
            return SamplingResult(Decision.DROP)
        return ALWAYS_ON.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def _sampled(self, group: str) -> bool:
        return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8]) < self._ratio * 2**64

    def get_description(self) -> str:
        return f"GroupRatio{{{self._ratio}}}"


def sampler(ratio: float) -> Sampler:
    """Parent-based sampler: a group is sampled where it begins, and everything in it with it, in every process."""
    groups = GroupRatio(ratio)
    return ParentBased(root=groups, local_parent_sampled=groups)
