"""Preflight check of a job: everything that it references exists, can be loaded, and is consistent.

Shared by `kestrl validate`, `kestrl doctor` and the start of `kestrl run`, so that no engine starts for a job that
cannot run. User code, tokenizer and template are checked by the services that use them, in child processes
(`kestrl._shared.checking`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from kestrl._app.downloads import present_files
from kestrl._app.interpreters.agents import agent_python
from kestrl._app.local.findings import Findings, few, tasks_of_both, unknown_tools, without_ground_truth
from kestrl._app.local.secrets import Secrets
from kestrl._app.local.site import engine_warnings, interpreter_of, local_path, planned_settings
from kestrl._shared.checking import Report, RewardsCheck, RolloutCheck, ToolsCheck, ask
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.settings.common import DataSettings, SettingsModel
from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.spec import AgentRLJob, ProblemsError
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.rules.adapter_rules import expert_problems
from kestrl._shared.spec.rules.job_rules import check
from kestrl._shared.spec.rules.model_rules import fitted, model_problems
from kestrl.data.locate import locate_data, locate_model
from kestrl.data.rows import DataRow, read_rows
from kestrl.errors import UserInputError, problems_of
from kestrl.storage.uris import LOCAL_SCHEMES, scheme_of

LOAD_SECONDS = 120.0
"""Time limit in seconds for importing the user's code, or for loading a tokenizer and checking the template."""
ROW_SECONDS = 0.02
"""Additional seconds per row."""
HERE = LOCAL_SCHEMES | {"demo", "hf"}
"""URI schemes that can be checked on one machine; a cluster supports more."""

Found = TypeVar("Found")


def fitted_job(job: AgentRLJob, base: Path) -> AgentRLJob:
    """The job with the context length that its model allows, where the manifest sets none and the model is a folder.

    Raises:
        UserInputError: The model does not exist, or other fields do not fit that length.
    """
    if scheme_of(job.spec.model.base) not in HERE:
        return job
    fit = fitted(job, model_config(locate_model(job.spec.model.base, base=base)))
    if fit is not job and (problems := check(fit.spec)):
        raise ProblemsError(problems)
    return fit


def check_job(
    job: AgentRLJob, *, base: Path, cache_dir: Path, data: bool = True, model: bool = True, engine: bool | None = None
) -> Findings:
    """Checks everything that a job references.

    Args:
        job: A job from a valid manifest.
        base: The manifest's folder.
        cache_dir: Folder for generated data.
        data: Whether to read the data sets.
        model: Whether to load tokenizer and chat template.
        engine: Whether to look for the engine; None: where the job names an interpreter for it.
    """
    check = _Check(job, base, cache_dir)
    if job.spec.inference.python is not None if engine is None else engine:
        check.engine()
    return check.run(data=data, model=model)


