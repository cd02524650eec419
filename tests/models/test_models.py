"""Where models come from, and what is refused."""

import json
import subprocess
import sys

import pytest
import torch
import transformers as hf

from serve_app.engine.model_runner import ModelRunner
from serve_app.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from serve_app.models import builtin
from serve_app.models.checkpoint import find_checkpoint
from serve_app.models.facts import read_facts
from serve_app.models.loader import choose_dtype, load_model
from tests.families import FAMILIES, tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_served_under_its_name(folder):
    checkpoint = find_checkpoint(str(folder))
    assert checkpoint.name == folder.name
    assert load_model(checkpoint, device="cpu").dtype in (torch.float32, torch.bfloat16)


def test_a_hub_id_is_passed_on_with_its_revision():
    checkpoint = find_checkpoint("someone/some-model", "abc123")
    assert (checkpoint.path, checkpoint.name, checkpoint.revision) == ("someone/some-model", "someone/some-model", "abc123")
    assert not checkpoint.is_local


@pytest.mark.parametrize("source", ["./nowhere", "/no/such/folder", "~/none", "a/b/c"])
def test_a_folder_that_is_not_there(source):
    with pytest.raises(ModelNotFoundError, match=r"model\.source"):
        find_checkpoint(source)


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        find_checkpoint(str(tmp_path))


def test_a_hub_that_cannot_be_reached_is_named():
    with pytest.raises(ModelNotFoundError, match="someone/some-model"):
        read_facts(find_checkpoint("someone/some-model"))


def test_encoder_decoders_are_refused(tmp_path):
    hf.T5Config(vocab_size=32, d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        read_facts(find_checkpoint(str(tmp_path)))


def test_only_safetensors_are_loaded(folder):
    weights = folder / "model.safetensors"
    torch.save({"w": torch.zeros(1)}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        load_model(find_checkpoint(str(folder)))


def test_code_in_a_checkpoint_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelNotFoundError):
        read_facts(find_checkpoint(str(folder)))


def test_a_context_longer_than_the_models_is_refused(folder):
    with pytest.raises(UnsupportedModelError, match="512"):
        read_facts(find_checkpoint(str(folder)), 513)


def test_rotary_scaling_that_depends_on_the_batch_stays_within_the_original_context(tmp_path):
    config = FAMILIES["llama"]()
    config.rope_parameters = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config.save_pretrained(tmp_path)
    assert read_facts(find_checkpoint(str(tmp_path))).max_model_len == 128


def test_sampling_recommended_by_the_authors_is_read(folder):
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 9]}))
    facts = read_facts(find_checkpoint(str(folder)))
    assert (facts.sampling.temperature, facts.sampling.top_k, facts.sampling.top_p) == (0.6, 20, 1.0)
    assert facts.end_token_ids == {2, 9}


def test_a_cache_too_small_for_one_context_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_tokens"):
        ModelRunner(tiny_model(FAMILIES["llama"]()), end_token_ids=frozenset(), max_model_len=512, kv_cache_tokens=500)


def test_auto_dtype_is_bfloat16_only_where_it_is_native(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert choose_dtype("auto", cpu) is torch.bfloat16
    assert choose_dtype("auto", cpu, stored=torch.bfloat16) is torch.bfloat16
    assert choose_dtype("auto", cpu, stored=torch.float32) is torch.float32  # our kernels round what they multiply
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert choose_dtype("auto", cpu) is torch.float32
    assert choose_dtype("float16", cpu) is torch.float16


def test_the_built_in_model_is_converted_once(builtin_checkpoint, monkeypatch):
    monkeypatch.setattr("serve_app.models.conversion.convert", lambda *_: pytest.fail("converted again"))
    assert str(builtin.builtin_folder()) == builtin_checkpoint.path


def test_without_its_package_the_built_in_model_says_what_to_do(monkeypatch):
    monkeypatch.setattr(builtin, "PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match="make setup"):
        find_checkpoint("builtin")


def test_a_broken_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    monkeypatch.setattr("serve_app.models.conversion._read_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        builtin.builtin_folder()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_pull_says_that_the_model_is_there():
    command = [sys.executable, "-W", "ignore", "-m", "serve_app.cli", "pull"]
    assert (
        "smollm2-135m-instruct is available" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


def test_a_lora_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    with pytest.raises(ModelNotFoundError, match=r"LoRA adapter.*merge_and_unload"):
        find_checkpoint(str(tmp_path))
