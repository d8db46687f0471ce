"""Errors that are answered before the application is asked."""

from starlette.types import Send

from cluster.api.errors import ApiError


async def answer_error(send: Send, error: ApiError) -> None:
    """The whole response. The connection is closed, since the body may not have been read."""
    body = error.body()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in headers.items()
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
