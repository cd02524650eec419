"""Whether the engine's memory grows: many short requests through HTTP, 32 at a time, and its resident memory as they pass.

.venv/bin/python -m benchmarks.endurance --requests 10000
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import uvloop

from benchmarks.compare import MODEL
from benchmarks.server import Server, our_config, ray_serve
from serve_app.loadgen import WORDS, Job, Target, run_load


def engine_memory(server: Server) -> tuple[float, float]:
    """Resident memory of the engine replica now and at its highest, in MB."""
    found = (0.0, 0.0)
    for pid in server.processes():
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"Engine" in name:
            now, highest = (int(status[key].split()[0]) / 1000 for key in ("VmRSS", "VmHWM"))
            found = max(found, (now, highest))
    return found


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1000, help="requests between two looks (default 1000)")
    parser.add_argument("--port", type=int, default=8124)
    args = parser.parse_args()
    rng = random.Random(0)
    with ray_serve(our_config(args.port), args.port) as server:
        print("loaded: now {:.0f} MB, at its highest {:.0f} MB".format(*engine_memory(server)), flush=True)
        for done in range(0, args.requests, args.every):
            jobs = [Job(" ".join(rng.choices(WORDS, k=rng.randint(2, 12))), rng.randint(1, 6)) for _ in range(args.every)]
            result = uvloop.run(run_load(Target(server.url, MODEL), jobs, 32))
            now, highest = engine_memory(server)
            speed = len(jobs) / result.elapsed_s
            print(f"{done + len(jobs):>6} requests: {now:.0f} MB, at its highest {highest:.0f} MB, {speed:.0f} requests/s,"
                  f" {len(result.errors)} errors", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
