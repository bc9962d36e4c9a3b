"""How a job's evaluations sample."""

from __future__ import annotations

from kestrl._shared.spec.job import Evaluation, JobSpec
from kestrl.runstate.sampling import EvaluationSampling


def evaluation_sampling(spec: JobSpec, evaluation: Evaluation | None = None) -> EvaluationSampling:
    """The sampling of an evaluation; without a temperature, samples have that of training and one sample is greedy.

    Args:
        spec: The job.
        evaluation: What to use in place of the job's own.
    """
    chosen = evaluation or spec.evaluation
    sampled = chosen.samples > 1 or chosen.top_p < 1 or chosen.top_k > 0
    temperature = spec.sampling.temperature if sampled else 0.0
    return EvaluationSampling(
        samples=chosen.samples,
        temperature=temperature if chosen.temperature is None else chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
    )
