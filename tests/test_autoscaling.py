"""The autoscaling policy: tokens and speed decide, not the number of requests."""

from types import SimpleNamespace

import pytest

from serve_app.autoscaling import TokenBacklogPolicy


def wanted(backlogs, speeds, current=1):
    metrics = {"backlog_tokens": dict(enumerate(backlogs)), "tokens_per_s": dict(enumerate(speeds))}
    context = SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=current)
    return TokenBacklogPolicy(target_backlog_s=10)(context)[0]


@pytest.mark.parametrize(
    ("backlogs", "speeds", "expected"),
    [
        ([0], [100], 0),
        ([0, 0], [0, 0], 0),
        ([1], [100], 1.0),
        ([1000], [100], 1.0),
        ([2500], [100], 2.5),
        ([2000, 2000], [100, 300], 2.0),
        ([5000, 100], [100, 0], 5.1),  # a replica that has not worked yet says nothing of the speed
    ],
)
def test_replicas_follow_seconds_of_work(backlogs, speeds, expected):
    assert wanted(backlogs, speeds) == pytest.approx(expected)


def test_without_a_measurement_nothing_changes():
    assert wanted([9000], [0], current=3) == 3
