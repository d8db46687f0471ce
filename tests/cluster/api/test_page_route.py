"""The page's files: served with right types, kept by browsers, and asking nobody else."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.api.page_route import PAGE
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import say_nothing

TYPES = {".html": "text/html", ".css": "text/css", ".js": "javascript", ".svg": "image/svg+xml"}
FILES = sorted(
    path.relative_to(PAGE).as_posix()
    for path in PAGE.rglob("*")
    if path.suffix in TYPES and path.is_file()
)
OURS = [name for name in FILES if not name.startswith("vendor/")]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    with ApiRig(tmp_path_factory.mktemp("page"), script=say_nothing) as rig:
        yield rig


def test_the_page_is_at_the_root_with_a_strict_policy(rig: ApiRig) -> None:
    response = rig.http.get("/")

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert response.text == (PAGE / "index.html").read_text(encoding="utf-8")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
def test_each_file_has_its_type_and_is_sent_once(rig: ApiRig, name: str) -> None:
    response = rig.http.get(f"/page/{name}")
    again = rig.http.get(f"/page/{name}", headers={"If-None-Match": response.headers["etag"]})

    assert response.content == (PAGE / name).read_bytes()
    assert TYPES[Path(name).suffix] in response.headers["content-type"]
    assert response.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/none.js",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/%00",
    ],
)
def test_nothing_else_can_be_had(rig: ApiRig, path: str) -> None:
    response = rig.http.get(path)

    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", OURS)
def test_no_file_of_ours_names_another_host_or_writes_html(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8")

    hosts = re.findall(r"""["'(]\s*(?:https?:)?//[^"')]+""", text)
    assert [host for host in hosts if "www.w3.org/2000/svg" not in host] == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_the_page_has_nothing_inline() -> None:
    text = (PAGE / "index.html").read_text(encoding="utf-8")

    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text)
