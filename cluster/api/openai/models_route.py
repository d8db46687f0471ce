"""`GET /v1/models`, `GET /version`."""

from importlib.metadata import version
from typing import Literal

import msgspec
from fastapi import APIRouter
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.api_server import ApiServer, server_of
from cluster.api.description import answers

router = APIRouter(tags=["server"])


class Model(Struct, frozen=True, kw_only=True):
    """A name under which the model can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When this process began, in seconds since 1970."""
    owned_by: Literal["stoker"] = "stoker"
    root: str
    """The model that it names."""
    parent: None = None
    max_model_len: int
    """Most tokens of prompt and output together."""


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Version(Struct, frozen=True, kw_only=True):
    version: str


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """Every name that the field `model` may have."""
    server = server_of(request)
    return _json(ModelList(data=[_model(server, name) for name in server.model_names]))


@router.get("/v1/models/{model:path}", responses=answers(Model))
async def get_model(request: Request, model: str) -> Response:
    """One of those names."""
    server = server_of(request)
    return _json(_model(server, server.model_named(model)))


@router.get("/version", responses=answers(Version))
async def get_version() -> Response:
    """Of this server."""
    return _json(Version(version=version("stoker")))


def _model(server: ApiServer, name: str) -> Model:
    info = server.info
    return Model(id=name, created=server.created, root=info.model, max_model_len=info.max_model_len)


def _json(answer: Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
