"""Ten bad minutes: twice the load that the server can take, callers who leave, and a replica killed every minute.

    .venv/bin/python -m benchmarks.chaos        # or: make chaos

Two engine replicas of the built-in model in float32. First every call of a catalog is made alone; then callers of all
kinds (benchmarks/callers.py) come as a Poisson process, nobody obeys Retry-After, and what they get is compared with that.
At the end the server's log must have one record with an ending for every call, the same as its caller saw; the engines
must hold nothing; memory must be flat. Prints a table, writes benchmarks/results/chaos.json and chaos.png; exits with 1 if
anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.callers import NO_ENDING, CallReport, Crowd, Manner, catalog, invalid_calls
from benchmarks.compare import MODEL
from benchmarks.server import ROOT, Server, deployment_of, our_config, ray_serve, serve_switches

RESULTS = ROOT / "benchmarks" / "results"
NUM_CALLS = 48
INVALID_SHARE = 0.04
IN_TIME_S = 60
"""How long after the last call all must have ended and the replicas must be back."""
GROWTH = 1.1
"""Memory is flat if its median late in the run is at most so many times that early in it."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica's death by SIGKILL, in seconds since the start of the run."""

    at_s: float
    pid: int
    num_running_calls: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory in MB: of the ingress replica, and of the largest engine replica."""

    at_s: float
    ingress: float
    engine: float


class Watch:
    """The replica processes of an application.

    Args:
        pids: the processes that belong to the server, now.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], application: str) -> None:
        self._pids, self._application = pids, application
        self.ingress_pids: set[int] = set()

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The living replicas of a deployment."""
        found = []
        for pid in self._pids():
            try:
                process = psutil.Process(pid)
                if f":{self._application}:{deployment}" in " ".join(process.cmdline()[:1]):
                    found.append(process)
            except psutil.Error:
                continue
        if deployment == "Ingress":
            self.ingress_pids |= {process.pid for process in found}
        return found

    def memory(self, at_s: float) -> Memory:
        """A glance."""
        return Memory(at_s, *(max(map(_resident, self.replicas(name)), default=0.0) for name in ("Ingress", "Engine")))


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss / 1e6)
    except psutil.Error:
        return 0.0


async def bring_chaos(
    crowd: Crowd, watch: Watch, *, seconds: float, rate: float, kill_every_s: float, seed: int
) -> tuple[list[CallReport], list[Kill], list[Memory]]:
    """The run itself. Calls still running `IN_TIME_S` after it are reported as without an ending."""
    rng = random.Random(seed)
    started_at = time.monotonic()
    reports: list[CallReport] = []
    kills: list[Kill] = []
    memory: list[Memory] = []

    async def one() -> None:
        reports.append(await crowd.call(invalid=rng.random() < INVALID_SHARE))

    async def kill() -> None:
        while time.monotonic() - started_at < seconds - kill_every_s:
            await asyncio.sleep(kill_every_s)
            if victims := await asyncio.to_thread(watch.replicas, "Engine"):
                victim = rng.choice(victims)
                kills.append(Kill(time.monotonic() - started_at, victim.pid, crowd.num_running))
                victim.kill()

    async def look() -> None:
        while True:
            memory.append(await asyncio.to_thread(watch.memory, time.monotonic() - started_at))
            if len(memory) % 5 == 0:
                endings = Counter(report.ending for report in reports)
                faults = sum(len(report.faults) for report in reports)
                print(
                    f"{memory[-1].at_s:5.0f} s  {crowd.num_running} running, {faults} faults, {dict(endings)}", flush=True
                )
            await asyncio.sleep(2)

    helpers = [asyncio.create_task(kill()), asyncio.create_task(look())]
    calls = []
    while time.monotonic() - started_at < seconds:
        calls.append(asyncio.create_task(one()))
        await asyncio.sleep(rng.expovariate(rate))
    done, late = await asyncio.wait(calls, timeout=IN_TIME_S)
    for helper in helpers:
        helper.cancel()
    for task in late:
        task.cancel()
    for task in done:
        task.result()
    now = time.monotonic()
    reports += [CallReport("?", Manner.READ, 0, NO_ENDING, now, now, None, 0, ("still running",)) for _ in late]
    return reports, kills, memory


async def calls_per_s(crowd: Crowd, seconds: float) -> float:
    """How many calls of the catalog two full replicas answer per second, nobody leaving."""
    until = time.monotonic() + seconds
    count = 0

    async def worker() -> None:
        nonlocal count
        while time.monotonic() < until:
            report = await crowd.call()
            count += report.ending == "complete"

    await asyncio.gather(*(worker() for _ in range(48)))
    return count / seconds


def faults_of_log(lines: Iterable[str], reports: list[CallReport]) -> list[str]:
    """What the server's log says otherwise than the callers, who saw the calls from the other side."""
    records: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line.startswith("{"):
            record = json.loads(line)
            records.setdefault(record["id"], []).append(record)
    faults = []
    for report in reports:
        found = records.get(report.request_id, [])
        if len(found) != 1:
            if found or report.ending != "left":  # whoever left at once may never have come to the server
                faults.append(f"{report.request_id} ({report.ending}): {len(found)} records")
            continue
        ending, num_tokens = found[0]["ending"], found[0]["completion_tokens"]
        if report.ending == "complete":
            is_same = ending in ("stop", "length") and num_tokens == report.num_tokens
        else:
            is_same = ending and report.ending in ("left", ending, f"{ending}_exceeded")
        if not is_same:
            faults.append(f"{report.request_id}: {report.ending}, {report.num_tokens} tokens; its record: {found[0]}")
    return faults


