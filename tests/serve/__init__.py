"""Ray as `make serve` runs it: the switches are read when Ray is imported."""

import os

from benchmarks.server import serve_switches

os.environ.update(serve_switches())
