"""Callers of many kinds, well-behaved and not, who check all that they get. For `benchmarks.chaos`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from serve_app.loadgen import WORDS

REQUEST_ID = "X-Request-Id"
NO_ENDING = "no ending"
"""How a call ends whose connection closed, or whose stream stopped, without a word."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call, but for `stream`; valid unless `refused_field` says what the server must name when it refuses it."""

    path: str
    body: dict[str, Any]
    refused_field: str | None = None


class Manner(StrEnum):
    """What a caller does with an answer."""

    READ = "reads to the end"
    SLOW = "reads slowly"
    LEAVE = "leaves in the middle"
    DEADLINE = "sets a deadline"
    CANCEL = "cancels"


MANNERS = {Manner.READ: 62, Manner.SLOW: 6, Manner.LEAVE: 18, Manner.DEADLINE: 8, Manner.CANCEL: 6}
"""How many of a hundred do so."""
TENANTS = ("ada", "bela", "cleo")


@dataclass(slots=True)
class Answer:
    """What came of an answer so far, streamed or whole, in one shape; by the index of a choice where there are several."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    completion_tokens: int | None = None
    error: dict[str, Any] | None = None
    is_over: bool = False
    faults: list[str] = field(default_factory=list)

    def add_text(self, index: int, text: str) -> None:
        """A piece of a choice's text."""
        if index in self.reasons and text:
            self.faults.append(f"text after the ending of choice {index}")
        self.texts[index] = self.texts.get(index, "") + text

    def end_choice(self, index: int, reason: str | None) -> None:
        """A choice's finish reason, if it has one already."""
        if reason is not None:
            if index in self.reasons:
                self.faults.append(f"a second ending of choice {index}")
            self.reasons[index] = reason

    def end(self) -> None:
        """The last word: `[DONE]`, a last event, or an error."""
        if self.is_over:
            self.faults.append("a second ending")
        self.is_over = True

    def fail(self, error: dict[str, Any]) -> None:
        """An error instead of the rest."""
        self.error = error
        self.end()

    @property
    def content(self) -> tuple[Any, ...]:
        """What must be the same whenever the same is asked."""
        return self.texts, self.reasons, self.completion_tokens


@dataclass(frozen=True, slots=True)
class CallReport:
    """What became of a call.

    Attributes:
        request_id: as the server's log has it.
        ending: `complete`, `left`, an error's code, or `NO_ENDING`.
        ttft_s: seconds to a stream's first text; None where none came.
        faults: what must not be, in words.
    """

    request_id: str
    manner: Manner
    status: int
    ending: str
    started_at: float
    ended_at: float
    ttft_s: float | None
    num_tokens: int
    faults: tuple[str, ...]


