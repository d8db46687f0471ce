"""Bodies: bounded in size and in time, and here as a whole before the application is asked."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.errors import TIMED_OUT, TOO_LARGE, ApiError
from cluster.api.openai.plain_answer import answer_error


class BodyLimit:
    """Answers 413 to a body that is too large, as soon as that is known, and 408 to a slow one."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await answer_error(send, error)
            return
        if body is None:
            return
        await self._app(scope, replayed(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client left before its end.

        Raises:
            ApiError: it is larger, or takes longer, than it may.
        """
        told = Headers(scope=scope).get("content-length", "")
        if told.isdigit() and int(told) > self._max_bytes:
            raise self._too_large(f"{int(told)} bytes")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large("larger")
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                f"the body was not here within read_timeout_s={self._timeout_s:g}; {size} bytes "
                "were",
                TIMED_OUT,
            ) from None

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            f"a body may have {self._max_bytes} bytes (max_body_bytes), this one is {what}. "
            "Send less, or raise the limit",
            TOO_LARGE,
        )


def _has_body(scope: Scope) -> bool:
    """RFC 9112, section 6.3: a request without either of these has none."""
    headers = Headers(scope=scope)
    return "content-length" in headers or "transfer-encoding" in headers


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes after it: the end of the connection."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
