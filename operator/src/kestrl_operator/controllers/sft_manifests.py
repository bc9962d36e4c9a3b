"""From an SFTJob object to the Kubernetes objects it becomes on this cluster, or to the error in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl._shared.prepare import check_addresses
from kestrl._shared.spec.sft import SFTJob, parse_sft_job
from kestrl_operator.render.quota import held
from kestrl_operator.render.sft import SFTGiven, accelerator_of, preparation, profile_of, render_sft
from kestrl_operator.state.accelerators import Node, unsatisfiable
from kestrl_operator.state.admission import PRIORITY_LABEL
from kestrl_operator.state.chart_values import Cluster
from kestrl_operator.state.cluster import identity_of, storage_of
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import QUEUE_LABEL

Object = dict[str, Any]
NO_LABELS: Mapping[str, str] = {}
QUEUE_LABELS = (QUEUE_LABEL, PRIORITY_LABEL)


class SFTManifests:
    """Renders SFTJobs with the administrator's choices."""

    def __init__(self, cluster: Cluster, *, kueue: bool = False) -> None:
        self._cluster, self._kueue = cluster, kueue

    def read(self, key: Key, raw: Mapping[str, Any]) -> SFTJob:
        """The job described by an object.

        Raises:
            UserInputError: The manifest does not describe a job; the message names the field and the fix.
        """
        metadata = {"name": key.name, "namespace": key.namespace}
        job = parse_sft_job(
            {"apiVersion": raw["apiVersion"], "kind": raw["kind"], "metadata": metadata, "spec": raw.get("spec")}
        )
        check_addresses(preparation(job))
        return job

    def objects(
        self, key: Key, uid: str, job: SFTJob, *, labels: Mapping[str, str] = NO_LABELS, storage: str = ""
    ) -> list[Object]:
        """All objects of a job, as returned by `render_sft`.

        Args:
            key: Namespace and name of the job.
            uid: Uid of the job object.
            job: The job.
            labels: Labels of the job object. Where this operator uses Kueue, the Job of one that names a queue begins
                without pods; where it does not, the Job has the labels for Kueue, too.
            storage: Storage of its runs when it began; empty before.

        Raises:
            UserInputError: This cluster cannot run the job.
        """
        uri, secret = storage_of(job, self._cluster)
        inputs = SFTGiven(
            job=job,
            namespace=key.namespace,
            uid=uid,
            cluster=self._cluster,
            storage=storage or uri,
            secret=secret,
            identity=identity_of(job, key.namespace, self._cluster),
            queue_labels={label: labels[label] for label in QUEUE_LABELS if label in labels and not self._kueue},
        )
        *needed, batch = render_sft(inputs)
        return [*needed, held(batch) if self._kueue and QUEUE_LABEL in labels else batch]

    def unsatisfiable(self, job: SFTJob, nodes: Sequence[Node]) -> str:
        """Why no node could ever run the job's pod; empty when one could."""
        accelerator = accelerator_of(job)
        reason = unsatisfiable(profile_of(job, self._cluster), accelerator.count, nodes)
        return f"spec.learner (profile {accelerator.profile}): {reason}" if reason else ""
