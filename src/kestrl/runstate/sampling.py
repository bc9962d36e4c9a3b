"""How evaluations sample, in settings and in summaries."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class EvaluationSampling(BaseModel):
    """How the episodes of an evaluation are sampled. The default is greedy, one episode a question."""

    model_config = ConfigDict(frozen=True)
    samples: int = 1
    """Episodes of each question."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Probability of the smallest set of most probable tokens that are sampled from; 1 is off."""
    top_k: int = 0
    """Number of most probable tokens that are sampled from; 0 is off."""
    own_temperature: bool = False
    """Whether a model behind an endpoint has its own temperature in place of this one."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 and not self.own_temperature

    @property
    def label(self) -> str:
        """What distinguishes its distribution from others that engines sample from, such as `1-p0.6-k20`."""
        top_p = f"-p{self.top_p:g}" if self.top_p < 1 else ""
        return f"{self.temperature:g}{top_p}{f'-k{self.top_k}' if self.top_k else ''}"

    def __str__(self) -> str:
        """In words: `4 samples at temperature 1, top-p 0.6`."""
        samples = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        at = "the model's own temperature" if self.own_temperature else f"temperature {self.temperature:g}"
        top_p = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"{samples} at {at}{top_p}{f', top-k {self.top_k}' if self.top_k else ''}"


GREEDY = EvaluationSampling()
