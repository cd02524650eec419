"""How many engine replicas the work in sight needs: by tokens and measured speed, not by requests.

A request may be ten tokens or ten thousand; a target of requests per replica would be wrong for either. Serve applies the
bounds and delays of `autoscaling_config` to what the policy wants.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext


class TokenBacklogPolicy:
    """Wants so many replicas that each has `target_backlog_s` seconds of work at its measured speed.

    Fed by `EngineReplica.record_autoscaling_stats`. Named in `serve_config.yaml`.

    Args:
        target_backlog_s: seconds of work that one replica may have in sight.
    """

    def __init__(self, target_backlog_s: float = 30.0) -> None:
        assert target_backlog_s > 0
        self._target_backlog_s = target_backlog_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """(replicas wanted, no state). None without work (Serve keeps `min_replicas`); no change while no speed is known.

        What waits for a first replica is not seen here; Serve starts one for it.
        """
        metrics = context.aggregated_metrics or {}
        backlog = sum(metrics.get("backlog_tokens", {}).values())
        speeds = [speed for speed in metrics.get("tokens_per_s", {}).values() if speed > 0]
        if not backlog:
            return 0, {}
        if not speeds:
            return context.current_num_replicas, {}
        speed = sum(speeds) / len(speeds)
        return max(backlog / (speed * self._target_backlog_s), 1.0), {}
