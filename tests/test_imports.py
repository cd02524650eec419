"""Imports run one way: app -> ingress | replica -> text | engine -> nothing above; heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import serve_app

PACKAGE = Path(serve_app.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py"))

MAY_IMPORT = {
    "errors": set(),
    "cache": set(),
    "config": {"errors"},
    "engine": {"errors", "cache"},
    "text": {"errors", "engine.request"},
    "models": {"errors", "cache"},
    "channel": {"errors", "engine.request"},
    "ingress": {
        "errors",
        "config",
        "channel",
        "engine.request",
        "text",
        "models.facts",
        "models.checkpoint",
        "metrics",
        "tracing",
    },
    "loading": {"errors", "config", "engine", "models"},
    "local": {"errors", "config", "engine", "text", "models", "loading"},
    "metrics": {"engine"},
    "tracing": {"config", "engine.timing"},
    "replica": {"errors", "config", "channel", "engine", "loading", "metrics", "tracing"},
    "autoscaling": {"config"},
    "routing": {"config", "engine.request"},
    "app": {"config", "ingress", "replica"},
    "serve_file": {"errors", "config"},
    "loadgen": set(),
    "cli": {
        "errors",
        "cache",
        "config",
        "models",
        "local",
        "ingress.access",
        "serve_file",
        "loadgen",
        "engine.native.kernels",
    },
}
"""Room -> the rooms (or single modules) of the project that it may import, besides itself."""

HOMES = {
    "ray": {"app", "ingress", "replica", "metrics", "autoscaling", "routing", "serve_file"},
    "starlette": {"ingress"},
    "opentelemetry": {"ingress", "tracing"},
    "torch": {"engine", "models"},
}
TORCH_FILES = {
    "serve_app/engine/model_runner",
    "serve_app/engine/sampler",
    "serve_app/engine/linear",
    "serve_app/engine/memory",
    "serve_app/engine/decoder_layer",
    "serve_app/engine/forward",
    "serve_app/engine/fusion",
    "serve_app/engine/native/",
    "serve_app/engine/proof",
    "serve_app/engine/attention/",
    "serve_app/models/loader",
    "serve_app/models/conversion",
}


def imports_of(module: Path):
    tree = ast.parse((PACKAGE.parent / module).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield node.module or ""


def room_of(module: Path) -> str:
    return module.parts[1] if len(module.parts) > 1 else "__init__"


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) != "__init__"], ids=str)
def test_imports_run_one_way(module):
    room = room_of(module)
    for name in imports_of(module):
        if not name.startswith("serve_app."):
            continue
        target = name.removeprefix("serve_app.")
        allowed = MAY_IMPORT[room] | {room}
        assert any(target == a or target.startswith(a + ".") for a in allowed), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_heavy_libraries_stay_in_their_rooms(module):
    for name in imports_of(module):
        home = HOMES.get(name.split(".")[0])
        if home is not None:
            assert room_of(module) in home, f"{module} imports {name}"
        if name.split(".")[0] == "torch":
            assert any(str(module).startswith(file) for file in TORCH_FILES), f"{module} imports {name}"


def test_no_module_is_called_utils():
    assert not [m for m in MODULES if m.name in ("utils", "helpers", "common", "misc")]


@pytest.mark.parametrize("module", ["serve_app", "serve_app.engine.engine", "serve_app.cli", "serve_app.app"])
def test_what_does_not_load_a_model_starts_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
