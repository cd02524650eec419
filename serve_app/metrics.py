"""What engine and ingress replicas report to Prometheus, through Ray's own metrics.

Names and buckets are vLLM's where the meaning is, behind `serve_app_` (Ray puts `ray_` before all). docs/operations.md has
the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from serve_app.engine.engine import EngineStats
from serve_app.engine.timing import Timing

LATENCY_S = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST_TOKEN_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
TOKEN_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
STEP_S = [0.002, 0.005, *TOKEN_S[:12]]
NUM_ROWS: list[float] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
NUM_TOKENS: list[float] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]


class ReplicaMetrics:
    """What an engine replica did and holds: gauges are measured, never counted up and down."""

    def __init__(self) -> None:
        self._running = Gauge("serve_app_num_requests_running", "Requests that run.")
        self._waiting = Gauge("serve_app_num_requests_waiting", "Requests that wait.")
        self._cache_usage = Gauge("serve_app_kv_cache_usage_perc", "Part of the cache that running rows hold, 0 to 1.")
        self._tokens_per_s = Gauge("serve_app_tokens_per_second", "Speed of recent steps, prompt and drawn tokens.")
        self._counters = {
            "num_steps": Counter("serve_app_steps", "Steps that were computed."),
            "num_preemptions": Counter("serve_app_num_preemptions", "Rows that gave way and were computed again."),
            "num_prefix_query_tokens": Counter("serve_app_prefix_cache_queries", "Prompt tokens looked for in the cache."),
            "num_prefix_hit_tokens": Counter("serve_app_prefix_cache_hits", "Prompt tokens found in the cache."),
            "num_computed_tokens": Counter("serve_app_computed_tokens", "Tokens that steps computed, prompt and drawn."),
        }
        self._counted = dict.fromkeys(self._counters, 0)
        self._histograms = {
            Timing.QUEUE: Histogram("serve_app_request_queue_time_seconds", Timing.QUEUE, LATENCY_S),
            Timing.PREFILL: Histogram("serve_app_request_prefill_time_seconds", Timing.PREFILL, LATENCY_S),
            Timing.DECODE: Histogram("serve_app_request_decode_time_seconds", Timing.DECODE, LATENCY_S),
            Timing.STEP: Histogram("serve_app_step_time_seconds", Timing.STEP, STEP_S),
            Timing.BATCH_SIZE: Histogram("serve_app_step_batch_size", Timing.BATCH_SIZE, NUM_ROWS),
            Timing.STEP_TOKENS: Histogram("serve_app_iteration_tokens", Timing.STEP_TOKENS, NUM_TOKENS),
        }

    def observe(self, stats: EngineStats, timings: Iterable[tuple[Timing, float]]) -> None:
        """Sets the gauges, and adds what has happened since it was called before."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._cache_usage.set(1 - stats.num_free_blocks / stats.num_blocks)
        self._tokens_per_s.set(stats.tokens_per_s)
        for name, counter in self._counters.items():
            count: int = getattr(stats, name)
            if count > self._counted[name]:
                counter.inc(count - self._counted[name])
                self._counted[name] = count
        for kind, value in timings:
            self._histograms[kind].observe(value)


class IngressMetrics:
    """Calls by how they ended: `stop`, `length`, `disconnected`, `deadline`, `cancelled`, or the code of an error.

    And tokens, by key: the sums of the `usage` that callers were told; of a call that was not done, what had gone to its
    caller, and its prompt if anything had. And what callers waited for.
    """

    def __init__(self) -> None:
        tags: Any = ("ending", "key")  # Ray's annotation allows one tag only
        self._calls = Counter("serve_app_calls", "HTTP calls by ending.", tags)
        self._prompt_tokens = Counter("serve_app_prompt_tokens", "Prompt tokens of answered calls.", ("key",))
        self._generation_tokens = Counter("serve_app_generation_tokens", "Tokens given to callers.", ("key",))
        self._first_token_s = Histogram(
            "serve_app_time_to_first_token_seconds", "From a call's first byte to its first token.", FIRST_TOKEN_S
        )
        self._gap_s = Histogram("serve_app_inter_token_latency_seconds", "From a call's token to its next.", TOKEN_S)
        self._total_s = Histogram("serve_app_e2e_request_latency_seconds", "Of calls that gave tokens.", LATENCY_S)

    def call_ended(self, ending: str, key: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Counts a call once, when it is over."""
        self._calls.inc(tags={"ending": ending, "key": key})
        if num_tokens:
            self._prompt_tokens.inc(num_prompt_tokens, tags={"key": key})
            self._generation_tokens.inc(num_tokens, tags={"key": key})

    def call_took(self, first_token_s: float, gaps_s: Sequence[float], total_s: float) -> None:
        """Times of a call that gave tokens."""
        self._first_token_s.observe(first_token_s)
        self._total_s.observe(total_s)
        for gap_s in gaps_s:
            self._gap_s.observe(gap_s)
