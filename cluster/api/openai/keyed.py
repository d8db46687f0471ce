"""`Idempotency-Key`: what a caller names, so that it is done once and can be come back to.

Everything about such a call that chance would decide follows from the key and what was asked:
its id, and its seeds where it names none. So a server that knows nothing of it, because another
one took it and died, makes the same answer again.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from cluster.api.errors import KEY_REUSED, ApiError, bad_request
from cluster.api.kept_calls import KeptCall
from cluster.api.position import LAST_EVENT_ID, Position
from cluster.api.siblings import IDEMPOTENCY_KEY
from cluster.frontend.engine_client import seeds_from

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """One key, and what was asked under it."""

    name: str
    """Of the key: keys of callers with another `Authorization` have other names."""
    fingerprint: bytes
    """Of route and body, however the body's JSON was laid out."""
    position: Position | None
    """Where the stream goes on; None: at its beginning."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.name.encode() + self.fingerprint).hexdigest()

    def seeds(self) -> Callable[[], int]:
        """Draws the seeds of its requests."""
        return seeds_from(int(self.digest, 16))

    def check(self, kept: KeptCall) -> None:
        """
        Raises:
            ApiError: 422, the key stands for something else.
        """
        if kept.fingerprint != self.fingerprint:
            raise ApiError(
                f"this {IDEMPOTENCY_KEY} was used with another route or body not long ago; take "
                "a new key for each call",
                KEY_REUSED,
                param=IDEMPOTENCY_KEY,
            )


async def keyed_of(request: Request, *, wants_stream: bool) -> Keyed | None:
    """The key of a call; None if it has none.

    Raises:
        ApiError: 400, a header that cannot be.
    """
    key, event_id = request.headers.get(IDEMPOTENCY_KEY), request.headers.get(LAST_EVENT_ID)
    if event_id is not None and (key is None or not wants_stream):
        raise bad_request(
            f"{LAST_EVENT_ID} needs stream=true and the {IDEMPOTENCY_KEY} that the stream was "
            "begun with",
            LAST_EVENT_ID,
        )
    if key is None:
        return None
    if _KEY.fullmatch(key) is None:
        raise bad_request(
            f"{IDEMPOTENCY_KEY} must be 1 to 255 visible ASCII characters, got {len(key)}: "
            f"{key!r:.80}",
            IDEMPOTENCY_KEY,
        )
    caller = request.headers.get("authorization", "")
    asked = json.dumps([request.url.path, await request.json()], sort_keys=True)
    return Keyed(
        name=hashlib.sha256(f"{caller}\0{key}".encode()).hexdigest(),
        fingerprint=hashlib.sha256(asked.encode()).digest(),
        position=None if event_id is None else Position.parse(event_id),
    )
