"""A real Chromium without a window, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60.0
"""Time limit of an answer or event."""
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-sync", "--remote-debugging-pipe",
    "about:blank",
)  # fmt: skip
LOWEST = 10
"""Lowest descriptor of a pipe's end: bash keeps some from 10 on for itself, and takes free ones."""
PRINTED = {"j", "k", "y", "n", "/", "[", "]"}
"""Keys that write a character."""
Message = dict[str, Any]


def chromium() -> str:
    """The program; the test is skipped where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no chromium here")
    return program


def _pipe() -> tuple[int, int]:
    """The reading and the writing end of a pipe, above the descriptors that Chromium's shell sets and closes."""
    low_ends = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, LOWEST) for end in low_ends)
    for end in low_ends:
        os.close(end)
    return reading, writing


class Browser:
    """A browser with one page.

    Args:
        program: Of Chromium.
        profile: An empty folder for its files.
    """

    def __init__(self, program: str, profile: Path) -> None:
        requests, self._write = _pipe()
        self._read, answers = _pipe()
        # Chromium reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{requests} 4>&{answers} {requests}<&- {answers}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, f"--user-data-dir={profile}", *OPTIONS],
            pass_fds=[requests, answers],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(requests)
        os.close(answers)
        self._rest, self._last, self._session = b"", 0, ""
        self._arrived: deque[Message] = deque()
        self.requested = list[str]()
        """Addresses that pages asked for."""
        self.dialogs = list[str]()
        """Texts of dialogs that pages opened."""
        self.problems = list[str]()
        """Errors of scripts, and what the Content Security Policy refused."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Message:
        """A command's answer."""
        number = self._post(method, parameters)
        answer = self._await(lambda message: message.get("id") == number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, address: str) -> None:
        """Opens an address and waits until it is loaded."""
        self._arrived.clear()
        self.send("Page.navigate", url=address)
        self.loaded()

    def loaded(self) -> None:
        """Waits for a page that is being opened."""
        self._await(lambda message: message.get("method") == "Page.loadEventFired")

    def hold_fetches(self) -> None:
        """Holds what scripts fetch from now on until it is let go."""
        self.send("Fetch.enable", patterns=[{"resourceType": "Fetch"}])

    def held_fetch(self) -> str:
        """The next fetch that is held."""
        return self._await(lambda message: message.get("method") == "Fetch.requestPaused")["params"]["requestId"]

    def let_go(self, fetch: str) -> None:
        """Lets a fetch go on."""
        self.send("Fetch.continueRequest", requestId=fetch)

    def press(self, key: str) -> None:
        """Presses a key."""
        self._arrived.clear()
        text = {"text": key} if key in PRINTED else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Tab": 9, " ": 32}.get(key, ord(key[0].upper()))
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Types a text where the focus is."""
        self.send("Input.insertText", text=text)

    def run(self, script: str) -> Any:
        """What a script of the test returns, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def show(self, width: int, height: int, scheme: str) -> None:
        """Sets the size of the window, and whether the person prefers a light or dark page."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Writes what the window shows as a PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def _post(self, method: str, parameters: Message) -> int:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message | session).encode() + b"\0")
        return self._last

    def _await(self, wanted: Callable[[Message], bool]) -> Message:
        """The first message that matches; others are kept for the next call."""
        deadline = time.monotonic() + SECONDS
        for message in self._arrived:
            if wanted(message):
                self._arrived.remove(message)
                return message
        while True:
            message = self._receive(deadline)
            self._note(message)
            if wanted(message):
                return message
            self._arrived.append(message)

    def _receive(self, deadline: float) -> Message:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, message: Message) -> None:
        """Keeps what pages do beside what was asked for, and answers dialogs."""
        event = message.get("params", {})
        match message.get("method"):
            case "Page.javascriptDialogOpening":
                self.dialogs.append(event["message"])
                self._post("Page.handleJavaScriptDialog", {"accept": True})
            case "Network.requestWillBeSent":
                self.requested.append(event["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["exceptionDetails"]))
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.problems.append(event["entry"]["text"])
            case _:
                pass
