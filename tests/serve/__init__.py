"""Ray as `make serve` runs it: the switches are read when Ray is imported."""

import os
from pathlib import Path

SERVE_ENV = Path(__file__).parents[2] / "serve.env"
os.environ.update(line.split("=", 1) for line in SERVE_ENV.read_text().splitlines() if "=" in line and line[0] != "#")