def catalog(model: str, count: int, seed: int = 0) -> list[Call]:
    """Valid calls of all kinds, each different: three routes, greedy and seeded, lengths, stops, choices, logprobs."""
    rng = random.Random(seed)
    common = " ".join(rng.choice(WORDS) for _ in range(150))
    calls = []
    for index in range(count):
        num_words = (8, 30, 120, 300)[index % 4] + rng.randint(0, 7)
        words = f"{index} " + " ".join(rng.choice(WORDS) for _ in range(num_words))
        text = f"{common} {words}" if index % 5 == 0 else words
        length = round(8 * 16 ** rng.random())
        body: dict[str, Any] = {"model": model, "temperature": 0}
        if index % 2:
            body |= {"temperature": 0.9, "top_p": 0.95}
        if index % 9 == 8:
            calls.append(Call("/v1/responses", body | {"input": text, "max_output_tokens": length, "temperature": 0}))
            continue
        body |= {"seed": index, "max_tokens": length, "ignore_eos": bool(index % 3)}
        if index % 4 == 1:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
        if index % 7 == 3:
            body |= {"n": 2}
        if index % 7 == 4:
            body |= {"stop": [" the", "."]}
        if index % 3:
            body |= {"prompt": text}
            if index % 7 == 5:
                body |= {"logprobs": 2}
            calls.append(Call("/v1/completions", body))
        else:
            calls.append(Call("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
    return calls


def invalid_calls(model: str) -> list[Call]:
    """Calls that the server must refuse, naming the field."""
    body = {"model": model, "prompt": "A stone in the river", "max_tokens": 8}
    changes: list[tuple[str, Any]] = [("nonsense", 1), ("max_tokens", -1), ("temperature", "hot"), ("n", 1_000_000)]
    changes += [("stop", ["x"] * 10_000), ("prompt", "river " * 20_000)]
    return [Call("/v1/completions", body | {name: value}, name) for name, value in changes]


class Crowd:
    """Sends calls, and knows what they must give.

    Args:
        patience_s: the longest time until a caller leaves, cancels, or has its deadline.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        calls: list[Call],
        invalid: list[Call],
        *,
        seed: int,
        patience_s: float = 3.0,
    ) -> None:
        self._session, self._url, self._calls, self._invalid = session, url, calls, invalid
        self._rng, self._patience_s = random.Random(seed), patience_s
        self._count = 0
        self.num_running = 0
        self._expected: list[Answer] = []  # what each valid call gives when it is made alone, by its index

    async def learn(self, told: Callable[[int], None]) -> None:
        """Makes every call once, alone. Raises RuntimeError if one is not answered."""
        for index, call in enumerate(self._calls):
            answer, _ = await self._receive(call, {}, call.body, asyncio.sleep)
            if answer.status != 200 or answer.faults or not answer.is_over:
                raise RuntimeError(f"{call} alone: {answer}")
            self._expected.append(answer)
            told(index + 1)

    async def call(self, invalid: bool = False) -> CallReport:
        """Makes one call as one of the crowd does, and checks what comes."""
        rng, self._count = self._rng, self._count + 1
        request_id = f"chaos-{self._count}"
        index = rng.randrange(len(self._invalid if invalid else self._calls))
        call = (self._invalid if invalid else self._calls)[index]
        manner = Manner.READ if invalid else rng.choices(list(MANNERS), list(MANNERS.values()))[0]
        body = call.body | {"user": rng.choice(TENANTS)}
        if rng.random() < 0.6:
            body |= {"stream": True}
            if call.path != "/v1/responses":
                body |= {"stream_options": {"include_usage": True}}
        headers = {REQUEST_ID: request_id}
        patience = rng.uniform(0, self._patience_s)
        if manner is Manner.DEADLINE:
            headers["X-Request-Timeout-Seconds"] = f"{patience + 0.1:.2f}"
        started_at = time.monotonic()
        self.num_running += 1
        answer, first_at, left = Answer(), None, False
        canceller = asyncio.create_task(self._cancel_after(patience, request_id)) if manner is Manner.CANCEL else None
        try:
            async with asyncio.timeout(patience if manner is Manner.LEAVE else None):
                pause = _rest if manner is Manner.SLOW else _none
                answer, first_at = await self._receive(call, headers, body, pause, answer)
        except TimeoutError:
            left = True
        except aiohttp.ClientError as error:
            answer.faults.append(f"the connection: {error!r}")
        finally:
            self.num_running -= 1
            if canceller is not None:
                await canceller
        faults = [*answer.faults, *self._faults_of(call, None if invalid else self._expected[index], answer)]
        ending = "left" if left else _ending_of(answer)
        if ending == NO_ENDING:
            faults.append(NO_ENDING)
        return CallReport(
            request_id,
            manner,
            answer.status,
            ending,
            started_at,
            time.monotonic(),
            None if first_at is None else first_at - started_at,
            answer.completion_tokens or 0,
            tuple(f"{request_id} ({call.path}, {manner}): {fault}" for fault in faults),
        )

    def _faults_of(self, call: Call, expected: Answer | None, answer: Answer) -> list[str]:
        """What is wrong with an answer, whole or not."""
        if expected is None:
            named = None if answer.error is None else answer.error.get("param")
            is_refused = answer.status == 429 or (answer.status == 400 and named == call.refused_field)
            return [] if is_refused else [f"not refused for its {call.refused_field}: {answer}"]
        if answer.is_over and answer.error is None:
            return [] if answer.content == expected.content else [f"{answer.content} instead of {expected.content}"]
        others = [text for index, text in answer.texts.items() if not expected.texts[index].startswith(text)]
        return [f"begins otherwise than alone: {others}"] if others else []

    async def _cancel_after(self, delay: float, request_id: str) -> None:
        await asyncio.sleep(delay)
        async with self._session.post(f"{self._url}/v1/cancel/{request_id}") as response:
            await response.read()

    async def _receive(
        self,
        call: Call,
        headers: dict[str, str],
        body: dict[str, Any],
        pause: Callable[[float], Awaitable[None]],
        answer: Answer | None = None,
    ) -> tuple[Answer, float | None]:
        """Fills an answer, which is as far as it came when this is cancelled; also the time of its first text."""
        answer = Answer() if answer is None else answer
        first_at = None
        async with self._session.post(self._url + call.path, json=body, headers=headers) as response:
            answer.status = response.status
            if not response.content_type.startswith("text/event-stream"):
                _read_whole(answer, await response.json())
                return answer, None
            rest = b""
            async for chunk in response.content.iter_any():
                *frames, rest = (rest + chunk).split(b"\n\n")
                for frame in frames:
                    read_event(answer, frame)
                if first_at is None and any(answer.texts.values()):
                    first_at = time.monotonic()
                await pause(0.2)
            if rest:
                answer.faults.append(f"an event that is cut off: {rest[:80]!r}")
        return answer, first_at


async def _rest(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _none(seconds: float) -> None:
    pass


def _ending_of(answer: Answer) -> str:
    if answer.error is not None:
        return str(answer.error.get("code") or answer.error.get("type"))
    return "complete" if answer.is_over else NO_ENDING


def _read_whole(answer: Answer, payload: dict[str, Any]) -> None:
    if payload.get("error"):
        answer.fail(payload["error"])
        return
    if "output" in payload:
        _read_response(answer, payload)
        answer.texts = {0: "".join(part["text"] for item in payload["output"] for part in item["content"])}
    else:
        for choice in payload["choices"]:
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            answer.add_text(choice["index"], text or "")
            answer.end_choice(choice["index"], choice["finish_reason"])
        answer.completion_tokens = payload["usage"]["completion_tokens"]
    answer.end()


def _read_response(answer: Answer, response: dict[str, Any]) -> None:
    answer.end_choice(0, response["status"])
    answer.completion_tokens = response["usage"]["output_tokens"]


def read_event(answer: Answer, frame: bytes) -> None:
    """One server-sent event of a stream of any of the three routes."""
    data = next((line[6:] for line in frame.split(b"\n") if line.startswith(b"data: ")), None)
    if data is None:
        return
    if data == b"[DONE]":
        answer.end()
        return
    event = json.loads(data)
    if answer.is_over:
        answer.faults.append(f"an event after the ending: {event}")
    kind = event.get("type", "")
    if kind in ("response.completed", "response.incomplete"):
        _read_response(answer, event["response"])
        answer.end()
    elif kind == "response.failed":
        answer.fail(event["response"]["error"])
    elif kind == "error":
        answer.fail(event)
    elif kind == "response.output_text.delta":
        answer.add_text(0, event["delta"])
    elif event.get("error"):
        answer.fail(event["error"])
    else:
        if event.get("usage"):
            answer.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", []):
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            answer.add_text(choice["index"], text or "")
            answer.end_choice(choice["index"], choice["finish_reason"])
