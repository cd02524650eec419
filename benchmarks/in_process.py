"""The engine alone, in this process, without Ray and HTTP, under the load of benchmarks.compare.

    .venv/bin/python -m benchmarks.in_process [--quantization int8] [--requests 64]

Prints a line per load, and, as its last line, one object per load as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import uvloop

from serve_app.config import EngineConfig
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.loadgen import Job, LoadResult, Outcome, mixed_jobs
from serve_app.loading import load_engine
from serve_app.models.checkpoint import find_checkpoint
from serve_app.text.tokenizer import Tokenizer

PROMPT_WORDS, OUTPUT_TOKENS = (30, 120), (16, 128)


async def run(
    engine: BatchInferenceEngine, prompts: Sequence[tuple[int, ...]], jobs: Sequence[Job], concurrency: int
) -> LoadResult:
    """Keeps `concurrency` requests in the engine until all jobs are done."""
    waiting: Iterator[tuple[int, Job]] = iter(enumerate(jobs))
    outcomes: list[Outcome] = []

    async def worker() -> None:
        for index, job in waiting:
            params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
            started_at = last_at = time.perf_counter()
            outcome = Outcome(0.0, 0.0, 0)
            request = UserRequest(f"{concurrency}-{index}", prompts[index], params)
            async for _ in engine.add_to_queue([request])[0]:
                now = time.perf_counter()
                if outcome.num_tokens:
                    outcome.gaps_s.append(now - last_at)
                else:
                    outcome.ttft_s = now - started_at
                outcome.num_tokens += 1
                last_at = now
            outcome.total_s = time.perf_counter() - started_at
            outcomes.append(outcome)

    started_at = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return LoadResult(outcomes, [], time.perf_counter() - started_at)


def measure(engine: BatchInferenceEngine, tokenizer: Tokenizer, jobs: Sequence[Job], concurrency: int) -> dict[str, object]:
    """One load; the fields of a row of benchmarks.compare."""
    prompts = [tuple(tokenizer.encode(job.prompt)) for job in jobs]
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = uvloop.run(run(engine, prompts, jobs, concurrency))
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "load": f"c={concurrency}",
        "tokens_per_s": round(result.tokens_per_s, 1),
        "ttft_p50_ms": round(result.ttft_p50_s * 1000, 1),
        "tpot_p50_ms": round(result.tpot_p50_s * 1000, 1),
        "gap_p50_ms": round(result.gap_p50_s * 1000, 1),
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "memory_mb": after.ru_maxrss / 1000,
        "errors": 0,
    }


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=64, help="requests at c=32; fewer at c=8 and c=1 (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    checkpoint = find_checkpoint("builtin")
    tokenizer = Tokenizer.load(checkpoint.path, checkpoint.revision)
    engine = load_engine(engine=EngineConfig(quantization=args.quantization, precision=args.precision))
    measure(engine, tokenizer, mixed_jobs(8, 99, PROMPT_WORDS, OUTPUT_TOKENS, long_tail=False), 8)  # warm up
    rows = []
    for concurrency, count in {1: max(args.requests // 8, 4), 8: args.requests // 2, 32: args.requests}.items():
        jobs = mixed_jobs(count, args.seed, PROMPT_WORDS, OUTPUT_TOKENS, long_tail=False)
        rows.append(measure(engine, tokenizer, jobs, concurrency))
        print(
            *(f"{name} {value:.1f}" if isinstance(value, float) else value for name, value in rows[-1].items()), flush=True
        )
    engine.shutdown()
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
