"""`code_interpreter`: a tool that runs code in the sandbox of its node.

```yaml
spec:
  tools: [{name: code_interpreter, use: "kestrl_sandbox.tool:CodeInterpreter", config: {session: true, seconds: 5}}]
```

`PythonInterpreter` is the same with the signature of ReTool's conversations: the code, and no choice of a language.
"""

from __future__ import annotations

import re
from typing import Literal

from kestrl_sandbox.contract import Language
from kestrl_sandbox.interpreter.provider import Interpreter
from kestrl_sandbox.interpreter.session import Snippet

_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


class CodeInterpreter(Interpreter):
    """Runs Python and bash."""

    def program(self, code: str, language: Literal["python", "bash"] = "python") -> Snippet:
        """Runs a program and returns its output. There is no network; files can be written in the current folder.

        Args:
            code: The program. The value of its last expression is printed, too.
            language: Language of the program.
        """
        return Snippet(code, Language(language))


class PythonInterpreter(Interpreter):
    """Runs Python: `code_interpreter` as ReTool's conversations and verl's recipe declare it."""

    def program(self, code: str) -> Snippet:
        """A tool for executing code.

        Args:
            code: The code to execute.
        """
        return Snippet(_unfenced(code), Language.PYTHON)


def _unfenced(code: str) -> str:
    """The code within a Markdown fence that encloses all of it, as verl's recipe reads it; other code as it is."""
    fenced = _FENCED.fullmatch(code)
    return fenced[1] if fenced and "```" not in fenced[1] else code
