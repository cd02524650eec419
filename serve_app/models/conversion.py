"""Converts a GGUF file to an ordinary float32 model folder (safetensors and tokenizer.json)."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)

RECOMMENDED_SAMPLING = {"do_sample": False}
"""A GGUF file does not carry it. At temperature 1, OpenAI's default, a model of this size and precision rambles."""


def convert(source: Path, folder: Path, name: str) -> None:
    """Reads the GGUF file `source` and writes `folder`, whole or not at all."""
    logger.info("converting %s (once)", source.name)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        _read_model(source, name).save_pretrained(scratch)
        _save_tokenizer(source, scratch)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_model(source: Path, name: str) -> PreTrainedModel:
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # the weights are dequantised: what is saved is an ordinary float32 model
    config.name_or_path = name
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig.from_dict(
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            **RECOMMENDED_SAMPLING,
        }
    )
    return model


def _save_tokenizer(source: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file's pre-tokenizer is "smollm": single digits, then byte level. The reader keeps only the second.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(folder)
