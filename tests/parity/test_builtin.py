"""The built-in model in float32: 20 prompts, greedy, against `model.generate`."""

import pytest
import torch

from serve_app.config import EngineConfig, EngineLimits, ModelConfig
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.loading import load_engine
from serve_app.models.facts import read_facts
from serve_app.models.loader import load_model
from serve_app.text.tokenizer import Tokenizer
from tests.families import generate_alone

NUM_TOKENS = 12
SUBJECTS = [
    "bread",
    "the sea",
    "trains",
    "winter",
    "a bridge",
    "mathematics",
    "1234 + 4321",
    "naïve cafés",
    "日本",
    "music",
]
PROMPTS = [f"Write about {subject}." for subject in SUBJECTS]
PROMPTS += [f"Once upon a time there was {'a long road and ' * i} {subject}" for i, subject in enumerate(SUBJECTS)]


@pytest.fixture(scope="module")
def expected(builtin_checkpoint):
    tokenizer = Tokenizer.load(builtin_checkpoint.path)
    model = load_model(builtin_checkpoint, dtype="float32", device="cpu")
    torch.set_num_threads(2)
    prompts = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
    return {prompt: generate_alone(model, prompt, NUM_TOKENS) for prompt in prompts}


def test_greedy_tokens_of_20_prompts_batched_and_chunked(expected):
    engine = load_engine(
        model=ModelConfig(dtype="float32", device="cpu", max_model_len=1024),
        engine=EngineConfig(max_batched_tokens=64, kv_cache_tokens=4096),
        limits=EngineLimits(max_batch_size=12),
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for _ in range(2):  # the second time with prefix hits
        streams = engine.add_to_queue([UserRequest(str(i), prompt, params) for i, prompt in enumerate(expected)])
        got = [[output.token for output in stream] for stream in streams]
        assert got == list(expected.values())
    assert engine.stats().num_prefix_hit_tokens > 0
    engine.shutdown()
    engine.check()


def test_logprobs_are_log_softmax_of_the_models_logits(builtin_checkpoint, expected):
    prompt = next(iter(expected))
    model = load_model(builtin_checkpoint, dtype="float32", device="cpu")
    tokens = expected[prompt]
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    reference = torch.log_softmax(logits.double(), -1)
    engine = load_engine(
        model=ModelConfig(dtype="float32", device="cpu", max_model_len=256), engine=EngineConfig(kv_cache_tokens=256)
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=4)
    [stream] = engine.add_to_queue([UserRequest("r", prompt, params)])
    for i, output in enumerate(stream):
        row = reference[len(prompt) - 1 + i]
        assert output.logprobs.chosen == pytest.approx(float(row[output.token]), abs=1e-4)
        assert [value for _, value in output.logprobs.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
    engine.shutdown()


def test_what_its_files_say(builtin_checkpoint):
    facts = read_facts(builtin_checkpoint)
    assert facts.max_model_len == 8192
    assert facts.end_token_ids == {2}
    assert facts.sampling.temperature == 0.0  # a model of this size rambles when it is sampled at 1
    assert read_facts(builtin_checkpoint, 100).max_model_len == 100


def test_digits_are_single_tokens_as_in_the_original(builtin_checkpoint):
    tokenizer = Tokenizer.load(builtin_checkpoint.path)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 1234")] == ["in", " ", "1", "2", "3", "4"]
