"""The folder for what is made once and used again: converted models and compiled kernels."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """$SERVE_APP_CACHE, or serve_app in the user's cache folder."""
    configured = os.environ.get("SERVE_APP_CACHE")
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "serve_app"


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Only one process at a time makes `path` (a lock file beside it says so). Makes the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
