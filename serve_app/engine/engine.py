"""`BatchInferenceEngine`: a queue of requests, and a loop of steps that turns it into streams of tokens.

    step  =  take in  ->  plan  ->  run  ->  settle  ->  deliver

Everything behind `add_to_queue` and `cancel` belongs to the thread that calls `step`; the two only leave a note in the
inbox, so no caller ever waits for the model.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self

from serve_app.engine.kv_cache import BlockLedger
from serve_app.engine.request import Delivery, EngineLoad, RequestFailure, TokenOutput, UserRequest
from serve_app.engine.runner import Draw, Runner, StepResult
from serve_app.engine.scheduler import PlannedRow, Scheduler, StepPlan
from serve_app.engine.sequence import Sequence
from serve_app.engine.status import Status
from serve_app.engine.stop_flag import StepInterruptedError
from serve_app.engine.stream import TokenStream, deliver
from serve_app.engine.timing import MANY, MAX_STEPS, RequestTrace, StepTrace, Timing, Timings
from serve_app.errors import (
    ContextLengthError,
    DeadlineError,
    EngineUnavailableError,
    GenerationError,
    OutOfMemoryError,
    OverloadedError,
    RequestCancelledError,
    RequestError,
    ServeAppError,
)

logger = logging.getLogger(__name__)

MANY_ENDED = 1000
"""Deadlines of ended requests that may lie about before they are swept away."""
LOST_SHARE, MOST_LOST_S = 0.1, 0.5
"""Of the time that steps take so much may be lost in steps that are given up; so many seconds of it may be saved up."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A glance at the engine; counters since its start."""

    num_waiting: int
    num_running: int
    num_waiting_tokens: int
    num_backlog_tokens: int
    """Tokens that may still be computed for all requests in sight, waiting and running."""
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_computed_tokens: int
    num_drawn_tokens: int
    num_prefix_hit_tokens: int
    """Of the prompt tokens of requests that have started, those that were found in the cache."""
    num_prefix_query_tokens: int
    """All of them."""
    num_preemptions: int
    last_batch_size: int
    max_batch_size: int
    tokens_per_s: float
    """Measured speed of recent steps, prompt and drawn tokens together."""


