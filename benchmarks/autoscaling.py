"""Replicas on a replayed trace: more for few long prompts, one for many tiny ones, and fewer again without losing a stream.

    .venv/bin/python -m benchmarks.autoscaling

The built-in model on `serve_config.yaml`, with up to three replicas of one thread and short delays. The trace: many callers
at a time who want two tokens each; then few with long prompts; then, while the work runs out, long streams on all replicas.
Prints the replicas and the work in each phase; writes benchmarks/results/autoscaling.json and docs/images/autoscaling.png.
Exits with 1 when a stream was lost or the replicas did not rise, stay and fall as said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.server import ROOT, deployment_of, free_port, our_config, ray_serve, serve_switches
from serve_app.loadgen import Job, LoadResult, Target, mixed_jobs, run_load

MODEL = "smollm2-135m-instruct"
MAX_REPLICAS = 3
TARGET_BACKLOG_S = 8.0
QUIET_S = 40


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the trace: so many callers at a time until its jobs are done."""

    name: str
    concurrency: int
    jobs: Sequence[Job]


@dataclass(frozen=True, slots=True)
class Glance:
    """The replicas that serve, calls on their way, and tokens in sight."""

    at_s: float
    num_replicas: int
    num_calls: int
    backlog_tokens: int


def trace() -> list[Phase]:
    """What comes, phase by phase."""
    tiny = [Job(f"{job.prompt}.", 2) for job in mixed_jobs(1500, 0, (3, 6), (2, 2))]
    return [
        Phase("many tiny", 48, tiny),
        Phase("few long", 16, mixed_jobs(64, 1, (1000, 1400), (60, 120), long_tail=False)),
        Phase("long streams", 6, mixed_jobs(6, 2, (20, 30), (2500, 2500))),
    ]


def config_of(port: int) -> dict[str, Any]:
    """serve_config.yaml with room for more replicas, which come and go within seconds."""
    config = our_config(port)
    config["applications"][0]["args"]["engine"] |= {"num_threads": 1}
    engine = deployment_of(config, "Engine")
    engine["ray_actor_options"]["num_cpus"] = 0
    engine["autoscaling_config"] |= {
        "min_replicas": 1,
        "max_replicas": MAX_REPLICAS,
        "upscale_delay_s": 3,
        "downscale_delay_s": 15,
        "look_back_period_s": 3,
    }
    engine["autoscaling_config"]["policy"]["policy_kwargs"] = {"target_backlog_s": TARGET_BACKLOG_S}
    return config


@dataclass(frozen=True, slots=True)
class Replayed:
    """A phase, when it was, and what its callers got."""

    phase: Phase
    began_at_s: float
    ended_at_s: float
    result: LoadResult

    @property
    def num_lost(self) -> int:
        """Calls that did not get all their tokens."""
        whole = sum(job.max_tokens for job in self.phase.jobs) == sum(one.num_tokens for one in self.result.outcomes)
        return len(self.phase.jobs) - len(self.result.outcomes) + (not whole)

    def replicas(self, glances: Sequence[Glance]) -> list[int]:
        """How many there were, glance by glance."""
        return [one.num_replicas for one in glances if self.began_at_s <= one.at_s <= self.ended_at_s]


async def replay(url: str, phases: Sequence[Phase]) -> tuple[list[Replayed], list[Glance]]:
    """All phases, one after the other, and a time of quiet; with a glance every second."""
    from ray import serve

    engines = serve.get_deployment_handle("Engine", "serve_app")
    started_at = time.monotonic()
    glances: list[Glance] = []
    played: list[Replayed] = []
    num_left = 0

    async def watch() -> None:
        while True:
            answers = await engines.broadcast("stats").results_async(timeout_s=10, return_exceptions=True)
            stats = [answer for answer in answers if not isinstance(answer, Exception)]
            now = time.monotonic() - started_at
            glances.append(Glance(now, len(stats), num_left, sum(one.num_backlog_tokens for one in stats)))
            if len(glances) % 5 == 0:
                print(*(f"{name} {value:.0f}" for name, value in asdict(glances[-1]).items()), flush=True)
            await asyncio.sleep(1)

    def ended() -> None:
        nonlocal num_left
        num_left -= 1

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        for phase in phases:
            print(phase.name, flush=True)
            num_left = len(phase.jobs)
            began_at = time.monotonic() - started_at
            result = await run_load(Target(url, MODEL), phase.jobs, phase.concurrency, on_end=ended)
            played.append(Replayed(phase, began_at, time.monotonic() - started_at, result))
        await asyncio.sleep(QUIET_S)
        watching.cancel()
    return played, glances


def draw(played: Sequence[Replayed], glances: Sequence[Glance]) -> None:
    """Replicas, calls and tokens in sight over the trace."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    times = [one.at_s for one in glances]
    for axis, name, label in zip(
        axes,
        ("num_calls", "backlog_tokens", "num_replicas"),
        ("calls of the phase\nthat are not done", "tokens in sight", "engine replicas"),
        strict=True,
    ):
        axis.step(times, [getattr(one, name) for one in glances], where="post")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        for one in played:
            axis.axvspan(one.began_at_s, one.ended_at_s, alpha=0.08)
            axis.axvline(one.began_at_s, color="grey", linestyle="--", linewidth=0.8)
    axes[0].set_yscale("symlog")
    for index, one in enumerate(played):
        axes[0].text(one.began_at_s + 1, 500 if index % 2 else 2, one.phase.name, fontsize=9)
    axes[-1].set_xlabel("seconds")
    figure.savefig(ROOT / "docs" / "images" / "autoscaling.png", dpi=100)


def main() -> int:
    """See the module's docstring."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ |= {**serve_switches(), "RAY_ENABLE_AUTO_CONNECT": "0"}  # before Ray is imported
    port = free_port()
    with ray_serve(config_of(port), port) as server:
        import ray

        ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
        server.settle()
        played, glances = asyncio.run(replay(server.url, trace()))
        ray.shutdown()
    for one in played:
        counts, took_s = one.replicas(glances), one.ended_at_s - one.began_at_s
        calls = f"{len(one.phase.jobs):5} calls in {took_s:5.0f} s, {one.num_lost} lost"
        print(f"{one.phase.name:14} {calls}; replicas {counts[0]} -> {counts[-1]}, at most {max(counts)}")
    print(f"{'quiet':14} replicas -> {glances[-1].num_replicas}")
    found = {
        "phases": [(one.phase.name, one.began_at_s, one.ended_at_s) for one in played],
        "glances": list(map(asdict, glances)),
    }
    (ROOT / "benchmarks" / "results" / "autoscaling.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(played, glances)
    tiny, long, streams = (one.replicas(glances) for one in played)
    follows = max(tiny) == 1 and max(long) > 1 and streams[-1] < max(streams) and glances[-1].num_replicas == 1
    return 0 if follows and not any(one.num_lost for one in played) else 1


if __name__ == "__main__":
    sys.exit(main())
