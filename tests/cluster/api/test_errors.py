"""Every error that a client of an engine can meet has a status, and one shape."""

import inspect
import json

import pytest

from cluster.api.errors import ApiError, api_error_of, bad_request
from cluster.frontend import chat_template, errors
from cluster.frontend.chat_template import ChatTemplateError, NoChatTemplate
from scheduler.errors import InvalidRequest

STATUSES = {
    InvalidRequest: 400,
    errors.QueueFull: 429,
    errors.RequestTimedOut: 408,
    errors.ShuttingDown: 503,
    errors.NoWorkers: 503,
    errors.RequestRefused: 503,
    errors.EngineLost: 503,
    errors.EngineUnreachable: 503,
    errors.ProtocolMismatch: 503,
    errors.ClientClosed: 503,
}
NOT_OVER_HTTP = {errors.RequestError, errors.WaitTimedOut}
"""The first is never raised itself, the second ends waits that HTTP does not have."""


def test_no_error_of_the_front_end_is_forgotten() -> None:
    kinds = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert kinds == (set(STATUSES) | NOT_OVER_HTTP) - {InvalidRequest}


@pytest.mark.parametrize("kind", STATUSES, ids=lambda kind: kind.__name__)
def test_each_error_has_its_status_and_says_its_text(kind: type[Exception]) -> None:
    answer = api_error_of(kind("what went wrong"))
    assert answer.status == STATUSES[kind]
    error = json.loads(answer.body())["error"]
    assert error["message"] == "what went wrong"
    assert set(error) == {"message", "type", "param", "code"}
    is_worth_another_try = answer.status in (429, 503)
    assert ("Retry-After" in answer.headers) == is_worth_another_try


def test_a_template_that_refuses_is_a_bad_request() -> None:
    assert chat_template.__doc__
    for error in (ChatTemplateError("no"), NoChatTemplate("default", [])):
        assert api_error_of(error).status == 400
        assert api_error_of(error).param == "messages"


def test_what_nobody_foresaw_is_our_fault_and_stays_with_us() -> None:
    answer = api_error_of(KeyError("/secret/path"))
    assert answer.status == 500
    assert "secret" not in answer.body().decode()


def test_the_wait_is_the_measured_one_in_whole_seconds_and_never_none() -> None:
    for retry_after_s, told in ((0.1, "1"), (1.0, "1"), (7.2, "8"), (None, "1")):
        error = errors.QueueFull("full", retry_after_s=retry_after_s)
        assert api_error_of(error).headers["Retry-After"] == told


def test_a_message_may_repeat_what_is_no_valid_text() -> None:
    assert json.loads(bad_request("got '\ud800'", "stop").body())["error"]["param"] == "stop"
    assert isinstance(bad_request("x"), ApiError)
