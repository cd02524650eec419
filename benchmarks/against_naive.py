"""Ours against the usual `@serve.batch` around `model.generate`: same machine, same model, same load, in turn.

    .venv/bin/python -m benchmarks.against_naive

Prints one line per run and, at the end, the ratios of the medians. Exits with 1 when a ratio misses its target.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import uvloop

from benchmarks.server import our_config, ray_serve
from serve_app.loadgen import LoadResult, Target, mixed_jobs, run_load

MIN_SPEEDUP, MAX_TTFT_RATIO = 3.0, 1 / 3


def naive_config(port: int, max_batch_size: int) -> dict[str, object]:
    """The baseline with the batch size that suits the load best."""
    application = {
        "name": "naive",
        "route_prefix": "/",
        "import_path": "benchmarks.naive_app:build_app",
        "args": {"max_batch_size": max_batch_size},
    }
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}


def report(name: str, result: LoadResult) -> None:
    """One line."""
    print(
        f"{name:>12}: {result.tokens_per_s:7.1f} tokens/s  TTFT p50 {result.ttft_p50_s * 1000:8.0f} ms  "
        f"gap p50 {result.gap_p50_s * 1000:6.0f} ms  {len(result.outcomes)} ok, {len(result.errors)} errors",
        flush=True,
    )
    if result.errors:
        raise SystemExit(f"the load met errors: {result.errors[:3]}")


def bounds(text: str) -> tuple[int, int]:
    """`30,120` as numbers."""
    least, most = map(int, text.split(","))
    return least, most


def median(results: Sequence[LoadResult], name: str) -> float:
    """Median of a figure over the repeats."""
    return float(statistics.median(getattr(result, name) for result in results))


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--concurrency", type=int, default=32, help="streams at a time (default 32)")
    parser.add_argument("-n", "--requests", type=int, default=96, help="requests per run (default 96)")
    parser.add_argument("--prompt-words", default="30,120", help="least,most words of a prompt (default 30,120)")
    parser.add_argument("--output-tokens", default="16,128", help="least,most tokens of an answer (default 16,128)")
    parser.add_argument("--long-tail", action="store_true", help="most answers short, few long, instead of uniform")
    parser.add_argument("--naive-batch-size", type=int, default=32, help="max_batch_size of the baseline (default 32)")
    parser.add_argument("--repeats", type=int, default=2, help="interleaved runs of each (default 2)")
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args()
    words, tokens = bounds(args.prompt_words), bounds(args.output_tokens)
    configs = {"ours": our_config(args.port), "naive": naive_config(args.port, args.naive_batch_size)}
    results: dict[str, list[LoadResult]] = {name: [] for name in configs}
    for repeat in range(args.repeats):
        for name, config in configs.items():
            with ray_serve(config, args.port) as server:
                url = server.url
                model = "smollm2-135m-instruct"
                uvloop.run(run_load(Target(url, model), mixed_jobs(4, 99, words, tokens), 4))  # warm up
                jobs = mixed_jobs(args.requests, repeat, words, tokens, long_tail=args.long_tail)
                results[name].append(uvloop.run(run_load(Target(url, model), jobs, args.concurrency)))
                report(name, results[name][-1])
    speedup = median(results["ours"], "tokens_per_s") / median(results["naive"], "tokens_per_s")
    ttft_ratio = median(results["ours"], "ttft_p50_s") / median(results["naive"], "ttft_p50_s")
    print(f"tokens/s: {speedup:.2f} times the baseline's (target: at least {MIN_SPEEDUP:g})")
    print(f"TTFT p50: {ttft_ratio:.3f} of the baseline's (target: at most {MAX_TTFT_RATIO:.3f})")
    return 0 if speedup >= MIN_SPEEDUP and ttft_ratio <= MAX_TTFT_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
