"""`/metrics`, for Prometheus: the engine's numbers and those of all API servers."""

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as MEDIA_TYPE
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.api_server import server_of
from cluster.frontend.errors import RequestError
from cluster.messages.reports import EngineMetrics, MetricsRequest

SCRAPE_TIMEOUT_S = 5.0
"""Less than the ten seconds that Prometheus waits unless told otherwise."""

router = APIRouter(tags=["metrics"])


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text format.

    Under `stoker:`, and the well-known ones under `vllm:` as well. Answers without the engine's
    part, and with `stoker:engine_up` 0, while the engine does not answer.
    """
    server = server_of(request)
    engine: EngineMetrics | None
    try:
        engine = await server.engine.ask(MetricsRequest(), EngineMetrics, SCRAPE_TIMEOUT_S)
    except RequestError:
        engine = None
    return Response(server.metrics.render(engine), headers={"content-type": MEDIA_TYPE})
