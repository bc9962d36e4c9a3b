"""A server of OpenEnv: it shows a word, and the model's turn is to be the same word."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# ruff: noqa: ARG002 - arguments are as OpenEnv gives them
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from repeat import similarity


class Say(Action):
    word: str


class Shown(Observation):
    text: str = ""


class RepeatEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._word, self._state = "", State(episode_id="", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, word: str = "", **_: Any) -> Shown:
        self._word, self._state = word, State(episode_id=episode_id or "", step_count=0)
        return Shown(text=word, done=False)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Shown:
        return Shown(text="Thank you.", done=True, reward=similarity(action.word, self._word))

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(RepeatEnvironment, Say, Shown, max_concurrent_envs=64)