class BatchInferenceEngine:
    """Continuous batching over a runner.

    Requests that wait are started together when `max_batch_size` of them wait or the oldest has waited
    `batch_wait_timeout_s`; while others run they join at the next step instead. One forward pass serves all rows of a
    step; its result is taken apart into one `TokenOutput` per row.

    Example:
        >>> from serve_app import load_engine, SamplingParams, UserRequest
        >>> engine = load_engine("builtin")
        >>> streams = engine.add_to_queue([UserRequest("a", (1, 2, 3), SamplingParams(max_tokens=8, temperature=0))])
        >>> for output in streams[0]:
        ...     print(output.token)

    Args:
        runner: computes the steps.
        max_batch_size: rows that run at the same time.
        max_batched_tokens: tokens of one step, prompts and decodes together.
        batch_wait_timeout_s: how long an idle engine lets the first request wait for others.
        max_waiting_tokens: tokens (prompt + requested) that may wait, beyond what runs; None sets no limit.
        prefix_cache: whether equal prefixes share blocks.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch_size: int = 32,
        max_batched_tokens: int = 256,
        batch_wait_timeout_s: float = 0.0,
        max_waiting_tokens: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self._runner = runner
        self._scheduler = Scheduler(
            BlockLedger(runner.num_blocks, runner.block_size),
            max_batch_size=max_batch_size,
            max_batched_tokens=max_batched_tokens,
            batch_wait_timeout_s=batch_wait_timeout_s,
            prefix_cache=prefix_cache,
        )
        self._max_waiting_tokens = max_waiting_tokens
        self._inbox = threading.Condition()  # guards the next six and _num_waiting_tokens; never held while the model runs
        self._arrivals: deque[Sequence] = deque()
        self._departures: set[str] = set()
        self._streams: dict[str, TokenStream] = {}
        self._calls: dict[str, UserRequest] = {}
        self._closed: ServeAppError | None = None
        self._interruptible: frozenset[str] = frozenset()  # tenants of the running step; empty: it is not to be given up
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; those that have ended since are passed by
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._when_dead: Callable[[], None] = lambda: None
        self._num_waiting_tokens = 0
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_drawn_tokens = 0
        self._num_prefix_hit_tokens = 0
        self._num_prefix_query_tokens = 0
        self._timings = Timings()
        self._traced_endings: list[RequestTrace] = []  # of the step that runs
        self._traces: deque[RequestTrace] = deque(maxlen=MANY)
        self._last_batch_size = 0
        self._tokens_per_s = 0.0
        self._last_progress_at = time.monotonic()
        self._may_lose_s = 0.0

    @classmethod
    def launch(cls, make_runner: Callable[[], Runner], **settings: Any) -> Self:
        """Makes the runner in the engine's own thread, and starts. Errors of `make_runner` are raised here.

        OpenMP keeps a team of workers for every thread that ever computed with several. As soon as the teams of a process
        have more threads than there are cores, waiting workers are put to sleep, and waking them a thousand times a step
        costs more than the step: so one thread loads, proves and steps the model.

        Args:
            make_runner: loads the model.
            settings: as for the constructor.
        """
        launched: Future[Self] = Future()

        def body() -> None:
            try:
                engine = cls(make_runner(), **settings)
            except BaseException as error:  # raised again in the caller's thread
                launched.set_exception(error)
            else:
                engine._thread = threading.current_thread()
                launched.set_result(engine)
                engine._loop()

        threading.Thread(target=body, name="engine", daemon=True).start()
        return launched.result()

    # ---- for callers, from any thread

    @property
    def runner(self) -> Runner:
        return self._runner

    def add_to_queue(self, requests: Iterable[UserRequest]) -> list[TokenStream]:
        """Queues requests, all in time for the same step, and returns their token streams, in order.

        A step in which their tenant has no part is given up for them, so that a tenant's flood does not let the others wait
        for its steps; it is computed again later. See `LOST_SHARE` for how often.

        A request that is refused gets a stream that raises its error; it harms no other. Returns at once.
        """
        loop, arrival = _running_loop(), threading.Condition()
        streams = []
        with self._inbox:
            for request in requests:
                stream = TokenStream(request.request_id, self.cancel, loop, arrival)
                error = self._refusal(request)
                if error is None:
                    sequence = Sequence(request, self._runner.end_token_ids)
                    self._arrivals.append(sequence)
                    self._num_waiting_tokens += request.num_tokens_at_most
                    self._streams[request.request_id] = stream
                    self._calls[request.request_id] = request
                    if self._interruptible and request.tenant not in self._interruptible:
                        self._runner.interrupt()
                else:
                    stream.put(RequestFailure(request.request_id, error))
                streams.append(stream)
            self._inbox.notify()
        return streams

    def cancel(self, request_id: str) -> None:
        """Ends a request at the next step, wherever it is; its stream raises `RequestCancelledError`. Unknown ids pass."""
        with self._inbox:
            self._departures.add(request_id)
            self._inbox.notify()

    def cancel_call(self, call_id: str, tenant: str | None = None) -> int:
        """Cancels all requests of a call, if a tenant is given only that tenant's. Returns how many there were."""
        with self._inbox:
            found = [
                request_id
                for request_id, request in self._calls.items()
                if request.call_id == call_id and tenant in (None, request.tenant)
            ]
            self._departures.update(found)
            self._inbox.notify()
        return len(found)

    def configure(self, *, max_batch_size: int, batch_wait_timeout_s: float, max_waiting_tokens: int | None = None) -> None:
        """Changes what may change while rows run; nothing running is dropped."""
        with self._inbox:
            self._scheduler.max_batch_size = max_batch_size
            self._scheduler.batch_wait_timeout_s = batch_wait_timeout_s
            self._max_waiting_tokens = max_waiting_tokens
            self._inbox.notify()

    def stats(self) -> EngineStats:
        """Numbers of this moment, read without stopping the engine."""
        scheduler = self._scheduler
        return EngineStats(
            num_waiting=len(scheduler.waiting) + len(self._arrivals),
            num_running=len(scheduler.running),
            num_waiting_tokens=self._num_waiting_tokens,
            num_backlog_tokens=self._num_waiting_tokens
            + sum(
                sequence.num_tokens_left for sequence in (*scheduler.running, *scheduler.waiting) if not sequence.is_queued
            ),
            num_blocks=scheduler.ledger.num_blocks,
            num_free_blocks=scheduler.ledger.num_free,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_drawn_tokens=self._num_drawn_tokens,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
            num_prefix_query_tokens=self._num_prefix_query_tokens,
            num_preemptions=scheduler.num_preemptions,
            last_batch_size=self._last_batch_size,
            max_batch_size=scheduler.max_batch_size,
            tokens_per_s=self._tokens_per_s,
        )

    def take_traces(self) -> Iterator[RequestTrace]:
        """Requests with a `traceparent` that ended since it was called before. From any one thread."""
        while self._traces:
            yield self._traces.popleft()

    def take_timings(self) -> Iterator[tuple[Timing, float]]:
        """What was measured since this was called before."""
        return self._timings.take()

    def load(self) -> EngineLoad:
        """What waits, and how much may."""
        return EngineLoad(self._num_waiting_tokens, self._max_waiting_tokens, self._tokens_per_s)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not had their ending yet."""
        return len(self._streams)

    def check_health(self, stall_timeout_s: float) -> None:
        """Health is progress.

        Raises:
            EngineUnavailableError: the loop is dead, or work is queued and no step finished for `stall_timeout_s`.
        """
        if self._closed is not None:
            raise self._closed
        stalled_for_s = time.monotonic() - self._last_progress_at
        if self.num_unfinished and stalled_for_s > stall_timeout_s:
            raise EngineUnavailableError(f"The engine has work, but finished no step for {stalled_for_s:.0f} s.")

    def when_dead(self, action: Callable[[], None]) -> None:
        """What is done, in the engine's thread, when the loop has died and every stream was told."""
        self._when_dead = action

    def check(self) -> None:
        """Proves the block ledger's sums. For tests and debugging, when no step is running."""
        self._scheduler.check()

    def _refusal(self, request: UserRequest) -> ServeAppError | None:
        if self._closed is not None:
            return self._closed
        if request.request_id in self._streams:
            return RequestError(f"A request with id {request.request_id!r} is already running.", "request_id")
        longest = min(self._runner.max_model_len, self._scheduler.ledger.num_blocks * self._runner.block_size)
        num_prompt, num_new = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt + num_new > longest:
            return ContextLengthError(
                f"This model's context is {longest} tokens, but the request has {num_prompt} prompt tokens and asks for "
                f"{num_new} more.",
                "max_tokens" if num_prompt < longest else "prompt",
            )
        given = (*request.prompt_token_ids, *request.output_token_ids)
        unknown = next((t for t in given if not 0 <= t < self._runner.vocab_size), None)
        if unknown is not None:
            return RequestError(f"Token id {unknown} is not in the vocabulary.", "prompt")
        biased = next((t for t, _ in request.sampling.logit_bias if not 0 <= t < self._runner.vocab_size), None)
        if biased is not None:
            return RequestError(f"logit_bias: token id {biased} is not in the vocabulary.", "logit_bias")
        return None if request.is_continuation else self._overload(num_prompt + num_new)

    def _overload(self, num_tokens: int) -> OverloadedError | None:
        limit, backlog = self._max_waiting_tokens, self._num_waiting_tokens
        if limit is None or backlog == 0 or backlog + num_tokens <= limit:
            return None
        wait_s = (backlog + num_tokens - limit) / max(self._tokens_per_s, 1.0)
        return OverloadedError(
            f"The server is busy: {backlog} tokens wait, {limit} may. Retry in about {wait_s:.0f} s.",
            retry_after_s=max(1, round(wait_s)),
        )

    # ---- the loop, in the engine's thread

    def start(self) -> None:
        """Starts the thread that steps for ever."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Stops after the current step. Requests that have not ended get `EngineUnavailableError`."""
        with self._inbox:
            self._stopping = True
            self._inbox.notify()
        if self._thread is not None:
            self._thread.join()
        self._close(EngineUnavailableError("The engine is shut down."))

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    self._wait_for_work()
        except BaseException as error:  # the loop itself is broken: every stream gets its ending before the thread dies
            logger.exception("the engine loop died")
            self._close(EngineUnavailableError("The engine has failed and is being replaced."))
            self._when_dead()
            if not isinstance(error, Exception):
                raise

    def _wait_for_work(self) -> None:
        with self._inbox:
            now = time.monotonic()
            idle_s = self._scheduler.seconds_until_due(now) if self._scheduler.has_work else None
            self._inbox.wait_for(lambda: self._arrivals or self._departures or self._stopping, timeout=idle_s)
            if idle_s is None:
                self._last_progress_at = time.monotonic()  # idling is not stalling

    def _close(self, error: ServeAppError) -> None:
        with self._inbox:
            self._closed = self._closed or error
            failures = [(stream, RequestFailure(id_, error)) for id_, stream in self._streams.items()]
            self._streams.clear()
            self._calls.clear()
        deliver(failures)

    def step(self) -> bool:
        """Runs one step. Returns False when there was nothing to do (the queue is empty or its wait is not over)."""
        endings = self._take_in()
        plan = self._scheduler.plan(time.monotonic())
        told = [*endings, *self._run(plan)] if plan.rows else endings
        self._deliver(told)
        if self._traced_endings:
            self._traces.extend(self._traced_endings)
            self._traced_endings.clear()
        return bool(plan.rows or endings)

    def _take_in(self) -> list[Delivery]:
        """Applies the notes in the inbox: newcomers join the queue, leavers' blocks are freed."""
        with self._inbox:
            arrivals, self._arrivals = self._arrivals, deque()
            departures, self._departures = self._departures, set()
        for sequence in arrivals:
            self._sequences[sequence.request.request_id] = sequence
            self._scheduler.add(sequence)
            if sequence.expires_at is not None:
                heapq.heappush(self._deadlines, (sequence.expires_at, sequence.arrival, sequence))
        leaving = [self._sequences[request_id] for request_id in departures if request_id in self._sequences]
        endings: list[Delivery] = []
        for sequence in leaving:
            endings.append(self._fail(sequence, Status.CANCELLED, RequestCancelledError("Cancelled.")))
        for sequence in self._expired(time.monotonic()):
            late = DeadlineError("The call was not done in the time that it had.")
            endings.append(self._fail(sequence, Status.CANCELLED, late))
        return endings

    def _expired(self, now: float) -> Iterator[Sequence]:
        """Those whose deadline is over, each once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if not sequence.has_ended:
                yield sequence
        if len(self._deadlines) > 2 * len(self._sequences) + MANY_ENDED:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].has_ended]
            heapq.heapify(self._deadlines)

    def _run(self, plan: StepPlan) -> list[Delivery]:
        started_at = time.monotonic()
        for row in plan.rows:
            if row.sequence.is_queued:
                row.sequence.started_at = started_at
                self._timings.note(Timing.QUEUE, started_at - row.sequence.arrived_at)
        self._leave_queue(row.sequence for row in plan.rows)
        if self._may_lose_s > 0:
            self._let_interrupt({row.sequence.request.tenant for row in plan.rows})
        try:
            told = self._compute(plan)
        except StepInterruptedError:
            self._may_lose_s -= time.monotonic() - started_at
            return []
        finally:
            self._let_interrupt(())
        self._record(plan, started_at, time.monotonic())
        return told

    def _let_interrupt(self, tenants: Iterable[str]) -> None:
        with self._inbox:  # once it is released, no caller interrupts for the former reason
            self._interruptible = frozenset(tenants)

    def _compute(self, plan: StepPlan) -> list[Delivery]:
        """Runs a plan; one that fails is tried again in halves, until what is left is the row whose fault it is."""
        try:
            result = self._runner.run(plan)
        except (EngineUnavailableError, StepInterruptedError):
            raise
        except Exception as error:
            is_too_large = isinstance(error, OutOfMemoryError)
            if is_too_large:
                self._scheduler.lower_budget(plan.num_tokens)
            halves = plan.halves() if is_too_large or len(plan.rows) > 1 else None
            if halves is None:
                return self._fail_row(plan, error)
            logger.warning("a step of %d tokens failed, trying it in halves: %r", plan.num_tokens, error)
            self._let_interrupt(())  # what the first half told would be lost with the second
            return self._compute_in_turn(*halves)
        return self._settle(plan, result)

    def _compute_in_turn(self, first: StepPlan, second: StepPlan) -> list[Delivery]:
        told = self._compute(first)
        if second.rows[0].sequence.has_ended:  # the halves were of one row's chunk, and it failed
            return told
        return told + self._compute(second)

    def _settle(self, plan: StepPlan, result: StepResult) -> list[Delivery]:
        self._last_progress_at = time.monotonic()  # a step that fails is none
        for row in plan.rows:
            self._scheduler.settle(row)
            row.sequence.prompt_logprobs += result.prompt_logprobs.get(row.sequence.request.request_id, ())
        return [self._give(row, draw) for row, draw in zip(plan.drawing_rows, result.draws, strict=True)]

    def _give(self, row: PlannedRow, draw: Draw | ServeAppError) -> Delivery:
        sequence = row.sequence
        if isinstance(draw, ServeAppError):
            return self._fail(sequence, Status.FAILED, draw)
        self._num_drawn_tokens += 1
        finish_reason = sequence.append(draw.token)
        if not sequence.first_token_at:
            sequence.first_token_at = self._last_progress_at
            self._timings.note(Timing.PREFILL, sequence.first_token_at - sequence.started_at)
        if finish_reason is not None:
            self._timings.note(Timing.DECODE, self._last_progress_at - sequence.first_token_at)
            self._end(sequence, Status.FINISHED)
        output = TokenOutput(sequence.request.request_id, draw.token, finish_reason, draw.logprobs)
        return output if sequence.num_output_tokens > 1 else _with_prompt(output, sequence)

    def _fail_row(self, plan: StepPlan, error: Exception) -> list[Delivery]:
        """Ends the only row of a plan."""
        (row,) = plan.rows
        logger.error(
            "request %s failed in its step; it ends, the loop goes on", row.sequence.request.request_id, exc_info=error
        )
        self._scheduler.ledger.forget()
        told = error if isinstance(error, ServeAppError) else GenerationError("The step of this request failed.")
        return [self._fail(row.sequence, Status.FAILED, told)]

    def _fail(self, sequence: Sequence, ending: Status, error: ServeAppError) -> RequestFailure:
        self._end(sequence, ending)
        return RequestFailure(sequence.request.request_id, error)

    def _end(self, sequence: Sequence, ending: Status) -> None:
        self._leave_queue([sequence])
        self._scheduler.remove(sequence, ending)
        del self._sequences[sequence.request.request_id]
        if sequence.request.traceparent is not None:
            self._traced_endings.append(self._trace_of(sequence, sequence.request.traceparent, ending))

    def _trace_of(self, sequence: Sequence, traceparent: str, ending: Status) -> RequestTrace:
        return RequestTrace(
            sequence.request.request_id,
            traceparent,
            sequence.arrived_at,
            sequence.started_at,
            sequence.first_token_at,
            time.monotonic(),
            ending.name.lower(),
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens,
            sequence.num_output_tokens,
            sequence.steps,
        )

    def _leave_queue(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences that start (or end unstarted) out of the waiting sum, once each."""
        leaving = [sequence for sequence in sequences if sequence.is_queued]
        for sequence in leaving:
            sequence.is_queued = False
            self._num_prefix_hit_tokens += sequence.num_cached_tokens
            self._num_prefix_query_tokens += sequence.num_prompt_tokens
        if leaving:
            with self._inbox:
                self._num_waiting_tokens -= sum(sequence.request.num_tokens_at_most for sequence in leaving)

    def _record(self, plan: StepPlan, started_at: float, ended_at: float) -> None:
        elapsed_s = ended_at - started_at
        self._num_steps += 1
        step: StepTrace | None = None
        for row in plan.rows:
            if row.sequence.request.traceparent is not None and len(row.sequence.steps) < MAX_STEPS:
                step = step or StepTrace(self._num_steps, started_at, ended_at, len(plan.rows), plan.num_tokens)
                row.sequence.steps.append(step)
        self._num_computed_tokens += plan.num_tokens
        self._last_batch_size = len(plan.rows)
        self._timings.note(Timing.STEP, elapsed_s)
        self._timings.note(Timing.BATCH_SIZE, len(plan.rows))
        self._timings.note(Timing.STEP_TOKENS, plan.num_tokens)
        self._may_lose_s = min(self._may_lose_s + LOST_SHARE * elapsed_s, MOST_LOST_S)
        speed = plan.num_tokens / max(elapsed_s, 1e-6)
        self._tokens_per_s = speed if self._num_steps == 1 else 0.9 * self._tokens_per_s + 0.1 * speed

    def _deliver(self, told: list[Delivery]) -> None:
        parcels = []
        with self._inbox:
            for delivery in told:
                ended = delivery.is_last
                stream = self._streams.pop(delivery.request_id) if ended else self._streams[delivery.request_id]
                if ended:
                    del self._calls[delivery.request_id]
                parcels.append((stream, delivery))
        for request_id in deliver(parcels):
            self.cancel(request_id)


def _with_prompt(first: TokenOutput, sequence: Sequence) -> TokenOutput:
    """The first token also tells of the prompt."""
    asks = sequence.request.sampling.prompt_logprobs is not None
    return replace(
        first,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if asks else None,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
