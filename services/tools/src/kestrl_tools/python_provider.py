"""Tools by Python import path as a provider: a function, a class, an environment, or a class written for verl."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kestrl._shared.plan.settings.tools import ClaimEntry, ToolEntry
from kestrl.compat.verl.imports import load
from kestrl.compat.verl.tools import VerlTool, adapt_function, is_function_tool, is_verl_tool
from kestrl.episode import ACT, ENVIRONMENT_REWARD
from kestrl.errors import KestrlError, UserInputError
from kestrl.tools import SandboxInUse, ToolError, WarmPool
from kestrl.tools.arguments import Arguments
from kestrl.tools.json_schema import SchemaInvalid
from kestrl.tools.provider import (
    NO_KWARGS,
    Kwargs,
    ProviderSession,
    ToolDefinition,
    is_code_provider,
    kwargs_failure,
    refuse_fixed,
)
from kestrl.tools.schema import Described, read
from kestrl_tools.environment_classes import (
    ADAPTER_HOOKS,
    HOOKS,
    ROW_HOOK,
    SERVICE_HOOKS,
    check_reset,
    columns_taken,
    has_method,
    prompt_of,
    public_methods,
    returns_nothing,
    takes_turns,
    tool_methods,
)
from kestrl_tools.execution import guarded
from kestrl_tools.instances import EnvironmentInstance, PlainInstance, VerlInstance, is_async
from kestrl_tools.servers import secret_header
from kestrl_tools.tool_threads import ToolThreads

Hook = Callable[[], Any]
RowCheck = Callable[[Kwargs], object]


class PythonProvider:
    """A function or class of the user."""

    def __init__(
        self,
        name: str,
        tools: Sequence[ToolDefinition],
        *,
        make: Callable[[Kwargs], Awaitable[ProviderSession]],
        check: Callable[[Kwargs], object],
        environment: bool = False,
        has_state: bool = False,
        has_prompt: bool = False,
        has_reward: bool = False,
        acts: bool = False,
        start: Hook | None = None,
        stop: Hook | None = None,
        row_check: RowCheck | None = None,
    ) -> None:
        """Describes the provider.

        Args:
            name: Name in rows.
            tools: Its tools.
            make: Creates an episode's instance from `create_kwargs`; raises ToolFailure for invalid ones.
            check: Checks `create_kwargs` against the signature; raises ToolFailure for invalid ones.
            environment: Whether the tools are methods of one instance.
            has_state: Whether the instance has a `state()` or a `get_reward()` method.
            has_prompt: Whether its `reset()` may return text for the prompt.
            has_reward: Whether the instance has a `get_reward()` method.
            acts: Whether its tool `act` takes the model's turns.
            start: Called once when the service starts, with the manifest's `config`.
            stop: Called once when the service ends.
            row_check: Raises for `create_kwargs` with which no instance can work, such as a file that is gone.
        """
        self.name, self.environment = name, environment
        self.has_state, self.has_prompt, self.has_reward = has_state, has_prompt, has_reward
        self.acts = acts
        self._tools, self._make, self._check = tools, make, check
        self._start, self._stop = start, stop
        self.row_check = row_check
        self._started = False
        self.sandbox: SandboxInUse | None = None
        """The sandbox in which the tool runs code, as `start_service` has returned it."""

    @property
    def prepared_by_service(self) -> bool:
        """Whether sessions need what `start_service` makes."""
        return self._start is not None

    async def list_tools(self) -> Sequence[ToolDefinition]:
        return self._tools

    def check(self, create_kwargs: Kwargs) -> None:
        self._check(create_kwargs)

    async def start(self) -> None:
        if self._start is not None:
            returned = await _called(self._start)
            self.sandbox = returned if isinstance(returned, SandboxInUse) else None
        self._started = True

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        return await self._make(create_kwargs)

    def health(self) -> str:
        return ""

    async def stop(self) -> None:
        if self._started and self._stop is not None:
            await _called(self._stop)


async def _called(hook: Hook) -> Any:
    result = hook()
    return await result if inspect.isawaitable(result) else result


def python_provider(entry: ToolEntry, field: str, threads: ToolThreads) -> PythonProvider:
    """Imports what an entry of the manifest names.

    Raises:
        UserInputError: It cannot be used as a tool; the message has the field and the fix.
    """
    assert entry.use is not None
    obj = load(entry.use, field=f"{field}.use")
    if is_code_provider(obj):
        problem = "runs code in sandboxes of its own, so it is no environment and has no `process`; remove it"
        raise UserInputError(f"{field}.use: {entry.use} {problem}")
    _refuse_method(obj, entry.use, field)
    try:
        if entry.claim is not None:
            _check_claim(obj)
        if is_verl_tool(obj):
            provider = _verl(obj, entry)
        elif _is_environment(obj, entry):
            return _environment(obj, entry, threads)
        else:
            provider = _class(obj, entry, threads) if inspect.isclass(obj) else _function(obj, entry, threads)
    except UserInputError as error:
        raise UserInputError(f"{field}.use: {entry.use}: {error}") from error
    if entry.methods is not None:
        raise UserInputError(
            f"{field}.methods: {entry.use} is not an environment: its methods cannot be tools; remove it"
        )
    return provider


def _refuse_method(obj: Any, use: str, field: str) -> None:
    owner, _, method = use.rpartition(".")
    if ":" in owner and inspect.isfunction(obj) and inspect.isclass(load(owner, field=f"{field}.use")):
        raise UserInputError(
            f"{field}.use: {use} is a method, which needs an instance: write `use: {owner}` and `methods: "
            f"[{method}]`, "
            "and each episode has one"
        )


def _is_environment(obj: Any, entry: ToolEntry) -> bool:
    if not inspect.isclass(obj):
        return False
    if entry.environment is not None:
        return True
    callable_ = any("__call__" in vars(base) for base in obj.__mro__)
    return entry.methods is not None or (not callable_ and bool(public_methods(obj)))


def _function(obj: Any, entry: ToolEntry, threads: ToolThreads) -> PythonProvider:
    described = read(obj, entry.name, fixed=tuple(entry.config))
    _bind(obj, entry)
    function = adapt_function(obj) if is_function_tool(obj) else obj
    target = partial(function, **entry.config) if entry.config else function

    def check(create_kwargs: Kwargs) -> None:
        if create_kwargs:
            raise kwargs_failure(
                entry.name, "create_kwargs", "it is a function, and only classes are created per episode"
            )

    async def make(create_kwargs: Kwargs) -> ProviderSession:
        check(create_kwargs)
        instance = PlainInstance(entry.name, threads, sync=not is_async(obj))
        instance.use(target)
        return instance

    tool = _definition(described, fixed=frozenset(entry.config))
    return PythonProvider(entry.name, [tool], make=make, check=check)


def _class(cls: type, entry: ToolEntry, threads: ToolThreads) -> PythonProvider:
    described = read(cls, entry.name)
    _bind(cls, entry)

    async def make(create_kwargs: Kwargs) -> ProviderSession:
        instance = PlainInstance(entry.name, threads, sync=not is_async(cls))
        return await _made(instance, partial(cls, **_arguments(cls, entry, create_kwargs)))

    check = partial(_arguments, cls, entry)
    start, stop = _service_hooks(cls, entry)
    return PythonProvider(
        entry.name,
        [_definition(described)],
        make=make,
        check=check,
        start=start,
        stop=stop,
        row_check=_row_check(cls, entry),
    )


def _service_hooks(cls: Any, entry: ToolEntry) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
    """What a class does once per service, at its start and at its end.

    Raises:
        UserInputError: A hook is not a class method.
    """
    for name in SERVICE_HOOKS:
        if has_method(cls, name) and getattr(getattr(cls, name), "__self__", None) is not cls:
            raise UserInputError(f"{cls.__name__}.{name} is called before there is an instance: make it a classmethod")
    start, claim = getattr(cls, "start_service", None), entry.claim
    stop = getattr(cls, "stop_service", None)
    if start is not None and claim is not None:
        return lambda: start(**entry.config, warm_pool=warm_pool_of(claim)), stop
    return (partial(start, **entry.config) if start else None), stop


def _row_check(cls: Any, entry: ToolEntry) -> RowCheck | None:
    """The class's own check of what a row sets; None if it has none.

    Raises:
        UserInputError: It needs an instance.
    """
    if not has_method(cls, ROW_HOOK):
        return None
    if inspect.isfunction(inspect.getattr_static(cls, ROW_HOOK)):
        raise UserInputError(f"{cls.__name__}.{ROW_HOOK} is called without an instance: make it a staticmethod")
    hook = getattr(cls, ROW_HOOK)
    return lambda create_kwargs: hook(**{**entry.config, **create_kwargs})


def _check_claim(obj: Any) -> None:
    """Checks that a tool can run code in claimed sandboxes.

    Raises:
        UserInputError: Its `start_service` does not take the pool, or it has none.
    """
    start = getattr(obj, "start_service", None)
    if start is None or "warm_pool" not in inspect.signature(start).parameters:
        raise UserInputError("has no `start_service` that takes `warm_pool`, so that it cannot have `sandbox.claim`")


def warm_pool_of(claim: ClaimEntry) -> WarmPool:
    """What an entry claims, with the present token.

    Raises:
        UserInputError: The token is not set, or a header cannot hold it.
    """
    return WarmPool(
        name=claim.warm_pool,
        token=secret_header("sandbox.claim", claim.token),
        port=claim.port,
        bind_seconds=claim.bind_seconds,
        use_seconds=claim.use_seconds,
        keep_seconds=claim.keep_seconds,
        read_token=partial(secret_header, "sandbox.claim", claim.token),
    )


def _environment(cls: type, entry: ToolEntry, threads: ToolThreads) -> PythonProvider:
    acts = takes_turns(cls, entry)
    names = [name for name in tool_methods(cls, entry) if not (acts and name in ADAPTER_HOOKS)]
    resets = has_method(cls, "reset")
    silent = not resets or returns_nothing(cls)
    has_reward = has_method(cls, ENVIRONMENT_REWARD)
    if resets:
        _bind(cls, entry, whole=True)
    else:
        _bind(cls, entry)
    hooks = (*HOOKS, *ADAPTER_HOOKS) if acts else HOOKS
    called_methods = [*names, *(hook for hook in hooks if has_method(cls, hook))]
    sync = not all(inspect.iscoroutinefunction(getattr(cls, name)) for name in called_methods)

    def columns(create_kwargs: Kwargs) -> Kwargs:
        return create_kwargs if entry.environment is None else columns_taken(cls, create_kwargs)

    def check(create_kwargs: Kwargs) -> dict[str, Any]:
        of_row = resets or entry.environment is not None
        arguments = _arguments(cls, entry, NO_KWARGS if of_row else create_kwargs)
        if resets:
            check_reset(cls, entry, columns(create_kwargs))
        return arguments

    async def make(create_kwargs: Kwargs) -> ProviderSession:
        factory = partial(cls, **check(create_kwargs))
        instance = EnvironmentInstance(
            entry.name,
            threads,
            sync=sync,
            reads_state=has_method(cls, "state"),
            reads_reward=has_reward,
            reads_gold=acts and has_method(cls, "gold"),
        )
        await _made(instance, factory)
        if resets:
            await _begun(instance, entry, columns(create_kwargs), silent=silent)
        return instance

    start, stop = _service_hooks(cls, entry)
    return PythonProvider(
        entry.name,
        [
            *([_definition(read(cls, ACT, method=ACT))] if acts else []),
            *(_definition(read(cls, name, method=name)) for name in names),
        ],
        make=make,
        check=check,
        environment=True,
        has_state=has_method(cls, "state") or has_reward,
        has_prompt=not silent,
        has_reward=has_reward,
        acts=acts,
        start=start,
        stop=stop,
        row_check=_row_check(cls, entry),
    )


def _definition(described: Described, *, fixed: frozenset[str] = frozenset()) -> ToolDefinition:
    return ToolDefinition(
        schema=described.schema,
        arguments=described.arguments,
        fillable=described.fillable,
        required=described.required,
        fixed=fixed,
    )


def _arguments(cls: type, entry: ToolEntry, create_kwargs: Kwargs) -> dict[str, Any]:
    """Arguments of the constructor; raises ToolFailure if the row's are invalid."""
    refuse_fixed(entry.name, "create_kwargs", entry.config, create_kwargs)
    kwargs = {**entry.config, **create_kwargs}
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise kwargs_failure(entry.name, "create_kwargs", f"{cls.__name__}: {error}") from error
    return kwargs


