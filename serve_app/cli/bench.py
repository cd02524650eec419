"""`serve-app bench`: a load on any OpenAI-compatible server, as a table, JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from serve_app.errors import ConfigError
from serve_app.loadgen import LoadResult, Outcome, Target, mixed_jobs, run_load, run_open_load


@dataclass(frozen=True, slots=True)
class Level:
    """One load: so many calls at a time, or so many per second (a Poisson process)."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        return f"c={self.concurrency}" if self.concurrency is not None else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Objective:
    """What a caller is content with (SLO): the first token, and the mean time of the others. Seconds."""

    ttft_s: float
    tpot_s: float

    def is_met(self, outcome: Outcome) -> bool:
        """Whether it is, by one answer."""
        num_gaps = max(outcome.num_tokens - 1, 1)
        return outcome.ttft_s <= self.ttft_s and (outcome.total_s - outcome.ttft_s) / num_gaps <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the requests: bounds of uniform lengths."""

    num_requests: int
    prompt_words: tuple[int, int]
    output_tokens: tuple[int, int]
    seed: int


def measure(
    target: Target, levels: list[Level], shape: Shape, objective: Objective, console: Console
) -> list[dict[str, Any]]:
    """Runs the levels one after the other, with a progress bar each; a row of figures for each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows = []
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(level.label, total=shape.num_requests, start=False) for level in levels]
        for number, (level, task) in enumerate(zip(levels, tasks, strict=True)):
            progress.start_task(task)
            # other prompts at every level: what the server remembers of the last one must not help
            jobs = mixed_jobs(
                shape.num_requests, shape.seed + number, shape.prompt_words, shape.output_tokens, long_tail=False
            )

            def advance(task: Any = task) -> None:
                progress.advance(task)

            if level.concurrency is not None:
                run = run_load(target, jobs, level.concurrency, on_end=advance)
            else:
                assert level.rate is not None
                run = run_open_load(target, jobs, level.rate, on_end=advance)
            rows.append(figures(level, uvloop.run(run), objective))
    return rows


def figures(level: Level, result: LoadResult, objective: Objective) -> dict[str, Any]:
    """What is told of a level: rates per second, times in milliseconds."""

    def ms(values: list[float], fraction: float) -> float:
        return round(1000 * result.quantile(values, fraction), 1)

    outcomes = result.outcomes
    ttft = [outcome.ttft_s for outcome in outcomes]
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    good = [outcome for outcome in outcomes if objective.is_met(outcome)]
    return {
        "load": level.label,
        "requests_per_s": round(len(outcomes) / result.elapsed_s, 2),
        "tokens_per_s": round(result.tokens_per_s, 1),
        "ttft_p50_ms": ms(ttft, 0.5),
        "ttft_p95_ms": ms(ttft, 0.95),
        "tpot_p50_ms": round(1000 * result.tpot_p50_s, 1),
        "gap_p50_ms": ms(gaps, 0.5),
        "gap_p99_ms": ms(gaps, 0.99),
        "goodput_per_s": round(len(good) / result.elapsed_s, 2),
        "goodput_share": round(len(good) / max(1, len(outcomes) + len(result.errors) + result.num_refused), 3),
        "refused": result.num_refused,
        "errors": result.errors,
    }


def show(rows: list[dict[str, Any]], target: Target, objective: Objective, console: Console) -> None:
    """Prints the figures as a table, and the first error of each level."""
    table = Table(title=f"{target.model} at {target.url}")
    for name in (
        "load",
        "requests/s",
        "tokens/s",
        "TTFT p50 / p95, ms",
        "per token, ms",
        "gap p50 / p99, ms",
        "goodput/s",
        "failed",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["load"],
            f"{row['requests_per_s']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['ttft_p50_ms']:.0f} / {row['ttft_p95_ms']:.0f}",
            f"{row['tpot_p50_ms']:.1f}",
            f"{row['gap_p50_ms']:.1f} / {row['gap_p99_ms']:.1f}",
            f"{row['goodput_per_s']:.2f} ({row['goodput_share']:.0%})",
            f"{len(row['errors']) + row['refused']}",
        )
    console.print(table)
    limits = f"TTFT up to {objective.ttft_s * 1000:g} ms and {objective.tpot_s * 1000:g} ms per token"
    console.print(f"goodput: answers with {limits}", style="dim", highlight=False)
    for row in rows:
        for error in row["errors"][:1]:
            console.print(f"{row['load']}: {len(row['errors'])} failed, first: {error}", style="red", markup=False)


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """A picture of the levels: tokens and goodput per second, first token, gap. Raises `ConfigError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a chart needs matplotlib: pip install 'serve_app[chart]'") from None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(title)
    panels = (
        ("output tokens per second", (("tokens_per_s", ""),)),
        ("time to first token, ms", (("ttft_p50_ms", "p50"), ("ttft_p95_ms", "p95"))),
        ("gap between tokens, ms", (("gap_p50_ms", "p50"), ("gap_p99_ms", "p99"))),
    )
    labels = [row["load"] for row in rows]
    for axes, (name, series) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        width = 0.8 / len(series)
        for i, (key, label) in enumerate(series):
            places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(rows))]
            bars = axes.bar(places, [row[key] for row in rows], width, label=label)
            axes.bar_label(bars, fmt="%.4g", fontsize=8)
        axes.set_xticks(range(len(rows)), labels)
        axes.set_title(name, fontsize=10)
        if len(series) > 1:
            axes.legend()
    figure.savefig(path, dpi=110)


def save(rows: list[dict[str, Any]], path: Path) -> None:
    """The figures as JSON."""
    path.write_text(json.dumps(rows, indent=2) + "\n")
