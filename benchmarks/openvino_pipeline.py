"""OpenVINO GenAI's continuous batching pipeline under the load of benchmarks.compare. Runs in that peer's environment.

    python openvino_pipeline.py MODEL.gguf < [[concurrency, [[prompt, max_tokens], ...]], ...]

Prints, as its last line, one object per load as JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import openvino_genai


def settings(max_tokens: int) -> Any:
    """Greedy, and exactly so many tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def run(pipeline: Any, concurrency: int, jobs: list[tuple[str, int]]) -> dict[str, float | str]:
    """Keeps `concurrency` requests in the pipeline until all jobs are done."""
    waiting = list(enumerate(jobs))
    running: dict[int, dict[str, Any]] = {}
    outcomes: list[dict[str, Any]] = []
    cpu, started_at = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            index, (prompt, max_tokens) = waiting.pop(0)
            handle = pipeline.add_request(index, prompt, settings(max_tokens))
            running[index] = {"handle": handle, "started_at": time.perf_counter(), "times": []}
        pipeline.step()
        now = time.perf_counter()
        for index in list(running):
            state = running[index]
            while state["handle"].can_read():
                for output in state["handle"].read().values():
                    state["times"] += [now] * len(output.generated_ids)
            if state["handle"].get_status() != openvino_genai.GenerationStatus.RUNNING:
                outcomes.append(running.pop(index))
    elapsed_s, used = time.perf_counter() - started_at, resource.getrusage(resource.RUSAGE_SELF)
    gaps = [(b - a) * 1000 for o in outcomes for a, b in pairwise(o["times"])]
    per_token = [(o["times"][-1] - o["times"][0]) * 1000 / max(len(o["times"]) - 1, 1) for o in outcomes]
    return {
        "load": f"c={concurrency}",
        "tokens_per_s": sum(len(o["times"]) for o in outcomes) / elapsed_s,
        "ttft_p50_ms": statistics.median((o["times"][0] - o["started_at"]) * 1000 for o in outcomes),
        "tpot_p50_ms": statistics.median(per_token),
        "gap_p50_ms": statistics.median(gaps),
        "cpu_s": used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime,
        "memory_mb": used.ru_maxrss / 1000,
        "errors": 0,
    }


if __name__ == "__main__":
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU")
    loads = json.load(sys.stdin)
    run(pipeline, 8, loads[0][1][:8])  # warm up
    print(json.dumps([run(pipeline, concurrency, jobs) for concurrency, jobs in loads]))
