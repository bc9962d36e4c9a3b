"""From a job object to the Kubernetes objects it becomes on this cluster, or to the error in it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.planning import has_rank_pods, plan
from kestrl._shared.prepare import check_addresses
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.load import parse_job
from kestrl.errors import UserInputError
from kestrl_operator.credentials import derive
from kestrl_operator.render import Given, render
from kestrl_operator.render.job import preparation
from kestrl_operator.render.quota import quota_request
from kestrl_operator.state.accelerators import Node, Placement, unsatisfiable
from kestrl_operator.state.admission import QuotaRequest
from kestrl_operator.state.chart_values import Cluster, LearnerState
from kestrl_operator.state.cluster import identity_of, placed_file, site_of, storage_of
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import ACCEPTED, STATE, STORAGE
from kestrl_operator.status.lifecycle import Decision, Stage

Object = dict[str, Any]
NOTHING: Mapping[str, str] = {}
ANYWHERE: Mapping[str, Placement] = {}
LIFECYCLE = ("suspend", "activeDeadline", "pendingDeadline", "ttlAfterFinished", "failurePolicy")
"""Spec fields that no object is rendered from: their newest values apply even if the rest of the spec is invalid."""
LARGEST_SPEC = 192 * 1024
"""Bytes of JSON. The last accepted spec is kept in an annotation, and Kubernetes allows 256 KiB of annotations per
object."""


class Manifests:
    """Renders jobs with the administrator's choices and the key that credentials are derived from."""

    def __init__(self, cluster: Cluster, key: bytes) -> None:
        self._cluster, self._key = cluster, key

    def read(self, key: Key, raw: Mapping[str, Any]) -> AgentRLJob:
        """The job described by an object, validated for this cluster.

        Raises:
            UserInputError: The manifest does not describe a job for this cluster; the message names the field and the
                fix.
        """
        size = len(rendered_from(raw.get("spec") or {}).encode())
        if size > LARGEST_SPEC:
            raise UserInputError(
                f"spec: is {size // 1024} KiB of JSON, and a job on a cluster may have {LARGEST_SPEC // 1024}; "
                "put large values into files that data or tools name"
            )
        job = _parsed(key, raw, raw.get("spec"))
        self._check_builds(job)
        self._check_ranks(job)
        _check_interpreter(job)
        _check_sharing(job)
        _check_environment(job)
        _check_telemetry(job)
        _check_files(job)
        for role in (Role.LEARNER, Role.ROLLOUT):
            check_addresses(preparation(job, role))
        self.objects(key, raw["metadata"]["uid"], job, Decision(stage=Stage.RUNNING, parked=False))
        return job

    def last_accepted(self, key: Key, raw: Mapping[str, Any], annotations: Mapping[str, str]) -> AgentRLJob | None:
        """The job of the spec that was applied last, with the lifecycle fields of the newest; None if none was applied.

        Args:
            key: Namespace and name of the job.
            raw: The job object, whose spec is invalid or refused.
            annotations: Annotations of the learner's StatefulSet.
        """
        if ACCEPTED not in annotations:
            return None
        try:
            accepted: Object = json.loads(annotations[ACCEPTED])
        except ValueError:
            return None
        newest_spec: Object = raw.get("spec") or {}
        lifecycle_fields = {name: newest_spec[name] for name in LIFECYCLE if name in newest_spec}
        # All lifecycle fields, or, where one of them is invalid, the longest prefix that is valid.
        for added in (lifecycle_fields, *({name: value} for name, value in lifecycle_fields.items())):
            with suppress(UserInputError):
                job = _parsed(key, raw, {**accepted, **added})
                accepted |= added
                if added is lifecycle_fields:
                    return job
        try:
            return _parsed(key, raw, accepted)
        except UserInputError:
            return None

    def _check_builds(self, job: AgentRLJob) -> None:
        """Checks that there is an image for the devices of the job; raises `UserInputError`."""
        spec, images = job.spec, self._cluster.images
        key, engines = images.engines(spec.inference.engine)
        for part, profile, builds, field in (
            ("inference", spec.inference.accelerator.profile, engines, key),
            ("learner", spec.learner.accelerator.profile, images.learner, "learner"),
        ):
            build = self._cluster.profile(profile).image
            if build not in builds:
                raise UserInputError(
                    f"spec.{part}.accelerator.profile: {profile!r} runs the build {build!r}, for which this cluster "
                    f"has no image {f'with {spec.inference.engine} ' if part == 'inference' else ''}"
                    f"(the chart's jobs.images.{field}.{build}); there are: {', '.join(sorted(builds)) or 'none'}"
                )

    def _check_ranks(self, job: AgentRLJob) -> None:
        """Checks that nothing but ranks can reach ranks of several pods; raises `UserInputError`."""
        if has_rank_pods(job.spec) and not self._cluster.network_policies:
            raise UserInputError(
                "spec.learner.replicas: ranks of several pods trust whatever reaches them, and jobs of this cluster "
                "have no NetworkPolicies (the chart's jobs.networkPolicies is false); use 1, or have the administrator "
                "turn them on"
            )

    def unsatisfiable(self, job: AgentRLJob, nodes: Sequence[Node]) -> str:
        """Why no node could ever run a pod of the job; empty when one could."""
        for part, accelerator in (
            ("inference", job.spec.inference.accelerator),
            ("learner", job.spec.learner.accelerator),
        ):
            reason = unsatisfiable(self._cluster.profile(accelerator.profile), accelerator.count, nodes)
            if reason:
                return f"spec.{part}.accelerator (profile {accelerator.profile}): {reason}"
        return ""

    def objects(
        self,
        key: Key,
        uid: str,
        job: AgentRLJob,
        decision: Decision,
        *,
        queue: str | None = None,
        annotations: Mapping[str, str] = NOTHING,
        accepted: str = "",
        placements: Mapping[str, Placement] = ANYWHERE,
    ) -> list[Object]:
        """All objects of a job, as returned by `render`.

        Args:
            key: Namespace and name of the job.
            uid: Uid of the job object.
            job: The job.
            decision: The decision that the objects carry out.
            queue: Queue in which each workload asks Kueue for quota by itself; None for none.
            annotations: Current annotations of the learner's StatefulSet: the storage of a run stays even if the
                administrator's default has changed since.
            accepted: The spec that is rendered, as returned by `rendered_from`.
            placements: Where Kueue wants the pods of a role.

        Raises:
            UserInputError: The job has no storage, or a patch changes a field that jobs must not change.
        """
        uri, secret = storage_of(job, self._cluster)
        if job.spec.storage.uri is None:
            uri = annotations.get(STORAGE) or uri
        cluster = self._cluster
        if STATE in annotations:
            cluster = cluster.model_copy(update={"learner_state": LearnerState.model_validate_json(annotations[STATE])})
        run = f"{key.name}-{uid.partition('-')[0]}"
        site = site_of(
            job, key.namespace, cluster, run=run, storage=f"{uri.rstrip('/')}/{run}", traceparent=traceparent(uid)
        )
        return render(
            Given(
                job=job,
                namespace=key.namespace,
                uid=uid,
                components=plan(job, site),
                cluster=cluster,
                secrets=derive(self._key, uid),
                storage=uri,
                store=secret,
                identity=identity_of(job, key.namespace, self._cluster),
                parked=decision.parked,
                attempts=decision.attempts,
                restarts=decision.restarts,
                forgiven=decision.forgiven,
                accepted=accepted,
                queue=queue,
                placements=placements,
            )
        )

    def quota_request(self, key: Key, uid: str, job: AgentRLJob, queue: str, priority_class: str) -> QuotaRequest:
        """What a job asks its queue for; raises `UserInputError` as `objects` does."""
        objects = self.objects(key, uid, job, Decision(stage=Stage.RUNNING, parked=False))
        return quota_request(job.spec, objects, queue, priority_class)


