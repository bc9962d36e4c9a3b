"""Commands that compare policies: eval and bench."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from kestrl._app.cli.adapters import choose_adapter
from kestrl._app.cli.options import DEFAULT_RUNS, AsJson, Details, Manifest, Overrides, RunId, Runs, Sequential, Verbose
from kestrl._app.episodes.reading import evaluated_groups
from kestrl._app.local.comparison import PolicyEvaluation, report
from kestrl._app.local.observation import run_store
from kestrl._app.local.rundir import RunDir, cache_folder, find_run
from kestrl._app.local.runner import RunOptions, run_job
from kestrl._app.local.secrets import open_storage
from kestrl._app.local.site import storage_address
from kestrl._shared.conventions import EXIT_FAILED, LEVEL_VARIABLE
from kestrl._shared.plan.bench import bench_components
from kestrl._shared.plan.components import Component
from kestrl._shared.plan.evaluation import evaluation_sampling
from kestrl._shared.plan.settings.bench import BenchEndpoint
from kestrl._shared.plan.settings.learner import EvaluateSettings, LearnerSettings
from kestrl._shared.plan.site import Site
from kestrl._shared.spec import AgentRLJob, parse_job, read_job, with_overrides
from kestrl._shared.spec.model import MOST_SAMPLES
from kestrl._shared.spec.rules.job_rules import greedy_problem
from kestrl.errors import UserInputError
from kestrl.runstate.sampling import EvaluationSampling
from kestrl.storage import ObjectStore
from kestrl.storage.tool_lists import changed_servers, read_tool_lists

console = Console()
errors = Console(stderr=True)
BASE, NEWEST = "base", "newest"
Samples = Annotated[
    int | None, typer.Option(min=1, max=MOST_SAMPLES, help="Episodes of each question (default: the job's, or else 1).")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", min=0, max=1, help="Sample from the most probable tokens with this probability; 1 is off."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", min=0, help="Sample from this many of the most probable tokens; 0 is off.")
]
VERSION = re.compile(r"v(\d+)")
ENDPOINT = "openai:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy or model to evaluate."""

    label: str
    step: int | None = None
    """Step of an adapter of the run; None for the newest."""
    base: bool = False
    model: str = ""
    """Model name at an OpenAI-compatible endpoint; empty for policies."""

    @staticmethod
    def parse(text: str, option: str) -> Candidate:
        """Reads `base`, `v12`, `newest` or `openai:NAME`.

        Raises:
            UserInputError: It is none of these.
        """
        name = text.strip()
        if name == BASE:
            return Candidate(label=name, base=True)
        if name == NEWEST:
            return Candidate(label=name)
        if match := VERSION.fullmatch(name):
            return Candidate(label=name, step=int(match[1]))
        if option == "--models" and name.startswith(ENDPOINT) and len(name) > len(ENDPOINT):
            return Candidate(label=name, model=name.removeprefix(ENDPOINT))
        choices = "base, newest, a version such as v12" + (", or openai:NAME" if option == "--models" else "")
        raise UserInputError(f"{option}: {text!r} is not one of {choices}")


