"""Settings: what is wrong is named by its path, before anything starts."""

import re
from pathlib import Path

import pytest
import yaml

from serve_app.app import build_app
from serve_app.config import EngineLimits, IngressLimits, ServeConfig, parse_section
from serve_app.errors import ConfigError

YAML = Path(__file__).parents[1] / "serve_config.yaml"


def load():
    return yaml.safe_load(YAML.read_text())["applications"][0]


def test_the_file_that_operators_edit_is_valid_and_complete():
    application = load()
    config = parse_section(ServeConfig, application["args"], "args")
    assert config == ServeConfig()  # what it says is what the code defaults to
    deployments = {d["name"]: d for d in application["deployments"]}
    assert parse_section(EngineLimits, deployments["Engine"]["user_config"], "x") == EngineLimits()
    assert parse_section(IngressLimits, deployments["Ingress"]["user_config"], "x") == IngressLimits()
    assert set(deployments["Engine"]["user_config"]) == set(EngineLimits.model_fields)
    assert set(deployments["Ingress"]["user_config"]) == set(IngressLimits.model_fields)
    for deployment in deployments.values():
        assert deployment["autoscaling_config"]["min_replicas"] >= 1
    assert deployments["Engine"]["max_ongoing_requests"] >= 2 * EngineLimits().max_batch_size


def test_every_key_is_commented():
    section_starts = (
        "args",
        "model",
        "engine",
        "tracing",
        "deployments",
        "user_config",
        "autoscaling_config",
        "http_options",
    )
    uncommented = [
        line
        for line in YAML.read_text().splitlines()
        if ":" in line and "#" not in line and not line.strip().rstrip(":").removeprefix("- ").startswith(section_starts)
    ]
    plain = {"applications", "- name", "route_prefix", "import_path", "port", "ray_actor_options", "min_replicas"}
    plain |= {"max_replicas", "upscale_delay_s", "downscale_delay_s", "target_ongoing_requests", "max_ongoing_requests"}
    plain |= {"policy_kwargs", "request_router_kwargs", "policy_function", "request_router_class"}
    plain |= {"graceful_shutdown_timeout_s", "health_check_period_s", "health_check_timeout_s"}
    assert {line.strip().split(":")[0] for line in uncommented} <= plain


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"modle": {}}, "args.modle: unknown key"),
        ({"max_queued_requests": 5}, "args.max_queued_requests: unknown key"),
        ({"engine": {"max_queued_requests": 5}}, "args.engine.max_queued_requests: unknown key"),
        ({"model": {"dtype": "int3"}}, "args.model.dtype:"),
        ({"model": {"max_model_len": "8192"}}, "args.model.max_model_len:"),
        ({"engine": {"block_size": 0}}, "args.engine.block_size:"),
        ({"engine": {"blocksize": 16}}, "args.engine.blocksize: unknown key"),
        ({"engine": {"kv_cache_tokens": 100}, "model": {"max_model_len": 200}}, "kv_cache_tokens (100) must be at least"),
        ({"model": None}, "args.model:"),
        ([], "args:"),
    ],
)
def test_bad_args_stop_the_start_and_are_named(args, path):
    with pytest.raises(ConfigError) as refusal:
        build_app(args)
    assert path in str(refusal.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as refusal:
        parse_section(EngineLimits, {"max_batch_size": 0, "wait": 1}, "Engine.user_config")
    assert "Engine.user_config.max_batch_size" in str(refusal.value)
    assert "Engine.user_config.wait: unknown key" in str(refusal.value)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"models": [{"source": "builtin"}]}, "args.models.0.name"),
        ({"models": []}, "args.models"),
        ({"models": [{"name": "a/b"}]}, "args.models.0.name"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "two of the name 'a'"),
        ({"models": [{"name": "a"}], "model": {"source": "x"}}, "give one of them"),
        ({"models": [{"name": "a", "max_model_len": 99, "engine": {"kv_cache_tokens": 50}}]}, "kv_cache_tokens (50)"),
    ],
)
def test_several_models_are_checked_each(args, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_section(ServeConfig, args, "args")


def test_each_model_has_an_engine_deployment():
    assert list(ServeConfig().engines()) == ["Engine"]
    own = {"block_size": 8}
    config = parse_section(ServeConfig, {"models": [{"name": "a"}, {"name": "b", "engine": own}]}, "args")
    assert list(config.engines()) == ["Engine-a", "Engine-b"]
    assert [engine.block_size for _, engine in config.engines().values()] == [16, 8]


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        EngineLimits().max_batch_size = 3
