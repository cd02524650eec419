"""What a token costs by the length of its context, against what the bytes that it reads explain.

    .venv/bin/python -m benchmarks.context

The engine alone, in this process: rows with contexts of 128 to 4,096 tokens draw some tokens each. The machine has slow
spells that outlast one such measurement, so the contexts are measured in turn, several rounds, and each context's quietest
round counts. What the bytes explain is measured too: how much longer it takes to read all that a step reads, weights and
cache, than with the shortest context. (A long context also pushes weights out of the processor's cache.) Writes
benchmarks/results/context.json and context.png.
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
from serve_app.models.builtin import gguf_path

RESULTS = ROOT / "benchmarks" / "results"
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
PIECES, READINGS = 60, 15


def step_s(engine: BatchInferenceEngine, rows: int, context: int, tokens: int, tag: str) -> float:
    """Median seconds between a row's tokens while all rows draw."""
    rng = random.Random(f"{tag}-{rows}-{context}")
    prompts = [tuple(rng.randrange(5, 40_000) for _ in range(context - tokens)) for _ in range(rows)]
    for row, prompt in enumerate(
        prompts
    ):  # into the prefix cache: else the first rows would be done before the last begins
        once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        for _ in engine.add_to_queue([UserRequest(f"{tag}-{rows}-{context}-{row}-once", prompt, once)])[0]:
            pass
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    names = [f"{tag}-{rows}-{context}-{row}" for row in range(rows)]
    streams = engine.add_to_queue([UserRequest(name, prompt, params) for name, prompt in zip(names, prompts, strict=True)])
    times = []
    for _ in streams[-1]:
        times.append(time.perf_counter())
    for stream in streams[:-1]:
        for _ in stream:
            pass
    return statistics.median(after - before for before, after in pairwise(times))


def reading_s(num_bytes: int) -> float:
    """Seconds that torch's threads take to read so many bytes again and again, in pieces; some may lie in a cache."""
    pieces = [torch.ones(num_bytes // PIECES, dtype=torch.uint8) for _ in range(PIECES)]  # memory never written is one page
    words = [piece[: len(piece) // 8 * 8].view(torch.int64) for piece in pieces]
    best = math.inf
    for _ in range(READINGS):
        started_at = time.perf_counter()
        for word in words:
            word.sum()
        best = min(best, time.perf_counter() - started_at)
    return best


def draw(found: dict[int, dict[int, float]], explained: dict[int, dict[int, float]]) -> None:
    """Milliseconds per token of a row, measured, and the shortest context's cost plus what the bytes add."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for rows, by_context in found.items():
        [line] = axis.plot(list(by_context), [s * 1000 for s in by_context.values()], marker="o", label=f"{rows} rows")
        by_bytes = [s * 1000 for s in explained[rows].values()]
        axis.plot(list(by_context), by_bytes, "--", color=line.get_color(), label=f"{rows} rows, by bytes")
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
    weights = gguf_path().stat().st_size  # the engine keeps them in the file's own 4 and 8 bits
    # not before: a second OpenMP team in the process slows the engine's down (notes.md)
    floors = {rows: {c: reading_s(weights + rows * c * bytes_per_token) for c in CONTEXTS} for rows in found}
    explained = {
        rows: {c: by_context[CONTEXTS[0]] + floors[rows][c] - floors[rows][CONTEXTS[0]] for c in CONTEXTS}
        for rows, by_context in found.items()
    }
    print(f"{weights / 1e6:.0f} MB of weights, {bytes_per_token} bytes per cached token")
    for rows, by_context in found.items():
        for context, seconds in by_context.items():
            num_bytes = weights + rows * context * bytes_per_token
            told = f"{seconds * 1000:5.1f} ms a token, {explained[rows][context] * 1000:5.1f} by bytes"
            print(f"{rows} rows, context {context:>5}: {told} ({num_bytes / floors[rows][context] / 1e9:.1f} GB/s)")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "context.json").write_text(json.dumps({"step_s": found, "explained_s": explained}, indent=1))
    draw(found, explained)
    return 0


if __name__ == "__main__":
    sys.exit(main())
