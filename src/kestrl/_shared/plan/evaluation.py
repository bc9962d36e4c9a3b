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
    settings = evaluation or spec.evaluation
    sampled = settings.samples > 1 or settings.top_p < 1 or settings.top_k > 0
    temperature = spec.sampling.temperature if sampled else 0.0
    return EvaluationSampling(
        samples=settings.samples,
        temperature=temperature if settings.temperature is None else settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
    )
