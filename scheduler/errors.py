"""Errors of requests and of the scheduler's configuration."""


class InvalidRequest(ValueError):
    """A request asks for something that cannot be done; the message says what and why.

    Attributes:
        param: the field that is wrong, for clients that show it.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


MAX_SHOWN = 80
"""Characters of a wrong value that an error message repeats."""


def wrong_value(name: str, wanted: str, got: object) -> InvalidRequest:
    """The error that says what a field must be, and what it is."""
    try:
        shown = repr(got)
    except ValueError:  # an integer of thousands of digits has no repr
        shown = f"a huge {type(got).__name__}"
    if len(shown) > MAX_SHOWN:
        shown = shown[:MAX_SHOWN] + "…"
    return InvalidRequest(f"{name} must be {wanted}, got {shown}", param=name)


class ConfigError(ValueError):
    """Settings that do not fit together; the message names both and the way out."""


class RequestFailed(Exception):
    """One request could not be handled, and the scheduler is in the middle of a change."""

    def __init__(self, client: int, handle: int) -> None:
        super().__init__(f"request {handle} of client {client} could not be handled")
        self.client, self.handle = client, handle


class ProtocolError(RuntimeError):
    """A result does not answer the plan it must answer: a step missing or out of order."""
