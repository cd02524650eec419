"""What sharing prefixes is worth: callers with one long beginning in common, with the prefix cache and without it.

    .venv/bin/python -m benchmarks.prefix

In process, without HTTP. Prints the time to first token of each, and the ratio. Exits with 1 when it is below the target.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time

from serve_app.config import EngineConfig, EngineLimits
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.loading import load_engine

MIN_RATIO = 5.0


def ttft_p50_s(*, prefix_cache: bool, callers: int, prefix_tokens: int, own_tokens: int) -> float:
    """Median time to first token of callers who come at once."""
    engine = load_engine(engine=EngineConfig(prefix_cache=prefix_cache), limits=EngineLimits(max_batch_size=callers))
    rng = random.Random(0)
    prefix = [rng.randrange(1000, 40_000) for _ in range(prefix_tokens)]
    requests = [
        UserRequest(
            str(i),
            (*prefix, *(rng.randrange(1000, 40_000) for _ in range(own_tokens))),
            SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
        )
        for i in range(callers)
    ]
    first: list[float] = []

    def read(stream) -> None:  # type: ignore[no-untyped-def]
        outputs = iter(stream)
        next(outputs)
        first.append(time.perf_counter() - started_at)
        for _ in outputs:
            pass

    started_at = time.perf_counter()
    streams = engine.add_to_queue(requests)
    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    engine.shutdown()
    return statistics.median(first)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=1000, help="tokens in common (default 1000)")
    parser.add_argument("--own-tokens", type=int, default=20, help="tokens of each caller's own (default 20)")
    args = parser.parse_args()
    times = {
        sharing: ttft_p50_s(
            prefix_cache=sharing, callers=args.callers, prefix_tokens=args.prefix_tokens, own_tokens=args.own_tokens
        )
        for sharing in (True, False)
    }
    ratio = times[False] / times[True]
    print(f"TTFT p50 with the prefix cache {times[True]:.2f} s, without {times[False]:.2f} s")
    print(f"{ratio:.1f} times (target: at least {MIN_RATIO:g})")
    return 0 if ratio >= MIN_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
