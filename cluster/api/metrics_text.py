"""The engine's numbers in Prometheus' words, under our names and under vLLM's.

Source of the format: Prometheus' text exposition format 0.0.4, written by `prometheus_client`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.messages.reports import Distribution, EngineMetrics, Sample
from cluster.metrics import ENGINE, Family

PREFIX, VLLM_PREFIX = "stoker:", "vllm:"
ENGINE_LABEL = "0"
"""vLLM numbers its engines; all our groups belong to one."""


class EngineCollector(Collector):
    """One answer of the engine; None: it did not answer, and `engine_up` says so."""

    def __init__(self, metrics: EngineMetrics | None) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        if metrics is None:
            metrics = EngineMetrics(
                model="", values={"engine_up": (Sample((), 0.0),)}, distributions={}
            )
        for family in ENGINE:
            values = metrics.values.get(family.name, ())
            distributions = metrics.distributions.get(family.name, ())
            if not values and not distributions:
                continue
            name = PREFIX + family.name
            yield _metric(family, name, family.labels, (), values, distributions)
            if family.vllm:
                labels = family.labels if family.vllm_labels is None else family.vllm_labels
                yield _metric(
                    family,
                    VLLM_PREFIX + family.vllm,
                    ("model_name", "engine", *labels),
                    (metrics.model, ENGINE_LABEL),
                    values,
                    distributions,
                )


def _metric(
    family: Family,
    name: str,
    labels: Sequence[str],
    first: tuple[str, ...],
    values: Sequence[Sample],
    distributions: Sequence[Distribution],
) -> Metric:
    """One family with all its series, whose labels begin with the values `first`."""
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.text, labels=labels)
        for each in distributions:
            histogram.add_metric([*first, *each.labels], _buckets(family, each), each.sum)
        return histogram
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = kind(name, family.text, labels=labels)
    for sample in values:
        metric.add_metric([*first, *sample.labels], sample.value)
    return metric


def _buckets(family: Family, distribution: Distribution) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, family.bounds), "+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
