"""What the server does when more comes than it can serve, and when one caller floods it.

    .venv/bin/python -m benchmarks.overload

The overload curve: a Poisson process of half to four times the capacity, nobody coming back; goodput (tokens of whole
answers per second), refusals, and the time to the first token of those who were admitted. Then callers who obey
Retry-After, at twice the capacity. And a tenant's time to the first token alone and beside another tenant's flood. Writes
benchmarks/results/overload.json and overload.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import aiohttp
import uvloop

from benchmarks.compare import MODEL, jobs_of
from benchmarks.server import ROOT, deployment_of, our_config, ray_serve
from serve_app.loadgen import Job, LoadResult, RefusedError, Target, run_load, run_open_load, send

RESULTS = ROOT / "benchmarks" / "results"
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
FLOOD_CALLS = 48


@dataclass(frozen=True, slots=True)
class Point:
    """One load of the curve."""

    load: float
    offered_per_s: float
    goodput_tokens_per_s: float
    refused: float
    ttft_p50_s: float
    ttft_p95_s: float
    num_errors: int


def point_of(load: float, rate: float, jobs: int, result: LoadResult) -> Point:
    """What a run at a load gave."""
    ttfts = [outcome.ttft_s for outcome in result.outcomes]
    p50, p95 = result.quantile(ttfts, 0.5), result.quantile(ttfts, 0.95)
    return Point(load, rate, result.tokens_per_s, result.num_refused / jobs, p50, p95, len(result.errors))


async def obedient(url: str, jobs: list[Job], rate: float) -> dict[str, Any]:
    """Callers who come back when they are told to, as a Poisson process; how often each was refused."""
    rng = random.Random(1)
    refusals: list[int] = []
    waits: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def call(job: Job) -> None:
            count = 0
            while True:
                try:
                    await send(session, Target(url, MODEL), job)
                except RefusedError as refused:
                    count += 1
                    waits.append(refused.retry_after_s)
                    await asyncio.sleep(refused.retry_after_s + rng.random() * 0.2)
                else:
                    refusals.append(count)
                    return

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(call(job))
                await asyncio.sleep(rng.expovariate(rate))
    returned = [count for count in refusals if count]
    at_first = sum(count == 1 for count in returned) / len(returned) if returned else float("nan")
    return {
        "callers": len(refusals),
        "refused_at_first": len(returned),
        "served_at_first_return": at_first,
        "longest_wait_s": max(waits, default=0.0),
    }


async def beside_a_flood(url: str, seconds: float) -> dict[str, float]:
    """A quiet tenant's time to the first token, in seconds, alone and beside a flood of another tenant's calls."""
    quiet = [replace(job, max_tokens=16, user="quiet") for job in jobs_of(100, 11)]
    alone = await run_load(Target(url, MODEL), quiet, 1)
    stop = asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        flood = iter([replace(job, user="flood") for job in jobs_of(100_000, 12)])

        async def flooder() -> None:
            while not stop.is_set():
                try:
                    await send(session, Target(url, MODEL), next(flood))
                except RefusedError:
                    await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as group:
            for _ in range(FLOOD_CALLS):
                group.create_task(flooder())
            await asyncio.sleep(seconds)
            beside = await run_load(Target(url, MODEL), quiet, 1)
            stop.set()
    ttfts = {"alone": alone, "beside": beside}
    return {
        f"{name}_{label}": result.quantile([outcome.ttft_s for outcome in result.outcomes], fraction)
        for name, result in ttfts.items()
        for label, fraction in (("p50", 0.5), ("p95", 0.95))
    }


def draw(points: list[Point]) -> None:
    """Goodput and time to the first token over the load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.5), layout="constrained")
    (above, below) = figure.subplots(2, 1, sharex=True)
    loads = [point.load for point in points]
    above.plot(loads, [point.goodput_tokens_per_s for point in points], marker="o")
    above.set_ylim(bottom=0)
    above.set_ylabel("goodput, tokens/s")
    for name, values in (("p50", [p.ttft_p50_s for p in points]), ("p95", [p.ttft_p95_s for p in points])):
        below.plot(loads, values, marker="o", label=name)
    below.set_ylim(bottom=0)
    below.set_ylabel("time to the first token\nof admitted calls, s")
    below.set_xlabel("load, times the capacity")
    below.legend()
    figure.savefig(RESULTS / "overload.png", dpi=120)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="length of each load (default 20)")
    parser.add_argument("--budget", type=int, default=6000, help="tokens that may wait (default 6000)")
    parser.add_argument("--port", type=int, default=8125)
    args = parser.parse_args()
    config = our_config(args.port)
    engine = deployment_of(config, "Engine")
    engine["user_config"]["max_waiting_tokens"] = args.budget
    engine["autoscaling_config"]["max_replicas"] = 1
    with ray_serve(config, args.port) as server:
        uvloop.run(run_load(Target(server.url, MODEL), jobs_of(8, 99), 8))
        server.settle()
        closed = uvloop.run(run_load(Target(server.url, MODEL), jobs_of(96, 1), 32))
        capacity = len(closed.outcomes) / closed.elapsed_s
        print(
            f"capacity (closed loop, 32 at a time): {capacity:.1f} requests/s, {closed.tokens_per_s:.0f} tokens/s",
            flush=True,
        )
        time.sleep(3)
        jobs = jobs_of(round(args.seconds * 2 * capacity), 77)
        obeying = uvloop.run(
            obedient(server.url, jobs, 2 * capacity)
        )  # first: the others do not come back, and are remembered
        print(obeying, flush=True)
        fairness = uvloop.run(beside_a_flood(server.url, 5))
        print(", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in fairness.items()), flush=True)
        points = []
        for load in LOADS:
            time.sleep(3)
            jobs = jobs_of(round(args.seconds * load * capacity), round(load * 10))
            result = uvloop.run(run_open_load(Target(server.url, MODEL), jobs, load * capacity))
            points.append(point_of(load, load * capacity, len(jobs), result))
            print(points[-1], flush=True)
    best = max(point.goodput_tokens_per_s for point in points)
    print(f"goodput at {points[-1].load:g} times the capacity: {points[-1].goodput_tokens_per_s / best:.0%} of the best")
    found = {"capacity_per_s": capacity, "points": [asdict(p) for p in points], "obedient": obeying, "fairness_s": fairness}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overload.json").write_text(json.dumps(found, indent=1))
    draw(points)
    return 0


if __name__ == "__main__":
    sys.exit(main())