def rendered_from(spec: Mapping[str, Any]) -> str:
    """The part of a spec that objects are rendered from, as JSON."""
    fields = {name: value for name, value in spec.items() if name not in LIFECYCLE}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _check_interpreter(job: AgentRLJob) -> None:
    """Checks that interpreters are those of images; raises `UserInputError`."""
    if job.spec.agent.python is not None and job.spec.agent.image is None:
        raise UserInputError(
            "spec.agent.python: pods install nothing; give spec.agent.image, an image that has the requirements"
        )
    python = job.spec.inference.python
    if python is not None and not python.startswith("/"):
        raise UserInputError(
            f"spec.inference.python: {python} is relative to the manifest, which pods do not have; name the absolute "
            "path of an interpreter in the engine's image, or remove the field"
        )


def _check_sharing(job: AgentRLJob) -> None:
    """Refuses turns on one device, as each pod has devices of its own; raises `UserInputError`."""
    if job.spec.inference.sharing == "turns":
        raise UserInputError(
            "spec.inference.sharing: turns is for one machine: on a cluster engines and learner are pods, with devices "
            "of their own; use split"
        )


def _check_environment(job: AgentRLJob) -> None:
    """Checks that an environment has an image with its interpreter; raises `UserInputError`."""
    environment = job.spec.environment
    if environment is not None and environment.image is None:
        raise UserInputError(
            "spec.environment.image: is required on a cluster, where pods install nothing: an image with the "
            "environment, its requirements and a python3"
        )


def _check_files(job: AgentRLJob) -> None:
    """Refuses files that are on one machine; raises `UserInputError`."""
    for index, file in enumerate(job.spec.data.files):
        if placed_file(file.uri) is None:
            raise UserInputError(
                f"spec.data.files[{index}].uri: {file.uri!r} is a place on one machine; on a cluster name "
                "s3://BUCKET/PATH#sha256=DIGEST, gs://... or az://..."
            )


def _check_telemetry(job: AgentRLJob) -> None:
    """Refuses a server that is on one machine; raises `UserInputError`."""
    tracking = job.spec.telemetry.mlflow
    if tracking is not None and tracking.uri.startswith("sqlite:"):
        raise UserInputError(
            f"spec.telemetry.mlflow.uri: {tracking.uri} is a database of one machine; on a cluster name the address of "
            "a server: http://mlflow.NAMESPACE.svc:5000, for example"
        )


def _parsed(key: Key, raw: Mapping[str, Any], spec: Any) -> AgentRLJob:
    """The job of a spec; raises `UserInputError`."""
    metadata = {"name": key.name, "namespace": key.namespace}
    return parse_job({"apiVersion": raw["apiVersion"], "kind": raw["kind"], "metadata": metadata, "spec": spec})


def traceparent(uid: str) -> str:
    """The W3C trace context of the job's root span. The trace id is the job's uid, so it needs no storage and can be
    looked up.
    """
    trace = uid.replace("-", "").ljust(32, "0")[:32]
    return f"00-{trace}-{trace[:16]}-01"
