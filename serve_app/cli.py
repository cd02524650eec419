"""The command line: `serve-app --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.errors import ConfigError
from serve_app.models.checkpoint import find_checkpoint

app = typer.Typer(no_args_is_help=True, help="Serve Hugging Face causal language models on Ray Serve.")

Source = Annotated[str, typer.Argument(help="builtin, a local folder, or a hub id")]


@app.callback()
def _root() -> None:
    """Keeps commands named, also while there is one only."""


@app.command()
def pull(source: Source = "builtin") -> None:
    """Make a model available, so that the server starts without waiting for it. Does nothing when it is there."""
    checkpoint = find_checkpoint(source)
    if not checkpoint.is_local:
        from huggingface_hub import snapshot_download

        snapshot_download(
            checkpoint.path, revision=checkpoint.revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
        )
    typer.echo(f"{checkpoint.name} is available")


@app.command()
def check(path: Annotated[Path, typer.Argument(help="a Serve config file")] = Path("serve_config.yaml")) -> None:
    """Check a config file, also for misspelt and misplaced keys, which Serve itself would ignore."""
    from serve_app.serve_file import check_file  # loads Ray

    try:
        check_file(path)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{path} is right")


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


if __name__ == "__main__":
    app()
