"""The engine on a GPU. Skipped where there is none."""

import copy

import pytest
import torch

from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.model_runner import ModelRunner
from serve_app.engine.request import SamplingParams, UserRequest
from tests.families import FAMILIES, VOCAB_SIZE, generate_alone, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral_sliding"])
def test_greedy_tokens_equal_those_of_the_cpu(name):
    model = tiny_model(FAMILIES[name]())
    prompts = [tuple(3 + (7 * i + j) % (VOCAB_SIZE - 3) for j in range(length)) for i, length in enumerate((1, 5, 20, 50))]
    expected = [generate_alone(model, prompt, 12) for prompt in prompts]
    runner = ModelRunner(
        copy.deepcopy(model).to("cuda"), end_token_ids=frozenset(), max_model_len=256, block_size=4, kv_cache_tokens=1024
    )
    engine = BatchInferenceEngine(runner, max_batched_tokens=16)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    streams = engine.add_to_queue([UserRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    while engine.step():
        engine.check()
    assert [[output.token for output in stream] for stream in streams] == expected
