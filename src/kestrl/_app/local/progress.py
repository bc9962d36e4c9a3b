"""The state of a run in words, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kestrl.runstate.history import IdleTime
from kestrl.runstate.state import RunState

SHOWN_FIRST = ("reward", "answer_correct", "num_turns")
"""Means that every view shows if present, in this order."""
BARS = "▁▂▃▄▅▆▇█"


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def means_line(means: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {means[name]:.3f}" for name in SHOWN_FIRST if name in means)


def change_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Means on the held-out questions before and after training: `reward 0.110 -> 0.710`."""
    names = [name for name in SHOWN_FIRST if name in before and name in after]
    return "  ".join(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in names)


def sparkline(numbers: Sequence[float]) -> str:
    """Numbers as bars, the smallest the lowest; equal ones are in the middle."""
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    if high - low <= 0:
        return BARS[len(BARS) // 2] * len(numbers)
    return "".join(BARS[round((number - low) / (high - low) * (len(BARS) - 1))] for number in numbers)


def step_words(state: RunState) -> str:
    """`training step 3/40`; the phase alone while the number of steps is not known."""
    phase = str(state.activity.phase or "in an unknown phase")
    return f"{phase} {steps}" if (steps := done_words(state)) else phase


def done_words(state: RunState) -> str:
    """`step 3/40`; empty while the number of steps is not known."""
    return f"step {state.steps.done}/{state.steps.total}" if state.steps.total else ""


def held_out_line(before: Mapping[str, float] | None, latest: Mapping[str, float] | None) -> str:
    """Held-out means before training and last; those of one evaluation if there is no other."""
    if before and latest and before != latest:
        return change_line(before, latest)
    return means_line(latest or before or {})


def policy_words(state: RunState) -> str:
    """`v3`, or that there is none."""
    return "none yet" if state.policy.version is None else f"v{state.policy.version.step}"


def failure_counts(failures: Mapping[str, int]) -> str:
    """Counts of failures, the most frequent first."""
    worst_first = sorted(failures.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{name} {count}" for name, count in worst_first)


def builds_words(state: RunState) -> str:
    """`vllm 0.32.0, policies named by its engine`: builds of the engines that have proved a policy; empty before."""
    return "; ".join(
        f"{build.engine} {build.version}, policies named by its {build.witness}" for build in state.engines.builds
    )


def idle_words(idle: IdleTime) -> str:
    """`learner 41% (groups 40%, policy 1%), engines 55% (update 50%, tools 5%)`; empty if nothing is known."""
    parts: list[str] = []
    for name, share, reasons, total in (
        ("learner", idle.learner_share, idle.learner, idle.seconds),
        ("engines", idle.engine_share, idle.engines, idle.engine_seconds),
    ):
        if share is not None:
            ordered = sorted(reasons.items(), key=lambda reason: -reason[1])
            reason_shares = ", ".join(f"{reason} {seconds / total:.0%}" for reason, seconds in ordered)
            parts.append(f"{name} {share:.0%}" + (f" ({reason_shares})" if reason_shares else ""))
    return ", ".join(parts)


def detail_lines(state: RunState) -> list[str]:
    """Facts of a run that `kestrl status` shows, one a line."""
    version = "none yet" if state.policy.version is None else state.policy.version.name
    lines = [f"policy {version} proved {state.engines.verified}/{state.engines.total}"]
    if builds := builds_words(state):
        lines.append(f"engines: {builds}")
    if idle := idle_words(state.last_step.idle):
        lines.append(f"idle in the last step: {idle}")
    lines += [f"sandbox of {name}: {sandbox}" for name, sandbox in sorted(state.tools.sandboxes.items())]
    return lines


def warnings(state: RunState) -> list[str]:
    """What is wrong with a run that goes on."""
    lines = [f"waiting: {wait}" for wait in (state.storage.wait, state.tools.wait) if wait]
    lines += [f"nothing is learned: {state.learning.message}"] if state.learning.learned is False else []
    lines += [state.learning.warning] if state.learning.warning else []
    lines += [f"tools: {state.tools.warning}"] if state.tools.warning else []
    return lines


def one_line(state: RunState) -> str:
    """The state as one plain line, for output that is not a terminal."""
    last, history, engines = state.last_step, state.history, state.engines
    parts = [step_words(state)]
    if state.means:
        parts.append(means_line(state.means))
    if state.policy.version is not None:
        parts.append(f"policy {policy_words(state)} proved {engines.verified}/{engines.total}")
    if last.tokens_per_second:
        parts.append(f"{last.tokens_per_second:.0f} tokens/s")
    if last.eta_seconds:
        parts.append(f"{clock(last.eta_seconds)} to go")
    if history.failures:
        parts.append(f"failures {failure_counts(history.failures)}")
    if history.skipped_rows:
        parts.append(f"skipped rows {history.skipped_rows}")
    if state.activity.message:
        parts.append(state.activity.message)
    return " | ".join(parts)
