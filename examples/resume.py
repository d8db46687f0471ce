"""A stream that survives lost connections and dead front ends, with httpx or the openai package.

`ResumingTransport` gives each call a key, and goes on behind the last whole event when the
connection breaks; whoever reads the stream notices a pause. Start a cluster with `stoker serve`;
it prints the URL to give here.
"""

import sys
import time
import uuid
from collections.abc import Iterator

import httpx
from openai import OpenAI

TRIES = 10
"""Attempts in a row without a single new event before a call fails."""


class ResumingTransport(httpx.BaseTransport):
    """Sends requests as another transport does, and event streams again where they broke."""

    def __init__(self, transport: httpx.BaseTransport | None = None) -> None:
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            request.read()  # so that it can be sent again
            request.headers.setdefault("Idempotency-Key", str(uuid.uuid4()))
        response = self._send(request)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Events(self, request, response.stream)
        return response

    def _send(self, request: httpx.Request) -> httpx.Response:
        for tries in range(TRIES):
            if tries:
                time.sleep(min(2.0, 0.05 * 2**tries))
            try:
                response = self._transport.handle_request(request)
            except httpx.TransportError:
                if tries == TRIES - 1 or request.method != "POST":
                    raise
                continue
            if response.status_code != 503 or "Last-Event-ID" not in request.headers:
                break
            response.close()  # no engine for the moment, or the front end is on its way out
        return response

    def go_on(self, request: httpx.Request, event_id: str) -> httpx.Response:
        """The stream behind an event, or from its start if there was none."""
        if event_id:
            request.headers["Last-Event-ID"] = event_id
        response = self._send(request)
        if response.status_code != 200:
            response.read()
            raise httpx.RemoteProtocolError(
                f"the stream cannot go on: {response.status_code} {response.text}", request=request
            )
        return response

    def close(self) -> None:
        self._transport.close()


class _Events(httpx.SyncByteStream):
    """The bytes of one stream's events, each whole and once."""

    def __init__(
        self, transport: ResumingTransport, request: httpx.Request, stream: object
    ) -> None:
        assert isinstance(stream, httpx.SyncByteStream)
        self._transport, self._request, self._stream = transport, request, stream

    def __iter__(self) -> Iterator[bytes]:
        event_id, tries = "", 0
        while True:
            held = b""
            try:
                for part in self._stream:
                    whole, end, held = (held + part).rpartition(b"\n\n")
                    if end:
                        event_id, tries = _last_id(whole) or event_id, 0
                        yield whole + end
                return
            except httpx.TransportError:
                tries += 1
                if tries > TRIES:
                    raise
            self._stream.close()
            response = self._transport.go_on(self._request, event_id)
            assert isinstance(response.stream, httpx.SyncByteStream)
            self._stream = response.stream

    def close(self) -> None:
        self._stream.close()


def _last_id(events: bytes) -> str:
    ids = [line for line in events.split(b"\n") if line.startswith(b"id: ")]
    return ids[-1].removeprefix(b"id: ").decode() if ids else ""


def main(url: str) -> None:
    with OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        http_client=httpx.Client(transport=ResumingTransport(), timeout=60),
    ) as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Tell me a long story."}],
            max_completion_tokens=300,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/resume.py URL")
    main(sys.argv[1])
