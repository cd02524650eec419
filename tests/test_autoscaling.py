"""The autoscaling policy: tokens and speed decide, not the number of requests."""

from types import SimpleNamespace

import pytest

from serve_app.autoscaling import HALF_LIFE_S, TokenBacklogPolicy
from serve_app.errors import ConfigError


def decide(backlogs, speeds, *, current=1, waiting=(), requests=(100,), state=None, now=0.0):
    values = {"backlog_tokens": backlogs, "waiting_tokens": waiting, "num_requests": requests, "tokens_per_s": speeds}
    context = SimpleNamespace(
        aggregated_metrics={name: dict(enumerate(of_replicas)) for name, of_replicas in values.items()},
        current_num_replicas=current,
        policy_state=state or {},
        current_time=now,
    )
    return TokenBacklogPolicy(target_backlog_s=10, target_ttft_s=2)(context)


def wanted(*args, **kwargs):
    return decide(*args, **kwargs)[0]


@pytest.mark.parametrize(
    ("backlogs", "speeds", "expected"),
    [
        ([0], [100], 0),
        ([0, 0], [0, 0], 0),
        ([1], [100], 1.0),
        ([1000], [100], 1.0),
        ([2500], [100], 2.5),
        ([2000, 2000], [100, 200], 2.0),  # one that has little to do is slow for want of work
        ([5000, 100], [100, 0], 5.1),  # a replica that has not worked yet says nothing of the speed
    ],
)
def test_replicas_follow_seconds_of_work(backlogs, speeds, expected):
    assert wanted(backlogs, speeds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("backlogs", "waiting", "expected"),
    [
        ([900], [150], 1.0),
        ([900], [500], 2.5),  # less than ten seconds of work, but five of them wait for a place
        ([900, 900], [500, 100], 3.0),
        ([9000], [600], 9.0),
    ],
)
def test_replicas_follow_the_ttft_of_whoever_comes_now(backlogs, waiting, expected):
    assert wanted(backlogs, [100] * len(backlogs), waiting=waiting) == pytest.approx(expected)


def test_a_request_is_not_divided():
    assert wanted([9000], [100], requests=[1]) == 1
    assert wanted([9000, 0], [100, 100], requests=[1, 1]) == 2


def test_a_slow_trickle_is_not_taken_for_a_slow_replica():
    """One stream at a time is 20 tokens per second where 32 are 400; the speed that was seen counts, and fades."""
    _, state = decide([4000], [400])
    assert wanted([3000], [20], state=state, now=1) == pytest.approx(1.0)
    assert wanted([3000], [20]) == pytest.approx(15)
    assert wanted([3000], [20], state=state, now=HALF_LIFE_S) == pytest.approx(3000 / 210 / 10)
    _, state = decide([0], [0], state=state, now=HALF_LIFE_S)  # fades also when there is nothing to do
    assert state["speed"] == pytest.approx(200)
    assert wanted([9000], [500], state=state, now=HALF_LIFE_S) == pytest.approx(9000 / 500 / 10)


def test_without_a_measurement_nothing_changes():
    assert wanted([9000], [0], current=3) == 3


@pytest.mark.parametrize("targets", [{"target_backlog": 3}, {"target_ttft_s": 0}])
def test_wrong_targets_are_refused(targets):
    with pytest.raises(ConfigError, match=r"policy_kwargs\.target_"):
        TokenBacklogPolicy(**targets)