async def _made(instance: PlainInstance, factory: Callable[[], Any]) -> PlainInstance:
    try:
        await instance.make(factory)
    except BaseException:
        await instance.close()  # stops its thread
        raise
    return instance


async def _begun(instance: EnvironmentInstance, entry: ToolEntry, create_kwargs: Kwargs, *, silent: bool) -> None:
    try:
        instance.prompt = prompt_of(entry.name, await instance.invoke("reset", create_kwargs), silent=silent)
    except BaseException:
        with suppress(KestrlError, ToolError):  # logged by `guarded`; the exception of reset() is the one to raise
            await guarded(entry.name, instance.close())
        raise


def _verl(cls: type, entry: ToolEntry) -> PythonProvider:
    tool = VerlTool(cls, entry.config)
    schema = tool.schema(entry.name)

    async def make(create_kwargs: Kwargs) -> ProviderSession:
        return VerlInstance(tool, await tool.create(create_kwargs))

    try:
        definition = ToolDefinition(schema=schema, arguments=Arguments(schema.parameters))
    except SchemaInvalid as error:
        raise UserInputError(f"the schema of its parameters cannot be used: {error}") from error
    # verl's classes take any create_kwargs.
    return PythonProvider(entry.name, [definition], make=make, check=lambda _: None)


def _bind(obj: Any, entry: ToolEntry, *, whole: bool = False) -> None:
    """Checks the manifest's `config`. The scenario's `create_kwargs` are not known yet, unless `whole` is set."""
    signature = inspect.signature(obj)
    try:
        (signature.bind if whole else signature.bind_partial)(**entry.config)
    except TypeError as error:
        raise UserInputError(f"its config does not fit: {error}") from error
