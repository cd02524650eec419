"""A process of its own for the chat templates that callers bring.

A template is a program. Jinja's sandbox keeps it from the machine, but not from looping for ever or from filling the
memory; a process can be ended, and has a limit of memory. What goes between the processes is JSON: nothing that a template
could make of its answer runs in the server.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serve_app.errors import OverloadedError, RequestError

TIMEOUT_S = 2.0
"""How long a template may take."""
START_TIMEOUT_S = 60.0
MAX_WAITING = 4
"""Calls that may wait for the process; it renders one template at a time."""
MEMORY_BYTES = 256 * 1024 * 1024
"""What the process may have beyond what it has when it is ready."""
MAX_ANSWER_CHARACTERS = 16 * 1024 * 1024


class TemplateWorker:
    """Renders callers' templates in a process that is started by the first and again after one that had to be ended.

    Args:
        timeout_s: how long a template may take.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "template")  # asks, one question after the other
        self._num_waiting = 0
        self._process: _Process | None = None

    async def render(self, **arguments: Any) -> str:
        """What `render_jinja_template` makes of one conversation.

        Args:
            arguments: its own, all of them JSON; `conversations` has one.

        Raises:
            RequestError: the template fails, takes too long, or needs too much memory.
            OverloadedError: too many calls with templates wait.
        """
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError("Too many calls that bring a chat template wait.", math.ceil(self._timeout_s))
        self._num_waiting += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, arguments)
        finally:
            self._num_waiting -= 1
        if "refusal" in answer:
            raise RequestError(f"The chat template refuses these messages: {answer['refusal']}", "chat_template")
        return str(answer["rendered"])

    def _ask(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            process = self._running()
            process.way.send_bytes(json.dumps(arguments).encode())
            return process.answer(self._timeout_s)
        except TimeoutError:
            self._end()
            raise RequestError(f"chat_template: it takes longer than {self._timeout_s:g} s.", "chat_template") from None
        except (OSError, EOFError):
            self._end()
            raise RequestError("chat_template: it ended the process that rendered it.", "chat_template") from None

    def _running(self) -> _Process:
        if self._process is not None and self._process.popen.poll() is not None:  # ended by somebody else
            self._end()
        if self._process is None:
            self._process = _Process.start(math.ceil(self._timeout_s) + 1)
            self._finalizer = weakref.finalize(self, self._process.end)
            self._process.answer(START_TIMEOUT_S)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


@dataclass(frozen=True, slots=True)
class _Process:
    """The process, as the server sees it."""

    popen: subprocess.Popen[bytes]
    way: Connection

    @classmethod
    def start(cls, longest_s: int) -> _Process:
        """Starts it; its first answer says that it is ready. It ends itself when a template takes `longest_s`."""
        ours, its = Pipe()
        with its:
            command = [sys.executable, "-m", __name__, str(its.fileno()), str(longest_s)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # Ray may have added to it
            return cls(subprocess.Popen(command, pass_fds=[its.fileno()], env=environment), ours)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Its next answer. Raises `TimeoutError`, or `EOFError` or `OSError` when it is gone."""
        if not self.way.poll(timeout_s):
            raise TimeoutError
        answer: dict[str, Any] = json.loads(self.way.recv_bytes())
        return answer

    def end(self) -> None:
        """Ends it."""
        self.popen.kill()
        self.popen.wait()
        self.way.close()


def _render(render: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, str]:
    try:
        rendered: str = render(**arguments)[0][0]
    except Exception as error:  # whatever it is, it is the template's
        return {"refusal": str(error) or type(error).__name__}
    if len(rendered) > MAX_ANSWER_CHARACTERS:
        return {"refusal": f"it writes more than {MAX_ANSWER_CHARACTERS} characters"}
    return {"rendered": rendered}


def main(descriptor: int, longest_s: int) -> None:
    """The process: answers until the other end of its way is closed, or a template takes longer than `longest_s`."""
    # the server itself, which imports this file too, has no use for it
    from transformers.utils.chat_template_utils import render_jinja_template

    way = Connection(descriptor)
    pages = Path("/proc/self/statm").read_text().split()[0]
    limit = int(pages) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answer: dict[str, str] = {}  # the first: ready
    while True:
        way.send_bytes(json.dumps(answer).encode())
        try:
            question = json.loads(way.recv_bytes())
        except EOFError:
            return
        signal.alarm(longest_s)  # also when nobody is left who would end it
        answer = _render(render_jinja_template, question)
        signal.alarm(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