class _Check:
    def __init__(self, job: AgentRLJob, base: Path, cache_dir: Path) -> None:
        self._job, self._base, self._cache_dir = job, base, cache_dir
        self._found = Findings()
        self._agent_python: str | None = None

    def run(self, *, data: bool, model: bool) -> Findings:
        findings = self._found
        folder = self._try(self._model) if model else None
        spec = self._job.spec
        findings.problems += Secrets(self._job, self._base).problems()
        template = self._try(self._template)
        self._agent_python = self._try(lambda: agent_python(spec.agent))
        files = self._files() if data else {}
        rows = {name: data_rows for name, file in files.items() if (data_rows := self._try(partial(_read, file)))}
        findings.rows = {name: len(data_rows) for name, data_rows in rows.items()}
        settings = self._settings(folder or "", template)
        with ThreadPoolExecutor(max_workers=2) as threads:
            tools_future = threads.submit(self._tools, settings[Role.TOOLS], {name: files[name] for name in rows}, rows)
            judge_future = threads.submit(self._rewards, settings[Role.JUDGE], {name: files[name] for name in rows})
            tools, judge = tools_future.result(), judge_future.result()
        self._take(judge)
        self._take(tools)
        findings.problems = list(dict.fromkeys(findings.problems))  # a missing secret of a tool is found twice
        findings.problems += tools.facts.get("problems", ())
        self._environment_rewards(tools)
        findings.add_misfits(self._job.spec.agent, tools.facts.get("rows", ()))
        offered = tools.facts.get("tools", ())
        servers = {tool.label for tool in spec.tools if tool.use is None}
        for tool in (tool for tool in offered if tool["environment"] in servers):
            findings.servers.setdefault(str(tool["environment"]), []).append(str(tool["name"]))
        names = [str(tool["name"]) for tool in offered]
        names += dict.fromkeys(str(tool["environment"]) for tool in offered if tool["environment"])
        for data_rows in rows.values():
            if not (tools.problems or tools.missing or tools.facts.get("away")):
                findings.problems += few(unknown_tools(data_rows, names))
            findings.problems += few(without_ground_truth(data_rows, [reward.rule for reward in spec.rewards]))
        self._step_can_be_filled(rows.get("train", ()), 0)
        if spec.data.held_out_apart:
            findings.warnings += tasks_of_both(rows.get("train", ()), rows.get("validation", ()))
        rollout = settings[Role.ROLLOUT]
        assert isinstance(rollout, RolloutSettings)
        has_interpreter = spec.agent.python is None or self._agent_python is not None
        has_interpreter &= rollout.environment is None or rollout.environment.python is not None
        if folder is not None and not tools.problems and has_interpreter:
            self._rollout(rollout, tools.facts.get("tools", ()), files, rows)
        return findings

    def engine(self) -> None:
        """Looks for the engine of this machine."""
        self._found.warnings += self._try(lambda: engine_warnings(self._job, self._base)) or ()

    def _try(self, look: Callable[[], Found]) -> Found | None:
        try:
            return look()
        except UserInputError as error:
            self._found.problems += problems_of(error)
            return None

    def _away(self, uri: str, field: str) -> bool:
        """Whether an address can only be read by pods of a cluster."""
        if scheme_of(uri) in HERE:
            return False
        self._found.warnings.append(f"{field}: {uri} is not on this machine; not checked")
        return True

    def _model(self) -> str | None:
        uri = self._job.spec.model.base
        if self._away(uri, "spec.model.base"):
            return None
        self._job = fitted_job(self._job, self._base)
        model = locate_model(uri, base=self._base)
        self._found.problems += [str(problem) for problem in _model_problems(self._job, model)]
        return model

    def _template(self) -> str | None:
        template = self._job.spec.agent.template
        field = "spec.agent.template.uri"
        if template is None or template.uri is None or self._away(template.uri, field):
            return None
        return local_path(template.uri, self._base, field)

    def _files(self) -> dict[str, DataSettings]:
        data_spec = self._job.spec.data
        files: dict[str, DataSettings] = {}
        for name, data_set in {"train": data_spec.train, "validation": data_spec.validation}.items():
            field = f"spec.data.{name}.uri"
            if data_set is None or self._away(data_set.uri, field):
                continue
            look = partial(
                locate_data,
                data_set.uri,
                size=data_set.size,
                base=self._base,
                seed=data_spec.seed,
                cache_dir=self._cache_dir,
                field=field,
            )
            path = self._try(look)
            if path is not None:
                promptless = self._job.spec.environment is not None
                files[name] = DataSettings(path=str(path), size=data_set.size, promptless=promptless)
        return files

    def _settings(self, model: str, template: str | None) -> dict[Role, SettingsModel]:
        python = self._try(lambda: interpreter_of(self._job.spec.environment))
        return planned_settings(
            self._job,
            self._base,
            model=model,
            template=template,
            environment_python=python,
            agent_python=self._agent_python,
            files=self._try(partial(present_files, self._job, self._base)) or {},
        )

    def _ask(
        self,
        module: str,
        settings: SettingsModel,
        subject: str,
        seconds: float = LOAD_SECONDS,
        variables: Mapping[str, str] | None = None,
    ) -> Report:
        assert isinstance(settings, ToolsCheck | RewardsCheck | RolloutCheck)
        return ask(module, settings, subject=subject, seconds=seconds, variables=variables)

    def _take(self, report: Report) -> None:
        self._found.problems += report.problems
        self._found.warnings += report.facts.get("warnings", ())
        if report.missing:
            self._found.warnings.append(f"{report.missing} is not installed; what it loads was not checked")

    def _tools(
        self, settings: SettingsModel, files: dict[str, DataSettings], rows: Mapping[str, Sequence[DataRow]]
    ) -> Report:
        assert isinstance(settings, ToolsSettings)
        seconds = LOAD_SECONDS + ROW_SECONDS * sum(map(len, rows.values()))
        try:
            secrets = Secrets(self._job, self._base).tools()
        except UserInputError as error:
            return Report({}, problems_of(error))
        absent = tuple(file.uri for file in self._job.spec.data.files if file.uri not in settings.files)
        for uri in absent:
            self._found.warnings.append(f"spec.data.files: {uri} is not here yet; what rows say of it is not checked")
        check = ToolsCheck(tools=settings, data=files, absent=absent)
        environment = self._job.spec.environment
        if environment is None or environment.owns_loop:
            return self._ask("kestrl_tools.check", check, "spec.tools", seconds, secrets)
        if settings.tools[0].environment is not None and settings.tools[0].environment.python is None:
            return Report({}, missing="the interpreter of spec.environment")
        return self._ask("kestrl_tools.check", check, "spec.environment", seconds + environment.start_timeout, secrets)

    def _rewards(self, settings: SettingsModel, files: dict[str, DataSettings]) -> Report:
        assert isinstance(settings, JudgeSettings)
        check = RewardsCheck(judge=settings, data=files, max_turns=self._job.spec.agent.max_turns)
        return self._ask("kestrl_judge.check", check, "spec.rewards")

    def _environment_rewards(self, tools: Report) -> None:
        """Compares the rule `environment_reward` with the environments that have a reward."""
        environment = self._job.spec.environment
        if (
            (environment is not None and environment.owns_loop)
            or tools.problems
            or tools.missing
            or tools.facts.get("away")
        ):
            return
        rewarded: Sequence[str] = tools.facts.get("rewarded", ())
        rules = [reward.rule for reward in self._job.spec.rewards]
        if "environment_reward" in rules and not rewarded:
            self._found.problems.append(
                f"spec.rewards[{rules.index('environment_reward')}].rule: no environment of spec.tools has a method "
                "get_reward(): add one that returns a number, or take another rule"
            )
        elif rewarded and "environment_reward" not in rules:
            self._found.warnings.append(
                f"spec.rewards: nothing takes the reward of {', '.join(rewarded)}; add `rule: environment_reward`"
            )

    def _rollout(
        self,
        settings: RolloutSettings,
        tools: Sequence[Any],
        files: dict[str, DataSettings],
        rows: dict[str, Sequence[DataRow]],
    ) -> None:
        check = RolloutCheck(rollout=settings, tools=tuple(tools), data={name: files[name] for name in rows})
        seconds = LOAD_SECONDS + ROW_SECONDS * sum(map(len, rows.values()))
        seconds += settings.environment.start_seconds if settings.environment is not None else 0.0
        report = self._ask("kestrl_rollout.check", check, "spec.model.base, spec.agent", seconds)
        self._take(report)
        for name, data_rows in rows.items():
            self._overlong(name, data_rows, report.facts.get("overlong", {}).get(name, ()))

    def _overlong(self, name: str, rows: Sequence[DataRow], overlong: Sequence[Sequence[int]]) -> None:
        """Reports rows whose prompts do not fit the context: they are skipped, and a data set with no other rows is a
        problem.
        """
        if not overlong:
            return
        findings, length = self._found, self._job.spec.inference.context_length
        ordinal, tokens = overlong[0]
        finding = (
            f"{len(overlong)} of {len(rows)} {name} rows do not fit inference.contextLength ({length}), the first at "
            f"{rows[ordinal].place} with {tokens} tokens"
        )
        findings.rows[name] = len(rows) - len(overlong)
        if findings.rows[name] == 0:
            findings.problems.append(f"spec.data.{name}: {finding}; raise it or shorten the rows")
            return
        findings.warnings.append(f"spec.data.{name}: {finding}; they are skipped")
        if name == "train":
            self._step_can_be_filled(rows, len(overlong))

    def _step_can_be_filled(self, rows: Sequence[DataRow], skipped: int) -> None:
        spec = self._job.spec
        usable, groups_per_step = (len(rows) - skipped) * spec.schedule.epochs, spec.algorithm.groups_per_step
        if rows and usable < groups_per_step:
            self._found.problems.append(
                f"spec.data.train: {len(rows) - skipped} usable rows x {spec.schedule.epochs} epochs do not fill one "
                f"step of {groups_per_step} groups; lower spec.algorithm.groupsPerStep, or give more rows"
            )


def _model_problems(job: AgentRLJob, model: str) -> Iterator[Problem]:
    """Problems of the job with a model in a folder; those of a Hugging Face id are found when it is loaded."""
    config = model_config(model)
    yield from expert_problems(config, model)
    yield from model_problems(job.spec, config)


def model_config(model: str) -> dict[str, Any]:
    """Fields of a model's config.json; empty for what is not a folder, or what fails where the model is loaded."""
    try:
        config: Any = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def _read(file: DataSettings) -> Sequence[DataRow]:
    return read_rows(Path(file.path), size=file.size, promptless=file.promptless)
