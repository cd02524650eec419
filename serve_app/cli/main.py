"""The commands. What they need is imported by the one that runs: `--help` need not wait for torch or Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from serve_app.cli.server import URL, Key, Model, ServerClient, ServerError, Url
from serve_app.errors import ConfigError, ServeAppError
from serve_app.models.checkpoint import find_checkpoint

app = typer.Typer(
    no_args_is_help=True,
    help="Serve Hugging Face causal language models on Ray Serve. `make serve` starts a server; `doctor` says what "
    "keeps it from starting or from being fast; `chat` and `bench` talk to it, or to any OpenAI-compatible server.",
)
console = Console()

Source = Annotated[str, typer.Argument(help="builtin, a local folder, or a hub id")]


@app.command()
def pull(source: Source = "builtin") -> None:
    """Make a model available, so that the server starts without waiting for it. Does nothing when it is there.

    A hub id is fetched (safetensors only), with a bar for each file; the built-in model is converted, once.
    """
    try:
        with console.status(f"looking for {source}; the built-in model is converted the first time (half a minute)"):
            checkpoint = find_checkpoint(source)
        if not checkpoint.is_local:
            from huggingface_hub import snapshot_download

            snapshot_download(
                checkpoint.path, revision=checkpoint.revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
            )
    except (ServeAppError, OSError) as error:
        raise _failed(error) from None
    typer.echo(f"{checkpoint.name} is available")


@app.command()
def check(path: Annotated[Path, typer.Argument(help="a Serve config file")] = Path("serve_config.yaml")) -> None:
    """Check a config file, also for misspelt and misplaced keys, which Serve itself would ignore."""
    from serve_app.serve_file import check_file  # loads Ray

    try:
        check_file(path)
    except ConfigError as error:
        raise _failed(error) from None
    typer.echo(f"{path} is right")


@app.command()
def doctor(path: Annotated[Path, typer.Argument(help="a Serve config file")] = Path("serve_config.yaml")) -> None:
    """Look at this machine and a config file: what is wrong or slow, and what to change. Exits with 1 if it is wrong."""
    from rich.table import Table

    from serve_app.cli.doctor import Verdict, examine  # loads Ray and torch

    colours = {Verdict.GOOD: "green", Verdict.SLOW: "yellow", Verdict.WRONG: "red"}
    table = Table("", "", "found", "what to change")
    is_wrong = False
    with console.status("looking") as status:
        for finding in examine(path):
            status.update(f"looked at {finding.subject}")
            verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
            table.add_row(finding.subject, verdict, escape(finding.found), escape(finding.advice))
            is_wrong |= finding.verdict is Verdict.WRONG
    console.print(table)
    if is_wrong:
        raise typer.Exit(1)


@app.command()
def chat(
    url: Url = URL,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="system prompt; by default the model's own")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="by default the model's own")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="tokens per answer at most")] = None,
    api_key: Key = None,
) -> None:
    """Talk to a model in the terminal: answers appear as they are made; Ctrl-C stops one, Ctrl-D ends."""
    from serve_app.cli.chat import Conversation

    with ServerClient(url, api_key) as client:
        options: dict[str, Any] = {"model": model or _first_model(client)}
        options |= {"temperature": temperature} if temperature is not None else {}
        options |= {"max_tokens": max_tokens} if max_tokens is not None else {}
        Conversation(client, options, system, console).run()


@app.command()
def bench(
    url: Url = URL,
    model: Model = None,
    concurrency: Annotated[str, typer.Option(help="closed loops: so many calls at a time, such as 1,8,32")] = "1,8,32",
    rate: Annotated[str, typer.Option(help="open loops: so many calls per second (Poisson), such as 0.5,2")] = "",
    requests: Annotated[int, typer.Option(min=1, help="calls of each load")] = 64,
    prompt_words: Annotated[str, typer.Option(help="bounds of the prompts' lengths")] = "30-120",
    output_tokens: Annotated[str, typer.Option(help="bounds of the answers' lengths")] = "16-128",
    ttft_slo_ms: Annotated[float, typer.Option(help="goodput counts answers whose first token came by then")] = 1000,
    tpot_slo_ms: Annotated[float, typer.Option(help="... and whose others took no longer, in the mean")] = 100,
    as_chat: Annotated[bool, typer.Option("--chat", help="chat completions instead of completions")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="full lengths; a field that not every server knows")] = True,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    api_key: Key = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures there")] = None,
    chart: Annotated[Path | None, typer.Option(help="write a picture (PNG) there; needs matplotlib")] = None,
) -> None:
    """Load a server and say how it did: tokens/s, first token, gaps, and goodput at an objective."""
    from serve_app.cli.bench import Level, Objective, Shape, draw, measure, save, show
    from serve_app.loadgen import Target

    levels = [Level(concurrency=int(number)) for number in _numbers(concurrency, int, "--concurrency")]
    levels += [Level(rate=number) for number in _numbers(rate, float, "--rate")]
    if not levels:
        raise typer.BadParameter("no load: give --concurrency or --rate")
    shape = Shape(requests, _bounds(prompt_words, "--prompt-words"), _bounds(output_tokens, "--output-tokens"), seed)
    try:
        with ServerClient(url, api_key) as client:
            name = model or _first_model(client)
        target = Target(url.rstrip("/"), name, api_key, as_chat, ignore_eos)
        objective = Objective(ttft_slo_ms / 1000, tpot_slo_ms / 1000)
        rows = measure(target, levels, shape, objective, console)
        show(rows, target, objective, console)
        if json_file is not None:
            save(rows, json_file)
        if chart is not None:
            draw(rows, f"{name}: {requests} calls each", chart)
    except ConfigError as error:
        raise _failed(error) from None
    if all(len(row["errors"]) == requests for row in rows):
        raise typer.Exit(1)


@app.command()
def complete(
    prompts: Annotated[list[str], typer.Argument(help="texts to continue, batched together")],
    source: Annotated[str, typer.Option(help="builtin, a local folder, or a hub id")] = "builtin",
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens per prompt at most")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
) -> None:
    """Continue texts in this process, without a server, and print them as they are done."""
    from serve_app.local import LocalModel  # loads torch, which --help need not wait for

    model = LocalModel.load(source)
    texts = [""] * len(prompts)
    for piece in model.stream(prompts, max_tokens=max_tokens, temperature=temperature):
        texts[piece.index] += piece.delta.text
        if piece.delta.finish_reason is not None:
            typer.secho(prompts[piece.index], bold=True, nl=False)
            typer.echo(texts[piece.index])
    model.close()


@app.command()
def key(name: Annotated[str, typer.Argument(help="how the log calls the key")]) -> None:
    """Make an API key: shown once, with its entry for the configuration, which holds its digest only."""
    from serve_app.ingress.access import new_key

    secret, digest = new_key()
    typer.echo(f"{secret}\n")
    typer.echo("in serve_config.yaml, under Ingress.user_config.api_keys:\n")
    typer.echo(f"  - {{name: {name}, sha256: {digest}}}")


def _first_model(client: ServerClient) -> str:
    try:
        return client.first_model()
    except ServerError as error:
        raise _failed(error) from None


def _failed(error: Exception) -> typer.Exit:
    typer.echo(str(error), err=True)
    return typer.Exit(1)


NumberT = TypeVar("NumberT", int, float)


def _numbers(text: str, kind: Callable[[str], NumberT], option: str) -> list[NumberT]:
    """`1,8,32` as numbers above 0; an empty text has none."""
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [kind("0")]
    if any(number <= 0 for number in numbers):
        raise typer.BadParameter(f"{text!r} is no list of numbers above 0", param_hint=option)
    return numbers


def _bounds(text: str, option: str) -> tuple[int, int]:
    """`16-128` as two whole numbers, the lower first."""
    least, _, most = text.partition("-")
    if not (least.isdigit() and most.isdigit() and 0 < int(least) <= int(most)):
        raise typer.BadParameter(f"{text!r} is no pair such as 16-128", param_hint=option)
    return int(least), int(most)
