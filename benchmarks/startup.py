"""How long a start takes: from `serve run` to the first token over HTTP, and of that what the engine alone needs.

    .venv/bin/python -m benchmarks.startup

The first start on a machine also converts the built-in model and compiles the kernels; `--first` measures one of those,
with an empty cache folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.server import ROOT, our_config, ray_serve

ENGINE = """
import time
started_at = time.perf_counter()
from serve_app import SamplingParams, UserRequest, load_engine
imported_at = time.perf_counter()
engine = load_engine()
loaded_at = time.perf_counter()
next(iter(engine.add_to_queue([UserRequest("a", (1, 2, 3), SamplingParams(max_tokens=1))])[0]))
print(imported_at - started_at, loaded_at - imported_at, time.perf_counter() - loaded_at)
"""


def engine_s() -> list[float]:
    """Seconds of a process of its own for its imports, for loading and proving the model, and for a first token."""
    run = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=True, cwd=ROOT)
    return [float(part) for part in run.stdout.split()]


def server_s(port: int) -> float:
    """Seconds from `serve run` until a completion of one token is answered."""
    started_at = time.perf_counter()
    with ray_serve(our_config(port), port):
        return time.perf_counter() - started_at


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="starts of each kind (default 3)")
    parser.add_argument("--first", action="store_true", help="one first start, with an empty cache")
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args()
    if args.first:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SERVE_APP_CACHE"] = folder
            imports, load, token = engine_s()
        print(
            f"engine, first start: imports {imports:.1f} s, convert, compile, load {load:.1f} s, first token {token:.2f} s"
        )
        return 0
    engine_s()  # whatever is to be converted, compiled or read from disk
    parts = [statistics.median(part) for part in zip(*(engine_s() for _ in range(args.repeats)), strict=True)]
    print("engine, second start: imports {:.1f} s, load and prove {:.1f} s, first token {:.2f} s".format(*parts))
    starts = [server_s(args.port) for _ in range(args.repeats)]
    print(f"server, second start: {statistics.median(starts):.1f} s to the first token over HTTP (of {args.repeats})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
