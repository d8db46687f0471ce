"""Errors of requests and of the scheduler's configuration."""


class InvalidRequest(ValueError):
    """A request asks for something that cannot be done; the message says what and why.

    Attributes:
        param: the field that is wrong, for clients that show it.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(ValueError):
    """Settings that do not fit together; the message names both and the way out."""


class ProtocolError(RuntimeError):
    """A result does not answer the plan it must answer: a step missing or out of order."""
