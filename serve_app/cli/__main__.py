"""`python -m serve_app.cli`, the same as `serve-app`."""

from __future__ import annotations

from serve_app.cli.main import app

app()
