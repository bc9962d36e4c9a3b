"""Stand-ins for the modules of verl that agent loops and tools import.

They are used even where verl is installed: the originals would start ray and torch, and verl's base class would handle
tokens itself. Other modules are imported from the installed verl, without running the `__init__` of their parent
packages.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from kestrl import importing
from kestrl.compat.verl import names, tool_names
from kestrl.errors import UserCodeError, UserInputError

_LOOP = (
    *("AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "AsyncLLMServerManager", "DictConfigWrap"),
    *("LLMServerClient", "TokenOutput", "ToolListWrap", "register"),
)
MODULES: dict[str, tuple[str, ...]] = {
    "verl.experimental.agent_loop": _LOOP,
    "verl.experimental.agent_loop.agent_loop": _LOOP,
    "verl.experimental.agent_loop.tool_parser": ("FunctionCall", "ToolParser"),
    "verl.experimental.agent_loop.utils": ("build_gpt_oss_tool_response_text",),
    "verl.tools": (),
    "verl.tools.base_tool": ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"),
    "verl.tools.function_tool": (
        *("FUNCTION_TOOL_REGISTRY", "FunctionTool", "function_tool", "get_function_tool"),
        "normalize_function_tool_return",
    ),
    "verl.tools.schemas": (
        *("OpenAIFunctionCallSchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionParsedSchema"),
        *("OpenAIFunctionPropertySchema", "OpenAIFunctionSchema", "OpenAIFunctionToolCall"),
        *("OpenAIFunctionToolSchema", "ToolResponse"),
    ),
    "verl.tools.tool_registry": ("initialize_tools_from_config",),
    "verl.tools.utils.tool_registry": ("initialize_tools_from_config",),
    "verl.utils.profiler": ("simple_timer",),
    "verl.utils.ray_utils": ("get_event_loop",),
    "verl.utils.rollout_trace": ("rollout_trace_attr", "rollout_trace_op"),
    "verl.workers.rollout.llm_server": ("LLMServerClient",),
    "verl.workers.rollout.replica": ("TokenOutput",),
}
"""Contents of each stand-in."""
PACKAGES = frozenset(
    ".".join(path.split(".")[:depth]) for path in MODULES for depth in range(1, len(path.split(".")) + 1)
)
MEDIA = frozenset({"torch", "PIL", "PIL.Image"})
"""Modules that verl's own loops import for images and video, which a rollout worker does not need."""


class _StandIn(Loader):
    """Fills a stand-in module with its names."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        del spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "A stand-in of KestRL; see kestrl.compat.verl."
        for name in MODULES.get(module.__name__, ()):
            setattr(module, name, getattr(names if hasattr(names, name) else tool_names, name))


class _Finder(MetaPathFinder):
    """Finds the stand-ins before any installed module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if fullname not in PACKAGES:
            return None
        spec = ModuleSpec(fullname, _StandIn(), is_package=True)
        real = PathFinder.find_spec(fullname, path)
        spec.submodule_search_locations = list((real and real.submodule_search_locations) or ())
        return spec


class _Media(MetaPathFinder, Loader):
    """Replaces modules for images and video that are not installed: usable in annotations, an error when used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname in MEDIA else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        del spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__") or f"{module.__name__}.{name}" in MEDIA:
                raise AttributeError(name)  # a submodule is imported then
            return type(name, (_Missing,), {"__module__": module.__name__})

        vars(module)["__getattr__"] = missing


class _Missing:
    """An attribute of a module that is not installed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options
        raise UserCodeError(
            f"{type(self).__module__}.{type(self).__name__} was used, but {type(self).__module__} is not installed "
            "here",
            code="unsupported_content",
        )


_finder = _Finder()


def install() -> None:
    """Registers the stand-ins; nothing is imported before a file asks for it."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def load(path: str, *, field: str) -> Any:
    """Loads an import path whose module may import verl.

    Raises:
        UserInputError: As `kestrl.importing.load`.
    """
    install()
    try:
        return importing.load(path, field=field)
    except UserInputError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name not in MEDIA:
            raise
        with _media():
            candidate = importing.load(path, field=field)
        if not is_loop(candidate):
            raise  # a user's file that needs the module
        return candidate


@contextmanager
def _media() -> Generator[None]:
    finder, before = _Media(), set(sys.modules)
    sys.meta_path.append(finder)  # the last: what is installed comes first
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in MEDIA & (set(sys.modules) - before):
            if getattr(sys.modules[name], "__loader__", None) is finder:
                del sys.modules[name]


def is_loop(found: Any) -> bool:
    """Whether this is an agent loop written for verl."""
    return isinstance(found, type) and found is not names.AgentLoopBase and issubclass(found, names.AgentLoopBase)
