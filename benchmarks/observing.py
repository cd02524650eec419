"""What metrics cost, and tracing that is off, of the throughput at c=32.

    .venv/bin/python -m benchmarks.observing

A run with them and one without would differ by less than two equal runs do. So the parts are timed instead: a load on the
real server tells how often each of them is called in a second, and in this process, joined to that server's Ray, each is
called as often with the values of that load. Counted as if the processor could do nothing else meanwhile. Prints a table;
exits with 1 when all parts together take 1 % of the time or more.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import uvloop

from benchmarks.server import free_port, our_config, ray_serve, serve_switches
from serve_app.loadgen import LoadResult, Target, mixed_jobs, run_load

MODEL = "smollm2-135m-instruct"
CONCURRENCY = 32
LIMIT = 0.01
REPEATS = 5


def seconds(work: Callable[[], None]) -> float:
    """The quickest of some runs: what else the machine does is not this work's cost."""

    def once() -> float:
        started_at = time.perf_counter()
        work()
        return time.perf_counter() - started_at

    return min(once() for _ in range(REPEATS))


def costs(result: LoadResult, num_steps: int) -> dict[str, float]:
    """Seconds that each part takes for a whole load."""
    from serve_app.engine.engine import EngineStats
    from serve_app.engine.timing import Timing, Timings
    from serve_app.metrics import IngressMetrics, ReplicaMetrics

    ingress, replica = IngressMetrics(), ReplicaMetrics()
    stats = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 1))
    of_a_step = (Timing.STEP, Timing.BATCH_SIZE, Timing.STEP_TOKENS)
    of_a_call = (Timing.QUEUE, Timing.PREFILL, Timing.DECODE)
    values = [(kind, 0.05) for kind in of_a_step for _ in range(num_steps)]
    values += [(kind, 0.5) for kind in of_a_call for _ in result.outcomes]
    rows = [
        SimpleNamespace(sequence=SimpleNamespace(request=SimpleNamespace(traceparent=None))) for _ in range(CONCURRENCY)
    ]

    def count_calls() -> None:
        for outcome in result.outcomes:
            ingress.call_ended("length", "", 100, outcome.num_tokens)
            ingress.call_took(outcome.ttft_s, outcome.gaps_s, outcome.total_s)

    def note() -> None:
        timings = Timings()
        for kind, value in values:
            timings.note(kind, value)

    def report() -> None:
        for _ in range(int(result.elapsed_s / 10) + 1):  # at each health check, every ten seconds
            replica.observe(replace(stats), ())
        replica.observe(stats, values)

    def look_for_traces() -> None:
        for _ in range(num_steps):
            for row in rows:
                if row.sequence.request.traceparent is not None:
                    raise AssertionError

    return {
        "ingress: calls, tokens, latencies": seconds(count_calls),
        "engine: noting a step's and a call's times": seconds(note),
        "engine replica: gauges, counters, histograms": seconds(report),
        "engine: is a row traced?": seconds(look_for_traces),
    }


async def steps_so_far() -> int:
    from ray import serve

    stats = await serve.get_deployment_handle("Engine", "serve_app").stats.remote()
    return int(stats.num_steps)


async def load(url: str, num_requests: int) -> tuple[LoadResult, int]:
    """The load, and in how many steps the engine did it."""
    target = Target(url, MODEL)
    await run_load(target, mixed_jobs(CONCURRENCY, 1, (30, 120), (16, 64)), CONCURRENCY)  # warm up
    before = await steps_so_far()
    result = await run_load(target, mixed_jobs(num_requests, 0, (30, 120), (16, 128), long_tail=False), CONCURRENCY)
    return result, await steps_so_far() - before


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="of the load (default 256)")
    args = parser.parse_args()
    os.environ |= {**serve_switches(), "RAY_ENABLE_AUTO_CONNECT": "0"}  # before Ray is imported
    port = free_port()
    with ray_serve(our_config(port), port) as server:
        import ray

        ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
        server.settle()
        result, num_steps = uvloop.run(load(server.url, args.requests))
        found = costs(result, num_steps)
        ray.shutdown()
    num_tokens = sum(outcome.num_tokens for outcome in result.outcomes)
    speed = f"c={CONCURRENCY}: {result.tokens_per_s:.0f} tokens/s"
    print(f"{speed}, {num_steps} steps, {len(result.outcomes)} calls, {len(result.errors)} errors")
    together = sum(found.values())
    for name, cost in {**found, f"together (target: below {LIMIT:.0%})": together}.items():
        print(f"{name:46} {cost / num_tokens * 1e6:6.2f} us per token  {cost / result.elapsed_s:7.3%}")
    return 0 if together < LIMIT * result.elapsed_s and not result.errors else 1


if __name__ == "__main__":
    sys.exit(main())