async def engines_at_rest(application: str) -> list[str]:
    """What the two engine replicas still hold, asked through Serve; nothing if all is well."""
    from ray import serve

    handle = serve.get_deployment_handle("Engine", application)
    deadline = time.monotonic() + IN_TIME_S
    while True:
        stats = await handle.broadcast("stats").results_async(timeout_s=10, return_exceptions=True)
        held = [
            s
            for s in stats
            if isinstance(s, Exception) or s.num_running or s.num_waiting or s.num_free_blocks != s.num_blocks
        ]
        if (len(stats) == 2 and not held) or time.monotonic() > deadline:
            return [str(s) for s in held] + [f"{len(stats)} replicas"] * (len(stats) != 2)
        await asyncio.sleep(1)


def growth(memory: list[Memory], kind: str) -> float:
    """The median of the last third over that of the second sixth (the first sixth warms up)."""
    values = [getattr(m, kind) for m in memory]
    early, late = sorted(values[len(values) // 6 : len(values) // 3]), sorted(values[len(values) * 2 // 3 :])
    return float(late[len(late) // 2] / early[len(early) // 2])


def table(found: dict[str, Any]) -> str:
    """The run in Markdown, for docs/operations.md."""
    rows = [
        ("calls, in seconds", f"{found['calls']:,} in {found['seconds']:.0f}"),
        ("load", f"{found['rate_per_s']:.1f} calls/s, {found['load']:g} times what closed-loop callers got"),
        ("replicas killed, calls running at each kill", f"{found['kills']}: {found['running_at_kills']}"),
        *((f"ended: {name}", f"{count:,}") for name, count in found["endings"].items()),
        ("whole answers, tokens/s", f"{found['goodput_tokens_per_s']:.0f}"),
        ("time to the first text of admitted streams, p50 / p95", "{:.2f} / {:.2f} s".format(*found["ttft_s"])),
        ("answers compared with the same call made alone", f"{found['compared']:,}"),
        ("wrong or lost answers, calls without or with two endings", str(len(found["faults"]))),
        ("calls whose log record differs, is missing or is there twice", str(len(found["log_faults"]))),
        ("held by the engines afterwards", ", ".join(found["held"]) or "nothing"),
        ("memory late in the run over early: ingress / largest engine", "{:.2f} / {:.2f}".format(*found["growth"])),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def draw(reports: list[CallReport], kills: list[Kill], memory: list[Memory], started_at: float, step_s: float = 10) -> None:
    """Answers, refusals, waits and memory over the run, with the kills."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    (rates, waits, sizes) = figure.subplots(3, 1, sharex=True)
    steps = int(memory[-1].at_s / step_s) + 1
    whole = [report for report in reports if report.ending == "complete"]
    refused = [report for report in reports if report.status == 429]
    others = [report for report in reports if report.ending != "complete" and report.status != 429]
    for name, ended in {"whole answers": whole, "refused (429)": refused, "other endings": others}.items():
        counts = Counter(int((report.ended_at - started_at) / step_s) for report in ended)
        rates.plot([step * step_s for step in range(steps)], [counts[step] / step_s for step in range(steps)], label=name)
    rates.set_ylabel("calls/s")
    first = [(report.started_at - started_at, report.ttft_s) for report in reports if report.ttft_s is not None]
    waits.scatter(*zip(*first, strict=True), s=3, alpha=0.4)
    waits.set_ylabel("time to the\nfirst text, s")
    sizes.plot([m.at_s for m in memory], [m.ingress for m in memory], label="ingress")
    sizes.plot([m.at_s for m in memory], [m.engine for m in memory], label="largest engine")
    sizes.set_ylabel("memory, MB")
    sizes.set_xlabel("seconds; a dashed line: an engine replica is killed")
    for axes in (rates, waits, sizes):
        axes.set_ylim(bottom=0)
        for kill in kills:
            axes.axvline(kill.at_s, color="grey", linestyle="--", linewidth=0.8)
    rates.legend()
    sizes.legend()
    figure.savefig(RESULTS / "chaos.png", dpi=110)


def chaos_config(port: int, budget: int) -> dict[str, Any]:
    """Two engine replicas of one thread each, in the arithmetic in which a text does not depend on how it was computed."""
    config = our_config(port)
    [application] = config["applications"]
    application["args"]["model"]["dtype"] = "float32"
    application["args"]["engine"] |= {"num_threads": 1, "kv_cache_tokens": 16384}
    engine = deployment_of(config, "Engine")
    engine["user_config"]["max_waiting_tokens"] = budget
    engine["autoscaling_config"] |= {"min_replicas": 2, "max_replicas": 2}
    return config


async def run(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """All of it, on a running server."""
    watch = Watch(server.processes, "serve_app")
    timeout, connector = aiohttp.ClientTimeout(total=900), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        crowd = Crowd(session, server.url, catalog(MODEL, NUM_CALLS), invalid_calls(MODEL), seed=args.seed)
        await crowd.learn(lambda done: print(f"\ralone: {done}/{NUM_CALLS}", end="", flush=True))
        capacity = await calls_per_s(crowd, 20)
        rate = args.load * capacity
        print(f"\ncapacity {capacity:.1f} calls/s; {args.seconds:.0f} s of {rate:.1f} calls/s", flush=True)
        started_at = time.monotonic()
        reports, kills, memory = await bring_chaos(
            crowd, watch, seconds=args.seconds, rate=rate, kill_every_s=args.kill_every, seed=args.seed
        )
    held = await engines_at_rest("serve_app")
    logs = (Path(tempfile.gettempdir()) / "ray" / "session_latest" / "logs").resolve()
    lines = [line for pid in watch.ingress_pids for file in logs.glob(f"worker-*-{pid}.err") for line in file.open()]
    complete = [report for report in reports if report.ending == "complete"]
    ttfts = sorted(report.ttft_s for report in reports if report.ttft_s is not None)
    draw(reports, kills, memory, started_at)
    return {
        "seconds": args.seconds,
        "load": args.load,
        "rate_per_s": rate,
        "calls": len(reports),
        "endings": dict(Counter(report.ending for report in reports).most_common()),
        "compared": sum(report.status == 200 for report in reports),
        "kills": len(kills),
        "running_at_kills": ", ".join(str(kill.num_running_calls) for kill in kills),
        "goodput_tokens_per_s": sum(report.num_tokens for report in complete) / args.seconds,
        "ttft_s": [ttfts[int(fraction * len(ttfts))] for fraction in (0.5, 0.95)],
        "faults": [fault for report in reports for fault in report.faults],
        "log_faults": faults_of_log(lines, reports),
        "held": held,
        "growth": [growth(memory, kind) for kind in ("ingress", "engine")],
        "memory": [asdict(m) for m in memory],
    }


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="length of the run (default 600)")
    parser.add_argument("--load", type=float, default=2, help="times the capacity (default 2)")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds from kill to kill (default 60)")
    parser.add_argument("--budget", type=int, default=6000, help="tokens that may wait in a replica (default 6000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8126)
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="chaos-")  # the session's own: its log is read, and other Rays are left alone
    # before Ray is imported; without the last, a thread of a handle would start another Ray when this one is gone
    os.environ |= {"RAY_TMPDIR": folder, **serve_switches(), "RAY_ENABLE_AUTO_CONNECT": "0"}
    tempfile.tempdir = folder
    try:
        with ray_serve(chaos_config(args.port, args.budget), args.port) as server:
            import ray

            ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
            server.settle()
            found = uvloop.run(run(server, args))
            (RESULTS / "chaos.json").write_text(json.dumps(found, indent=1))
            print(table(found))
            for fault in [*found["faults"], *found["log_faults"], *found["held"]][:20]:
                print(fault[:400])
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    is_flat = max(found["growth"]) <= GROWTH
    return 0 if is_flat and not (found["faults"] or found["log_faults"] or found["held"]) else 1


if __name__ == "__main__":
    sys.exit(main())
