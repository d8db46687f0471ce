"""The page at `/`: files of `cluster/api/page`, which ask no other host for anything.

Browsers keep the files and ask each time whether they are still the same (ETag), so that a
new version of the server is never shown with the page of an old one.
"""

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parent / "page"

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Nothing inline runs, nothing is loaded from elsewhere, and no other page may frame this one."""

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page itself, which needs no key: it asks for one if the server does."""
    return await _file("index.html", request)


@router.get("/page/{name:path}")
async def page_file(name: str, request: Request) -> Response:
    """A script, style sheet or picture of the page."""
    return await _file(name, request)


async def _file(name: str, request: Request) -> Response:
    files = StaticFiles(directory=PAGE, check_dir=False)
    response = await files.get_response(name, request.scope)
    response.headers.update(HEADERS)
    return response
