"""Headers that Serve must not see."""

import pytest
from starlette.requests import Request

from serve_app.errors import RequestError
from serve_app.ingress.serve_headers import HEAD_START_S, KeepFromServe, middlewares, timeout_of


async def kept(*headers):
    """What gets through the middleware of such a request."""
    passed = []

    async def app(scope, receive, send):
        passed.append(scope)

    [middleware] = middlewares()
    assert middleware.cls is KeepFromServe
    scope = {"type": "http", "headers": [(name.lower().encode(), value.encode()) for name, value in headers]}
    await middleware.cls(app)(scope, None, None)
    return Request(passed[0])


async def test_the_time_arrives_under_another_name():
    request = await kept(("X-Request-Timeout-Seconds", "2.5"), ("Authorization", "Bearer x"))
    assert "x-request-timeout-seconds" not in request.headers
    assert request.headers["authorization"] == "Bearer x"
    assert timeout_of(request) == 2.5


async def test_callers_cannot_switch_off_that_leaving_ends_their_call():
    assert not list((await kept(("X-Request-Disconnect-Disabled", "?1"))).headers)


@pytest.mark.parametrize("value", ["", "0", "-1", "soon", "1e3", "nan"])
async def test_a_time_that_is_none_is_refused(value):
    with pytest.raises(RequestError) as refusal:
        timeout_of(await kept(("X-Request-Timeout-Seconds", value)))
    assert refusal.value.param == "X-Request-Timeout-Seconds"


@pytest.mark.parametrize(("asked", "given"), [("10", 10 - HEAD_START_S), ("0.1", 0.05)])
def test_where_serve_saw_the_time_the_call_ends_before_serve_cuts_it(asked, given):
    scope = {"type": "http", "headers": [(b"x-request-timeout-seconds", asked.encode())]}
    assert timeout_of(Request(scope)) == pytest.approx(given)


def test_without_the_header_there_is_no_limit():
    assert timeout_of(Request({"type": "http", "headers": []})) is None
