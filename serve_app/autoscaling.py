"""How many engine replicas the work in sight needs: by tokens and measured speed, not by requests.

A request may be ten tokens or ten thousand; a target of requests per replica would be wrong for either. Serve applies the
bounds and delays of `autoscaling_config` to what the policy wants.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app.config import AutoscalingTargets, parse_section

HALF_LIFE_S = 600.0
"""In this time the highest speed that was seen comes half down to that of now."""


class TokenBacklogPolicy:
    """Wants so many replicas that the work in sight is done, and its last request started, within the targets.

    At the speed of a replica, its share of all tokens in sight takes at most `target_backlog_s`, and its share of those of
    requests that wait for a place at most `target_ttft_s`: that is the TTFT of whoever comes now. The speed is the highest
    that was measured, because a replica with little to do is slow per second for want of work, and would not be faster if
    it had company. A request is not divided, so that there are never more replicas than requests.

    Fed by `EngineReplica.record_autoscaling_stats`. Named in `serve_config.yaml`.

    Args:
        targets: the fields of `AutoscalingTargets`.

    Raises:
        ConfigError: one of them is unknown or wrong.
    """

    def __init__(self, **targets: Any) -> None:
        self._targets = parse_section(AutoscalingTargets, targets, "policy_kwargs")

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """(replicas wanted, state). Zero without work (Serve keeps `min_replicas`); no change while no speed is known.

        What waits for a first replica is not seen here; Serve starts one for it.
        """
        metrics = context.aggregated_metrics or {}
        backlog, waiting, num_requests = (
            sum(metrics.get(name, {}).values()) for name in ("backlog_tokens", "waiting_tokens", "num_requests")
        )
        speed, state = _highest_speed(metrics.get("tokens_per_s", {}).values(), context)
        if not backlog:
            return 0, state
        if not speed:
            return context.current_num_replicas, state
        backlog_s, ttft_s = backlog / speed, waiting / speed  # if there were one replica
        wanted = max(backlog_s / self._targets.target_backlog_s, ttft_s / self._targets.target_ttft_s)
        return max(min(wanted, num_requests), 1.0), state


def _highest_speed(speeds: Iterable[float], context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Tokens per second of a replica; and the state that says so next time."""
    measured = [speed for speed in speeds if speed > 0]
    now = max(measured, default=0.0)
    at = context.current_time or 0.0
    before, before_at = context.policy_state.get("speed", 0.0), context.policy_state.get("at", at)
    kept = 0.5 ** ((at - before_at) / HALF_LIFE_S)
    speed = max(now, now + (before - now) * kept)
    return speed, {"speed": speed, "at": at}
