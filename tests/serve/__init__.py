"""Ray as `make serve` runs it: the switches are read when Ray is imported."""

import os

from benchmarks.server import serve_switches

os.environ.update(serve_switches())
# A replica of the ingress that goes stays for so long, for load balancers to notice; here there is none, and each
# change of a config would take half a minute.
os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "3"
