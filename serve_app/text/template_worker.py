"""A process of its own for the chat templates that callers bring.

A template is a program. Jinja's sandbox keeps it from the machine, but not from looping for ever or from filling the
memory; a process can be ended, and has a limit of memory. Questions and answers are JSON, each behind its length.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from transformers.utils.chat_template_utils import render_jinja_template

from serve_app.errors import OverloadedError, RequestError

TIMEOUT_S = 2.0
"""How long a template may take."""
START_TIMEOUT_S = 60.0
MAX_WAITING = 4
"""Calls that may wait for the process; it renders one template at a time."""
MEMORY_BYTES = 256 * 1024 * 1024
"""What the process may have beyond what it has when it is ready."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
LENGTH_BYTES = 4


class TemplateWorker:
    """Renders callers' templates in a process that is started by the first and again after one that had to be ended.

    Args:
        timeout_s: how long a template may take.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "template")  # asks, one question after the other
        self._num_waiting = 0
        self._process: subprocess.Popen[bytes] | None = None

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
            assert process.stdin is not None and process.stdout is not None
            _write(process.stdin, arguments)
            return _answer(process.stdout, self._timeout_s)
        except TimeoutError:
            self._end()
            raise RequestError(f"chat_template: it takes longer than {self._timeout_s:g} s.", "chat_template") from None
        except (OSError, EOFError):
            self._end()
            raise RequestError("chat_template: it ended the process that rendered it.", "chat_template") from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", __name__, str(math.ceil(self._timeout_s) + 1)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # Ray may have added to it
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._finalizer = weakref.finalize(self, _kill, self._process)
            assert self._process.stdout is not None
            _answer(self._process.stdout, START_TIMEOUT_S)
        return self._process

    def _end(self) -> None:
        self._process = None
        self._finalizer()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes, and waits
        process.kill()


def _write(pipe: BinaryIO | Any, message: Mapping[str, Any]) -> None:
    text = json.dumps(message).encode()
    pipe.write(len(text).to_bytes(LENGTH_BYTES, "big") + text)
    pipe.flush()


def _answer(pipe: Any, timeout_s: float) -> dict[str, Any]:
    """The next answer. Raises `TimeoutError`, or `EOFError` when the process is gone."""
    deadline = time.monotonic() + timeout_s
    length = int.from_bytes(_read(pipe, LENGTH_BYTES, deadline), "big")
    answer: dict[str, Any] = json.loads(_read(pipe, length, deadline))
    return answer


def _read(pipe: Any, size: int, deadline: float) -> bytes:
    parts = b""
    while len(parts) < size:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(pipe.fileno(), size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


def _render(arguments: dict[str, Any]) -> dict[str, str]:
    try:
        rendered: str = render_jinja_template(**arguments)[0][0]
    except Exception as error:  # whatever it is, it is the template's
        return {"refusal": str(error) or type(error).__name__}
    if len(rendered) > MAX_ANSWER_BYTES:
        return {"refusal": f"it writes more than {MAX_ANSWER_BYTES} characters"}
    return {"rendered": rendered}


def main() -> None:
    """The process: answers until its standard input ends, or a template takes longer than the argument's seconds."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else gets between the answers
    pages = Path("/proc/self/statm").read_text().split()[0]
    limit = int(pages) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write(answers, {})
    while header := sys.stdin.buffer.read(LENGTH_BYTES):
        question = json.loads(sys.stdin.buffer.read(int.from_bytes(header, "big")))
        signal.alarm(int(sys.argv[1]))  # also when nobody is left who would end it
        answer = _render(question)
        signal.alarm(0)
        _write(answers, answer)


if __name__ == "__main__":
    main()
