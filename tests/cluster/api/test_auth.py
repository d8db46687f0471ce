"""Who may call: cases 121 and, for the default, 129."""

import hmac
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import BaseRoute, Route

from cluster.api.auth import KeyGuard
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import say_nothing

KEYS = ("first-key", "second-key")

OPEN = {("GET", "/health"), ("GET", "/"), ("GET", "/page/{name:path}")}
"""All that a stranger may ask for."""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    folder: Path = tmp_path_factory.mktemp("locked")
    with ApiRig(folder, script=say_nothing, api_keys=KEYS) as rig:

        @rig.app.get("/added-later")
        async def added_later() -> str:
            return "secret"

        yield rig


def doors(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Each method of each path that there is, those of routers that were included too."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from doors(included.routes)
            continue
        assert isinstance(route, Route), f"who guards {route}?"
        for method in sorted((route.methods or set()) - {"HEAD", "OPTIONS"}):
            yield method, route.path


def knock(rig: ApiRig, method: str, path: str, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return rig.http.request(method, path.replace("{", "").replace("}", ""), headers=headers)


def test_case_121_every_route_but_liveness_and_the_page_wants_a_key(locked: ApiRig) -> None:
    closed = [door for door in doors(locked.app.routes) if door not in OPEN]
    assert ("POST", "/v1/completions") in closed
    assert ("GET", "/added-later") in closed
    assert ("GET", "/openapi.json") in closed
    for method, path in [*closed, ("GET", "/no/such/path"), ("DELETE", "/v1/models")]:
        for key in (None, "wrong-key", "first-ke", "first-key-", "first-key second-key"):
            answer = knock(locked, method, path, key)
            assert answer.status_code == 401, (method, path, key)
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


def test_case_121_a_path_written_otherwise_is_no_way_around(locked: ApiRig) -> None:
    for path in (
        "//v1/models",
        "/health/../v1/models",
        "/page/../v1/models",
        "/v1/models/",
        "/v1%2fmodels",
    ):
        answer = locked.http.get(httpx.URL(locked.url).copy_with(raw_path=path.encode()))
        assert answer.status_code in (401, 404), path
        assert "data" not in answer.json(), path


@pytest.mark.parametrize("key", KEYS)
def test_each_of_several_keys_lets_in(locked: ApiRig, key: str) -> None:
    assert knock(locked, "GET", "/v1/models", key).status_code == 200
    assert knock(locked, "GET", "/added-later", key).json() == "secret"


def test_what_is_open_is_open(locked: ApiRig) -> None:
    for method, path in OPEN:
        assert knock(locked, method, path, None).status_code != 401


@pytest.mark.parametrize(
    "value",
    [
        "first-key",
        "Basic first-key",
        "Bearer",
        "Bearer\tfirst-key",
        "bearer: first-key",
        "Bearer é",
    ],
)
def test_a_key_that_is_not_borne_as_it_should_is_none(locked: ApiRig, value: str) -> None:
    headers = [(b"authorization", value.encode("latin-1"))]
    assert locked.http.get("/v1/models", headers=headers).status_code == 401


def test_the_official_client_raises_an_authentication_error(locked: ApiRig) -> None:
    import openai

    with locked.openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with locked.openai(api_key=KEYS[1]) as client:
        assert client.models.list().data[0].id == "tiny"


def test_every_key_is_looked_at_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time does not tell how near a guess was."""
    compared: list[tuple[bytes, bytes]] = []
    same = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or same(a, b))
    guard = KeyGuard(None, ("a", "b" * 100, "c"), ())  # type: ignore[arg-type]

    assert guard._knows(b"a")
    assert not guard._knows(b"")
    assert len(compared) == 6
    assert {len(part) for pair in compared for part in pair} == {32}


def test_more_paths_can_be_opened(start_rig: StartRig) -> None:
    rig = start_rig(api_keys=KEYS, open_paths=("/version",))
    assert knock(rig, "GET", "/version", None).status_code == 200
    assert knock(rig, "GET", "/v1/models", None).status_code == 401


def test_without_keys_everybody_may_call(start_rig: StartRig) -> None:
    rig = start_rig()
    assert knock(rig, "GET", "/v1/models", None).status_code == 200
    assert knock(rig, "GET", "/v1/models", "any").status_code == 200


def test_a_browser_may_ask_for_leave_without_a_key(start_rig: StartRig) -> None:
    rig = start_rig(api_keys=KEYS, cors_origins=("https://page.example",))
    asks = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    leave = rig.http.options("/v1/completions", headers=asks)
    refused = rig.http.get("/v1/models", headers={"Origin": "https://page.example"})

    assert leave.status_code == 200
    assert leave.headers["access-control-allow-origin"] == "https://page.example"
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    other = rig.http.options("/v1/completions", headers={**asks, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
