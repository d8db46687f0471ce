"""Who may call: bearers of one of the keys, on every path but a few that are named here.

A guard around the whole application, so that a new route is closed until somebody opens it.
"""

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.errors import UNAUTHORIZED, ApiError
from cluster.api.openai.plain_answer import answer_error

LIVENESS = "/health"
PAGE = "/"
PAGE_FILES = "/page/"
"""The page's files hold nothing secret: the page itself asks for a key, and sends it."""


class KeyGuard:
    """Answers 401 to calls without a key that we know. Without keys, everybody may call."""

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = {LIVENESS, PAGE, *open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "")
        scheme, _, key = given.partition(" ")
        if scheme.lower() == "bearer" and self._knows(key.strip().encode("latin-1")):
            await self._app(scope, receive, send)
            return
        message = (
            "this server wants a key: send `Authorization: Bearer KEY`"
            if not given
            else "this key is not one of the server's"
        )
        await answer_error(
            send, ApiError(message, UNAUTHORIZED, headers={"WWW-Authenticate": "Bearer"})
        )

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(PAGE_FILES)

    def _knows(self, key: bytes) -> bool:
        """In the same time for every key: digests have one length, and all are looked at."""
        given = _digest(key)
        return sum(hmac.compare_digest(given, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
