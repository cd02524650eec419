"""What a token costs by the length of its context, against what the cache's bytes explain.

    .venv/bin/python -m benchmarks.context

The engine alone, in this process: rows with contexts of 128 to 4,096 tokens draw some tokens each. The machine has slow
spells that outlast one such measurement, so the contexts are measured in turn, several rounds, and each context's quietest
round counts. Writes benchmarks/results/context.json and context.png.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from itertools import pairwise

import torch

from benchmarks.server import ROOT
from serve_app.config import EngineConfig
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.model_runner import ModelRunner
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.loading import load_engine

RESULTS = ROOT / "benchmarks" / "results"
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


def step_s(engine: BatchInferenceEngine, rows: int, context: int, tokens: int, tag: str) -> float:
    """Median seconds between a row's tokens, once all rows draw."""
    rng = random.Random(f"{tag}-{rows}-{context}")
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    requests = [
        UserRequest(
            f"{tag}-{rows}-{context}-{row}", tuple(rng.randrange(5, 40_000) for _ in range(context - tokens)), params
        )
        for row in range(rows)
    ]
    streams = engine.add_to_queue(requests)
    times = []
    for _ in streams[-1]:
        times.append(time.perf_counter())
    for stream in streams[:-1]:
        for _ in stream:
            pass
    return statistics.median(after - before for before, after in pairwise(times))


def bandwidth() -> float:
    """Bytes per second that torch's threads read, from memory or from a cache that holds so much."""
    numbers = torch.ones(400_000_000, dtype=torch.uint8)  # memory that was never written is one page, read again and again
    best = 0.0
    for _ in range(5):
        started_at = time.perf_counter()
        numbers.view(torch.int64).sum()
        best = max(best, numbers.numel() / (time.perf_counter() - started_at))
    return best


def draw(found: dict[int, dict[int, float]], per_token_s: float) -> None:
    """Milliseconds per token of a row, measured, and the shortest context's cost plus the bytes of the cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for rows, by_context in found.items():
        contexts = list(by_context)
        [line] = axis.plot(contexts, [by_context[c] * 1000 for c in contexts], marker="o", label=f"{rows} rows")
        explained = [by_context[contexts[0]] + rows * (c - contexts[0]) * per_token_s for c in contexts]
        axis.plot(contexts, [e * 1000 for e in explained], "--", color=line.get_color(), label=f"{rows} rows, by bytes")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("time between a row's tokens, ms")
    axis.legend()
    figure.savefig(RESULTS / "context.png", dpi=120)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="rows that decode together (default 1 4)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens that each draws (default 24)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each is measured (default 5)")
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    args = parser.parse_args()
    engine = load_engine(engine=EngineConfig(precision=args.precision, kv_cache_tokens=4096 * max(args.rows) + 4096))
    step_s(engine, 1, 128, args.tokens, "warm")
    found: dict[int, dict[int, float]] = {rows: dict.fromkeys(CONTEXTS, math.inf) for rows in args.rows}
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", flush=True)
        for rows, by_context in found.items():
            for context in CONTEXTS:
                by_context[context] = min(by_context[context], step_s(engine, rows, context, args.tokens, str(turn)))
    assert isinstance(engine.runner, ModelRunner)
    bytes_per_token = engine.runner.cache_bytes_per_token
    engine.shutdown()
    speed = bandwidth()  # not before: a second OpenMP team in the process slows the engine's down (notes.md)
    print(f"reading: {speed / 1e9:.1f} GB/s; {bytes_per_token} bytes per cached token")
    for rows, by_context in found.items():
        print(f"{rows} rows: " + ", ".join(f"{c}: {s * 1000:.1f} ms" for c, s in by_context.items()))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "context.json").write_text(json.dumps({"bytes_per_s": speed, "step_s": found}, indent=1))
    draw(found, bytes_per_token / speed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
