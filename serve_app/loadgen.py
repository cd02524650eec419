"""A bounded load on an OpenAI-compatible server: closed (so many at a time) or open (a Poisson process)."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = [
    "river",
    "stone",
    "bread",
    "window",
    "letter",
    "music",
    "train",
    "garden",
    "winter",
    "light",
    "road",
    "children",
    "evening",
    "market",
    "bridge",
    "paper",
    "weather",
    "coffee",
    "island",
    "story",
    "mountain",
    "kitchen",
    "doctor",
    "engine",
    "summer",
    "village",
]


@dataclass(frozen=True, slots=True)
class Target:
    """What is loaded.

    Attributes:
        url: the server's root, without `/v1`.
        chat: as chat completions; else as completions.
        ignore_eos: every answer has all tokens that are asked for; a field that not every server knows.
    """

    url: str
    model: str
    api_key: str | None = None
    chat: bool = False
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the load."""

    prompt: str
    max_tokens: int
    user: str | None = None


class RefusedError(Exception):
    """429: the server says when to come back."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Outcome:
    """What one request gave. Times in seconds."""

    ttft_s: float
    total_s: float
    num_tokens: int
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What all of them gave."""

    outcomes: list[Outcome]
    errors: list[str]
    elapsed_s: float
    num_refused: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(outcome.num_tokens for outcome in self.outcomes) / self.elapsed_s

    def quantile(self, values: Sequence[float], fraction: float) -> float:
        """Of values; NaN when there are none."""
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else float("nan")

    @property
    def ttft_p50_s(self) -> float:
        return self.quantile([outcome.ttft_s for outcome in self.outcomes], 0.5)

    @property
    def tpot_p50_s(self) -> float:
        """Time per output token after the first."""
        per_token = [(o.total_s - o.ttft_s) / (o.num_tokens - 1) for o in self.outcomes if o.num_tokens > 1]
        return self.quantile(per_token, 0.5)

    @property
    def gap_p50_s(self) -> float:
        return self.quantile([gap for outcome in self.outcomes for gap in outcome.gaps_s], 0.5)


def mixed_jobs(
    count: int, seed: int, prompt_words: tuple[int, int], output_tokens: tuple[int, int], *, long_tail: bool = True
) -> list[Job]:
    """Reproducible jobs of mixed lengths between the bounds.

    Prompt lengths are uniform. Output lengths have a long tail (log-uniform: many short answers and few long ones, as in
    chat traffic), or are uniform too.
    """
    rng = random.Random(seed)
    least, most = output_tokens

    def output_length() -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most)))) if long_tail else rng.randint(least, most)

    return [
        Job(" ".join(rng.choice(WORDS) for _ in range(rng.randint(*prompt_words))), output_length()) for _ in range(count)
    ]


async def run_load(
    target: Target, jobs: Sequence[Job], concurrency: int, timeout_s: float = 600, on_end: Callable[[], None] = lambda: None
) -> LoadResult:
    """Sends all jobs, `concurrency` at a time, streamed and greedy; counts tokens from `usage`.

    `on_end` is called when a job is over.
    """
    outcomes: list[Outcome] = []
    errors: list[str] = []
    waiting: Iterator[Job] = iter(jobs)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def worker() -> None:
            for job in waiting:
                try:
                    outcomes.append(await send(session, target, job))
                except (aiohttp.ClientError, TimeoutError, RuntimeError, RefusedError) as error:
                    errors.append(repr(error))
                on_end()

        started_at = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return LoadResult(outcomes, errors, time.perf_counter() - started_at)


async def run_open_load(
    target: Target, jobs: Sequence[Job], rate: float, timeout_s: float = 600, on_end: Callable[[], None] = lambda: None
) -> LoadResult:
    """Sends the jobs as a Poisson process of `rate` requests per second, whether or not earlier ones have ended."""
    rng = random.Random(len(jobs))
    outcomes: list[Outcome] = []
    errors: list[str] = []
    num_refused = 0
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one(job: Job) -> None:
            nonlocal num_refused
            try:
                outcomes.append(await send(session, target, job))
            except RefusedError:
                num_refused += 1
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
                errors.append(repr(error))
            on_end()

        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(one(job))
                await asyncio.sleep(rng.expovariate(rate))
        return LoadResult(outcomes, errors, time.perf_counter() - started_at, num_refused)


async def send(session: aiohttp.ClientSession, target: Target, job: Job) -> Outcome:
    """Sends one job, streamed and greedy; once more where the server had closed the kept connection that it got."""
    try:
        return await _send_once(session, target, job)
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return await _send_once(session, target, job)


async def _send_once(session: aiohttp.ClientSession, target: Target, job: Job) -> Outcome:
    prompt = {"messages": [{"role": "user", "content": job.prompt}]} if target.chat else {"prompt": job.prompt}
    body: dict[str, Any] = {
        "model": target.model,
        **prompt,
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if job.user is not None:
        body["user"] = job.user
    started_at = last_at = time.perf_counter()
    outcome = Outcome(0.0, 0.0, 0)
    url = f"{target.url}/v1/{'chat/completions' if target.chat else 'completions'}"
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    async with session.post(url, json=body, headers=headers) as response:
        if response.status == 429:
            raise RefusedError(float(response.headers.get("Retry-After", 1)))
        if response.status != 200:
            raise RuntimeError(f"{response.status} {(await response.text())[:200]}")
        rest = b""
        async for chunk in response.content.iter_any():
            now = time.perf_counter()
            *events, rest = (rest + chunk).split(b"\n\n")
            for text in map(_data_of, events):
                if text is None:
                    continue
                event = json.loads(text)
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event.get("usage"):
                    outcome.num_tokens = event["usage"]["completion_tokens"]
                if any(_has_text(choice) for choice in event["choices"]):
                    if outcome.ttft_s == 0.0:
                        outcome.ttft_s = now - started_at
                    else:
                        outcome.gaps_s.append(now - last_at)
                    last_at = now
    outcome.total_s = time.perf_counter() - started_at
    if outcome.ttft_s == 0.0:
        outcome.ttft_s = outcome.total_s
    return outcome


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta", {})
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _data_of(event: bytes) -> bytes | None:
    """What an event of a stream carries; None for comments and the last event of all."""
    data = event.removeprefix(b"data:").strip()
    return None if not data or data == b"[DONE]" or event.startswith(b":") else data
