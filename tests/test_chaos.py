"""The chaos run sees what is wrong: answers and records that are not what they should be."""

import json

import pytest

from benchmarks.callers import Answer, CallReport, Manner, read_event
from benchmarks.chaos import faults_of_log


def event(text="", reason=None, index=0):
    return b"data: " + json.dumps({"choices": [{"index": index, "text": text, "finish_reason": reason}]}).encode()


DONE = b"data: [DONE]"
ERROR = b'data: {"error": {"code": "overloaded"}}'


def read(*frames):
    answer = Answer()
    for frame in frames:
        read_event(answer, frame)
    return answer


def test_a_good_stream_has_no_faults():
    answer = read(event("a"), event("b", "stop"), event("c", "length", 1), DONE)
    assert (answer.texts, answer.reasons) == ({0: "ab", 1: "c"}, {0: "stop", 1: "length"})
    assert answer.is_over
    assert not answer.faults


@pytest.mark.parametrize(
    "frames",
    [
        (event("a", "stop"), event("b"), DONE),
        (event("a", "stop"), event("", "length"), DONE),
        (event("a", "stop"), DONE, DONE),
        (event("a", "stop"), DONE, event("b")),
        (ERROR, DONE),
        (event("a", "stop"), DONE, ERROR),
    ],
)
def test_two_endings_and_text_behind_one_are_faults(frames):
    assert read(*frames).faults


def test_a_stream_that_stops_has_no_ending():
    assert not read(event("a")).is_over


def report(ending, num_tokens=3):
    return CallReport("chaos-1", Manner.READ, 200, ending, 0.0, 1.0, None, num_tokens, ())


def record(ending, num_tokens=3):
    return json.dumps({"id": "chaos-1", "ending": ending, "completion_tokens": num_tokens})


@pytest.mark.parametrize(
    ("ending", "lines"),
    [
        ("complete", [record("length")]),
        ("deadline_exceeded", ["a line of another kind", record("deadline", 0)]),
        ("left", [record("disconnected", 2)]),
        ("left", [record("stop", 2)]),
        ("left", []),
        ("overloaded", [record("overloaded", 0)]),
    ],
)
def test_records_that_say_what_the_caller_saw(ending, lines):
    assert not faults_of_log(lines, [report(ending)])


@pytest.mark.parametrize(
    ("ending", "lines"),
    [
        ("complete", []),
        ("complete", [record("length")] * 2),
        ("complete", [record("length", 4)]),
        ("complete", [record("disconnected")]),
        ("overloaded", [record("internal_error", 0)]),
        ("left", [record(None)]),
    ],
)
def test_records_that_do_not(ending, lines):
    assert faults_of_log(lines, [report(ending)])