def sampling_of(job: AgentRLJob, **options: float | None) -> EvaluationSampling:
    """The sampling of `kestrl eval` and `kestrl bench`: the job's, with the options that are given.

    Args:
        job: The job.
        options: Fields of `spec.evaluation`; None leaves the job's.

    Raises:
        UserInputError: The temperature is 0, with other options that would then change nothing, or top_p is 0.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    if given_options.get("top_p") == 0:
        raise UserInputError("--top-p: 0 leaves no token; use --temperature 0 for greedy episodes, or a value up to 1")
    evaluation = job.spec.evaluation.model_copy(update=given_options)
    problem = greedy_problem(evaluation)
    if problem is not None:
        raise UserInputError(f"--temperature: {problem}")
    return evaluation_sampling(job.spec, evaluation)


def candidates(text: str, option: str) -> list[Candidate]:
    """The listed candidates, each once.

    Raises:
        UserInputError: One of them is not known.
    """
    return list(dict.fromkeys(Candidate.parse(item, option) for item in text.split(",")))


def evaluate(
    run_id: RunId = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Policies to compare, such as base,v12,newest (default: newest)."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the adapter, as --policy vSTEP.")] = None,
    base: Annotated[bool, typer.Option("--base", help="The base model without an adapter, as --policy base.")] = False,
    samples: Samples = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, max=5, help="Temperature; 0 is greedy (default: the job's, or else that of training with samples)."
        ),
    ] = None,
    top_p: TopP = None,
    top_k: TopK = None,
    details: Details = False,
    print_json: AsJson = False,
    sequential: Sequential = False,
    verbose: Verbose = False,
    set_: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Evaluate policies of a run on the validation data, greedily or by several samples, side by side."""
    if policy is not None and (step is not None or base):
        raise UserInputError("--policy: name every policy there, without --step and --base")
    policy_names = policy or (BASE if base else NEWEST if step is None else f"v{step}")
    run = find_run(runs, run_id)
    job = _paced(parse_job(with_overrides(run.read_json("job.json"), set_ or ())), sequential=sequential)
    sampling = sampling_of(job, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k)
    candidate_list = candidates(policy_names, "--policy")
    addresses = [adapter_address(run, candidate) for candidate in candidate_list]
    _verbose(verbose)
    progress = errors if print_json else console
    stamp, home = datetime.now(UTC).strftime("%Y%m%dT%H%M%S"), run.path / "evaluations"
    options = RunOptions(manifest_dir=run.manifest_dir, cache_dir=cache_folder(runs))
    evaluations = [
        _evaluated(
            candidate,
            job,
            options,
            RunDir(home / f"{stamp}-{candidate.label}"),
            address,
            sampling,
            run=run,
            progress=progress,
        )
        for candidate, address in zip(candidate_list, addresses, strict=True)
    ]
    report(console, evaluations, home / f"{stamp}.json", with_details=details, print_json=print_json)


def bench(
    manifest: Manifest,
    models: Annotated[
        str, typer.Option("--models", help="Candidates, such as base,v12,openai:gpt-4.1-mini; versions are of --run.")
    ],
    run_id: Annotated[
        str | None, typer.Option("--run", help="Run whose versions are meant (default: the latest).")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(envvar="OPENAI_BASE_URL", help="OpenAI-compatible endpoint (default: OpenAI's).")
    ] = None,
    key_variable: Annotated[
        str, typer.Option("--api-key-env", help="Environment variable with the endpoint's key.")
    ] = "OPENAI_API_KEY",
    samples: Samples = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=-1,
            max=2,
            help="Temperature; 0 is greedy, and -1 leaves it to a model behind the endpoint (default: as kestrl eval).",
        ),
    ] = None,
    top_p: TopP = None,
    top_k: TopK = None,
    budget_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens, prompts included, after which a model behind the endpoint is asked nothing more (default: no "
            "limit).",
        ),
    ] = None,
    details: Details = False,
    print_json: AsJson = False,
    sequential: Sequential = False,
    verbose: Verbose = False,
    set_: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Compare policies of a run with models behind an OpenAI-compatible endpoint, on a manifest's validation data."""
    job = _paced(read_job(manifest, set_ or ()), sequential=sequential)
    if job.spec.data.validation is None:
        raise UserInputError("spec.data.validation: bench needs validation data")
    candidate_list = candidates(models, "--models")
    own_temperature = temperature is not None and temperature < 0
    sampling = sampling_of(
        job, samples=samples, temperature=None if own_temperature else temperature, top_p=top_p, top_k=top_k
    )
    if sampling.top_k and any(candidate.model for candidate in candidate_list):
        raise UserInputError(
            "--top-k: OpenAI-compatible endpoints have no such parameter; use 0 here, or compare policies alone"
        )
    if any(candidate.model for candidate in candidate_list) and not os.environ.get(key_variable):
        raise UserInputError(f"--api-key-env: {key_variable} is not set; any text will do for endpoints without a key")
    adapters = any(not candidate.model and not candidate.base for candidate in candidate_list)
    run = find_run(runs, run_id) if adapters or run_id else None
    addresses = [None if run is None else adapter_address(run, candidate) for candidate in candidate_list]
    _verbose(verbose)
    progress = errors if print_json else console
    stamp, home = datetime.now(UTC).strftime("%Y%m%dT%H%M%S"), runs.resolve() / "benchmarks"
    options = RunOptions(manifest_dir=manifest.resolve().parent, cache_dir=cache_folder(runs))
    served = BenchEndpoint(url=endpoint, key_variable=key_variable, budget_tokens=budget_tokens)
    evaluations = [
        _evaluated(
            candidate,
            job,
            options,
            RunDir(home / f"{stamp}-{_file_name(candidate)}"),
            address,
            sampling.model_copy(update={"own_temperature": own_temperature and bool(candidate.model)}),
            served,
            run,
            progress=progress,
        )
        for candidate, address in zip(candidate_list, addresses, strict=True)
    ]
    place = home / f"{job.metadata.name}-{stamp}.json"
    report(console, evaluations, place, with_details=details, print_json=print_json)


