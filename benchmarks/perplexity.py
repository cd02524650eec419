"""What fewer bits cost: the built-in model's perplexity of a fixed text (benchmarks/perplexity.txt), by setting.

    .venv/bin/python -m benchmarks.perplexity

Each setting reads the text twice: in chunks, as prompts are read, and token by token, as answers are drawn; the two
multiply differently (`Rows` in serve_app/engine/native/product.h). The reference is `transformers`, float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch

from benchmarks.server import ROOT
from serve_app.config import EngineConfig, ModelConfig
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.errors import ConfigError
from serve_app.loading import load_engine
from serve_app.models.checkpoint import find_checkpoint
from serve_app.models.loader import load_model
from serve_app.text.tokenizer import Tokenizer

TEXT = ROOT / "benchmarks" / "perplexity.txt"
SETTINGS = {
    "float32": EngineConfig(precision="float32"),
    "bfloat16": EngineConfig(precision="bfloat16"),
    "int8": EngineConfig(quantization="int8"),
}


def by_transformers(pieces: Sequence[tuple[int, ...]], dtype: str) -> float:
    """Perplexity by the model's own code."""
    model = load_model(find_checkpoint("builtin"), dtype=dtype, device="cpu")
    total = 0.0
    with torch.inference_mode():
        for piece in pieces:
            logits = model(input_ids=torch.tensor([piece]), use_cache=False).logits[0].float()
            total += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(piece[1:]), reduction="sum"))
    return math.exp(total / sum(len(piece) - 1 for piece in pieces))


def by_engine(pieces: Sequence[tuple[int, ...]], config: EngineConfig, step_tokens: int) -> float:
    """Perplexity by the engine, `step_tokens` tokens a step.

    Raises:
        ConfigError: this machine does not have the setting.
    """
    block_size = min(step_tokens, config.block_size)  # a step takes a block of a prompt at least
    config = config.model_copy(update={"max_batched_tokens": step_tokens, "block_size": block_size})
    engine = load_engine(model=ModelConfig(max_model_len=2048), engine=config)
    scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    total, count = 0.0, 0
    for index, piece in enumerate(pieces):
        [stream] = engine.add_to_queue([UserRequest(str(index), piece, scoring)])
        for output in stream:
            logprobs = output.prompt_logprobs or ()
            total -= sum(entry.chosen for entry in logprobs)
            count += len(logprobs)
    engine.shutdown()
    return math.exp(total / count)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the text that are read (default 2048)")
    parser.add_argument("--piece", type=int, default=512, help="tokens that are read together (default 512)")
    args = parser.parse_args()
    checkpoint = find_checkpoint("builtin")
    tokens = Tokenizer.load(checkpoint.path, checkpoint.revision).encode(TEXT.read_text())[: args.tokens]
    bounds = [*range(0, len(tokens) - 1, args.piece), len(tokens)]
    pieces = [tuple(tokens[start:end]) for start, end in pairwise(bounds)]
    print(f"{len(tokens)} tokens in {len(pieces)} pieces", flush=True)
    reference = by_transformers(pieces, "float32")
    found = {"transformers float32": reference, "transformers bfloat16": by_transformers(pieces, "bfloat16")}
    for name, config in SETTINGS.items():
        for how, step_tokens in (("in chunks", 256), ("token by token", 1)):
            try:
                found[f"{name} {how}"] = by_engine(pieces, config, step_tokens)
            except ConfigError as error:
                print(f"{name} is left out: {error}")
    for name, perplexity in found.items():
        print(f"{name:>24} {perplexity:9.4f}  {100 * (perplexity / reference - 1):+.2f} %", flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
