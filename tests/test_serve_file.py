"""Keys that Serve would ignore are found before it starts."""

import copy
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.errors import ConfigError
from serve_app.serve_file import check_file

YAML = Path(__file__).parents[1] / "serve_config.yaml"


@pytest.fixture
def changed(tmp_path):
    """The project's file with a change, as a file."""

    def write(change):
        config = copy.deepcopy(yaml.safe_load(YAML.read_text()))
        [application] = config["applications"]
        change(config, application, {deployment["name"]: deployment for deployment in application["deployments"]})
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


def test_the_projects_own_files_are_right():
    check_file(YAML)


WRONG = {
    "applications.serve_app.deployments.Engine.max_queued_request: unknown key; did you mean max_queued_requests?": (
        lambda config, app, of: of["Engine"].update(max_queued_request=5)
    ),
    "applications.serve_app.max_queued_requests: unknown key": lambda config, app, of: app.update(max_queued_requests=5),
    "http_options.prot: unknown key; did you mean port?": lambda config, app, of: config["http_options"].update(prot=1),
    "proxy_locations: unknown key; did you mean proxy_location?": lambda config, app, of: config.update(proxy_locations=1),
    "Engine.autoscaling_config.min_replica: unknown key; did you mean min_replicas?": (
        lambda config, app, of: of["Engine"]["autoscaling_config"].update(min_replica=1)
    ),
    "Engine.request_router_config.prefix_tokens: unknown key": (
        lambda config, app, of: of["Engine"]["request_router_config"].update(prefix_tokens=1)
    ),
    "Engine.request_router_config.request_router_kwargs.max_lead: unknown key": (
        lambda config, app, of: of["Engine"]["request_router_config"]["request_router_kwargs"].update(max_lead=1)
    ),
    "Engine.request_router_config.request_router_kwargs.prefix_weight: ": (
        lambda config, app, of: of["Engine"]["request_router_config"]["request_router_kwargs"].update(prefix_weight=-1)
    ),
    "Engine.autoscaling_config.policy.policy_kwargs.target_s: unknown key": (
        lambda config, app, of: of["Engine"]["autoscaling_config"]["policy"]["policy_kwargs"].update(target_s=1)
    ),
    "Ingress.ray_actor_options.num_cpu: unknown key; did you mean num_cpus?": (
        lambda config, app, of: of["Ingress"]["ray_actor_options"].update(num_cpu=1)
    ),
    "Engine.autoscaling_config: with min_replicas: 0, downscale_delay_s must be": (
        lambda config, app, of: of["Engine"]["autoscaling_config"].update(min_replicas=0, downscale_delay_s=4)
    ),
    "Engine.autoscaling_config: with min_replicas: 0, downscale_to_zero_delay_s must be": (
        lambda config, app, of: of["Engine"]["autoscaling_config"].update(min_replicas=0, downscale_to_zero_delay_s=4)
    ),
    "deployments.Engin: unknown deployment; did you mean Engine?": lambda config, app, of: of["Engine"].update(
        name="Engin"
    ),
    "args.max_queued_requests: unknown key": lambda config, app, of: app["args"].update(max_queued_requests=5),
    "args.engine.max_queued_requests: unknown key": (
        lambda config, app, of: app["args"]["engine"].update(max_queued_requests=5)
    ),
    "Engine.user_config.max_queued_requests: unknown key": (
        lambda config, app, of: of["Engine"]["user_config"].update(max_queued_requests=5)
    ),
    "applications.0.deployments.0.max_queued_requests": lambda config, app, of: of["Engine"].update(
        max_queued_requests="x"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_br_095_a_misspelt_or_misplaced_key_is_named(changed, message):
    with pytest.raises(ConfigError) as error:
        check_file(changed(WRONG[message]))
    assert message in str(error.value)


def test_everything_that_is_wrong_is_told_at_once(changed):
    def twice(config, app, of):
        config["one"] = of["Engine"]["another"] = 1

    path = changed(twice)
    with pytest.raises(ConfigError) as error:
        check_file(path)
    assert len(str(error.value).splitlines()) == 2
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 1
    assert "one: unknown key" in result.output
    assert CliRunner().invoke(app, ["check", str(YAML)]).exit_code == 0


@pytest.mark.parametrize("text", ["", "a: [", "just text", "applications:"])
def test_what_is_no_config_is_refused(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        check_file(path)
    with pytest.raises(ConfigError):
        check_file(tmp_path / "nowhere.yaml")