def adapter_address(run: RunDir, candidate: Candidate) -> str | None:
    """Address of a candidate's adapter; None for the base model and models behind an endpoint.

    Raises:
        UserInputError: The run has no such version.
    """
    if candidate.base or candidate.model:
        return None
    store = run_store(run)
    return store.address(choose_adapter(store, candidate.step, run.id))


def _file_name(candidate: Candidate) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", candidate.label)


def _paced(job: AgentRLJob, *, sequential: bool) -> AgentRLJob:
    """The job with workers that run one episode at a time, which is enough for evaluations: their groups have one."""
    if not sequential:
        return job
    rollout = job.spec.rollout.model_copy(update={"concurrency": 1})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"rollout": rollout})})


def _verbose(verbose: bool) -> None:
    if verbose:
        os.environ[LEVEL_VARIABLE] = "DEBUG"


def _evaluated(
    candidate: Candidate,
    job: AgentRLJob,
    options: RunOptions,
    folder: RunDir,
    address: str | None,
    sampling: EvaluationSampling,
    served: BenchEndpoint | None = None,
    run: RunDir | None = None,
    *,
    progress: Console,
) -> PolicyEvaluation:
    """Runs one candidate over the validation data; ends the program with the run's exit code if that fails.

    Args:
        candidate: The policy or model.
        job: Its tools, rewards and data.
        options: Folders.
        folder: Of the evaluation.
        address: Of the adapter; None for the base model and models behind an endpoint.
        sampling: How episodes are sampled.
        served: The endpoint of models.
        run: The run that trained the policy, if any.
        progress: Where its progress is printed.
    """

    def replan(components: Sequence[Component], site: Site) -> list[Component]:
        if candidate.model and served is not None:
            endpoint = served.model_copy(update={"model": candidate.model})
            return bench_components(components, job, site, endpoint, sampling)
        return [_evaluating(component, address, sampling) for component in components]

    code = run_job(job, folder, options, progress, replan=replan)
    summary = folder.summary()
    if code != 0 or summary is None or summary.after is None:
        raise typer.Exit(code or EXIT_FAILED)
    store = open_storage(job, options.manifest_dir, storage_address(job, folder, options.manifest_dir))
    return PolicyEvaluation(
        label=candidate.label,
        policy=summary.policy.version if summary.policy else candidate.model or BASE,
        means=summary.after,
        groups=evaluated_groups(store),
        folder=folder.path,
        sampling=sampling,
        seed=None if candidate.model else job.spec.data.seed,
        failures=summary.failures,
        changed_servers=_changed_servers(run, store) if address else (),
    )


def _changed_servers(run: RunDir | None, evaluation: ObjectStore) -> Sequence[str]:
    """Tool servers that list other tools in an evaluation than in the run that trained the policy."""
    if run is None:
        return ()
    return changed_servers(read_tool_lists(run_store(run)), read_tool_lists(evaluation))


def _evaluating(component: Component, adapter: str | None, sampling: EvaluationSampling) -> Component:
    if not isinstance(component.settings, LearnerSettings):
        return component
    changes = {"evaluate": EvaluateSettings(adapter=adapter), "evaluation": sampling}
    return replace(component, settings=component.settings.model_copy(update=changes))


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command()(bench)
