"""What engine and ingress replicas report to Prometheus, through Ray's own metrics."""

from __future__ import annotations

from typing import Any

from ray.serve.metrics import Counter, Gauge

from serve_app.engine.engine import EngineStats


class ReplicaMetrics:
    """Gauges of the moment: what is there is measured, never counted up and down."""

    def __init__(self) -> None:
        self._running = Gauge("serve_app_running", "Rows that run.")
        self._waiting = Gauge("serve_app_waiting", "Requests that wait.")
        self._blocks_held = Gauge("serve_app_kv_blocks_held", "Cache blocks held by running rows.")

    def observe(self, stats: EngineStats) -> None:
        """Sets the gauges."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._blocks_held.set(stats.num_blocks - stats.num_free_blocks)


class IngressMetrics:
    """Calls by how they ended: `stop`, `length`, `disconnected`, `deadline`, `cancelled`, or the code of an error.

    And tokens, by key: the sums of the `usage` that callers were told; of a call that was not done, what had gone to its
    caller, and its prompt if anything had.
    """

    def __init__(self) -> None:
        tags: Any = ("ending", "key")  # Ray's annotation allows one tag only
        self._calls = Counter("serve_app_calls", "HTTP calls by ending.", tags)
        self._prompt_tokens = Counter("serve_app_prompt_tokens", "Prompt tokens of answered calls.", ("key",))
        self._generation_tokens = Counter("serve_app_generation_tokens", "Tokens given to callers.", ("key",))

    def call_ended(self, ending: str, key: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Counts a call once, when it is over."""
        self._calls.inc(tags={"ending": ending, "key": key})
        if num_tokens:
            self._prompt_tokens.inc(num_prompt_tokens, tags={"key": key})
            self._generation_tokens.inc(num_tokens, tags={"key": key})
