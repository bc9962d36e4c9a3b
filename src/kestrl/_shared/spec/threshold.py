"""The file `Threshold`: a job, the number that it is to reach, and where that number was published. Read by
`kestrl verify`; pure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kestrl._shared.spec.job import Metadata
from kestrl._shared.spec.load import read_kind
from kestrl._shared.spec.model import LARGEST_SEED, Model, NonNegative, PositiveInt
from kestrl._shared.spec.problems import Problem, ProblemsError
from kestrl._shared.spec.validation import validated

Number = Annotated[float, Field(strict=False)]
Text = Annotated[str, Field(min_length=1)]


class Plateau(Model):
    """The end of the curve that is judged, rather than its best point or its last one."""

    evaluations: PositiveInt = 3
    """Last evaluations, whose mean is compared. The one before training is never among them."""
    max_fall: NonNegative | None = None
    """How far a least-squares line through them may fall from the first to the last, in the metric's unit. Default: no
    limit. A line that falls further has passed the threshold on its way down."""


class Published(Model):
    """The number that somebody else reached."""

    value: Number
    """In the metric's unit."""
    setting: Text
    """How it was reached: model, method, steps, hardware."""
    source: Text
    """Where it was published."""


class ThresholdSpec(Model):
    """What is run and how it is judged."""

    job: Text
    """Manifest of the AgentRLJob, relative to this file."""
    sft: Text | None = None
    """Manifest of an SFTJob, relative to this file, which is run before; the job starts from its adapter."""
    metric: Text
    """Metric of the evaluations of the validation data, such as answer_correct or reward."""
    threshold: Number
    """Least mean of the plateaus of all seeds."""
    min_rise: NonNegative | None = None
    """Least difference, of every seed, between the plateau and the evaluation before training. Default: not judged."""
    plateau: Plateau = Plateau()
    max_failed: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.01
    """Largest share of failed episodes in an evaluation that is judged. They are in no mean."""
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]], Field(min_length=1, max_length=100)] = [42]
    """Values of `data.seed`, one run each."""
    template: Text
    """Chat template and prompt, on which such numbers depend."""
    published: Published


class Threshold(Model):
    """A convergence test of a job."""

    api_version: Literal["kestrl.dev/v1alpha1"]
    kind: Literal["Threshold"]
    metadata: Metadata
    spec: ThresholdSpec


def parse_threshold(document: Any) -> Threshold:
    """A threshold from a parsed file.

    Raises:
        ProblemsError: With every problem at once.
    """
    threshold = validated(Threshold, document)
    if len(set(threshold.spec.seeds)) < len(threshold.spec.seeds):
        raise ProblemsError([Problem("spec.seeds", "holds a seed twice, whose run would count twice; name it once")])
    return threshold


def read_threshold(path: Path) -> Threshold:
    """The threshold of a file.

    Raises:
        UserInputError: The file cannot be read.
        ProblemsError: With every problem at once.
    """
    return parse_threshold(read_kind(path, Threshold.__name__))
