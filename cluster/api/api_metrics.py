"""What the API servers count themselves: HTTP calls, and how long they took.

Each process counts for itself. With a folder they share their counts through files in it
(`prometheus_client`'s multiprocess mode), so that whichever of them is scraped answers for all,
also for one that has ended.
"""

import os
from collections.abc import Collection

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector

from cluster.api.exchange import Exchange
from cluster.api.metrics_text import PREFIX, EngineCollector
from cluster.messages.reports import EngineMetrics
from cluster.metrics import HTTP, Family

OTHER = "other"
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_FAMILIES = {family.name: family for family in HTTP}


class ApiMetrics:
    """Counts of one process, and the text of all."""

    def __init__(self, folder: str = "") -> None:
        """
        Args:
            folder: where all API servers of the cluster count; empty: this one counts for itself.
        """
        self._folder = folder
        if folder:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # where the library looks for it
            values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]  # it has no types
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they are series of times of day
        self.routes: Collection[str] = ()
        """Patterns of paths that calls are counted by."""
        self._registry = CollectorRegistry()
        self._requests = self._counter("http_requests")
        self._left = self._counter("http_callers_left")
        self._seconds = self._histogram("http_request_seconds")
        self._first_token_s = self._histogram("http_time_to_first_token_seconds")

    def observe(self, exchange: Exchange) -> None:
        """A call is over."""
        route = exchange.route or exchange.path
        route = route if route in self.routes else OTHER
        method = exchange.method if exchange.method in _METHODS else OTHER
        self._requests.labels(route, method, str(exchange.status or "left")).inc()
        self._seconds.labels(route).observe(max(0.0, exchange.seconds))
        call = exchange.call
        if call is None:
            return
        if call.has_left:
            self._left.labels(route).inc()
        firsts = [output.arrivals_s[0] for output in call.outputs if output.arrivals_s]
        if firsts:
            self._first_token_s.labels(route).observe(max(0.0, min(firsts) - exchange.began_s))

    def render(self, engine: EngineMetrics | None) -> bytes:
        """All metrics in the text format 0.0.4, which every Prometheus takes, whatever it asks.

        Not in OpenMetrics: prometheus_client 0.26 writes `stoker_` there instead of `stoker:`.
        """
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        if self._folder:
            MultiProcessCollector(registry, self._folder)  # type: ignore[no-untyped-call]  # as above
        else:
            registry.register(self._registry)
        return generate_latest(registry)

    def _counter(self, name: str) -> Counter:
        family = _FAMILIES[name]
        return Counter(PREFIX + name, family.text, family.labels, registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        family: Family = _FAMILIES[name]
        return Histogram(
            PREFIX + name,
            family.text,
            family.labels,
            registry=self._registry,
            buckets=family.bounds,
        )
