"""Settings for all tests."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from serve_app.models.checkpoint import find_checkpoint


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny tensors are slower on two threads than on one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def builtin_checkpoint():
    """The built-in model's folder."""
    return find_checkpoint("builtin")
