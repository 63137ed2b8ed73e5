"""Prometheus metrics: what the engine says of its stages, and what its records say of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_async.api.client import OmniClient
from omni_async.status import Health, ReplicaStatus, RequestRecord, StageStatus

M = TypeVar("M", Counter, Histogram)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2, 3, 5, 10)


class Metrics:
    """A registry of its own, so that several apps can live in one process."""

    def __init__(self, omni: OmniClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StageCollector(omni))
        self._requests = _RequestMetrics(self._registry)
        omni.add_observer(self._requests.observe)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _RequestMetrics:
    """Counters and histograms by model, fed with one record for each request that ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, help, ["model"], buckets=buckets, registry=registry)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, ["model", *labels], registry=registry)

        self._finished = counter("omni_requests_finished", "Requests that ended, by reason.", "reason")
        self._retries = counter("omni_request_retries", "Attempts beyond the first.")
        self._seconds = histogram("omni_request_seconds", "From submission to the end.")
        self._queue = histogram("omni_queue_seconds", "From submission to the first stage's start.")
        self._first = histogram("omni_time_to_first_audio_seconds", "From submission to the first chunk.")
        self._factor = histogram("omni_real_time_factor", "Request seconds per second of audio.", _FACTORS)
        self._audio = counter("omni_audio_seconds", "Seconds of audio delivered.")
        self._underrun = counter("omni_underrun_seconds", "Seconds that listeners waited in mid-stream.")
        self._streams = counter("omni_streams", "Streams played while made that ended normally.")
        self._children: dict[tuple[int | str, ...], Counter | Histogram] = {}
        self._gapless = counter("omni_gapless_streams", "Those of omni_streams without a gap.")

    def observe(self, record: RequestRecord) -> None:
        """Count an ended request."""
        model = record.pipeline
        self._child(self._finished, model, record.reason).inc()
        if record.retries:
            self._retries.labels(model).inc(record.retries)
        if record.reason == "refused":
            return
        self._child(self._seconds, model).observe(record.total_seconds)
        self._child(self._queue, model).observe(record.queue_seconds)
        if record.media_seconds > 0:
            self._observe_media(model, record)

    def _child(self, metric: M, *labels: str) -> M:
        """`metric.labels(…)`, looked up once: that look-up takes a lock and costs more than counting."""
        key = (id(metric), *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return cast(M, child)

    def _observe_media(self, model: str, record: RequestRecord) -> None:
        if record.first_chunk_seconds is not None:
            self._first.labels(model).observe(record.first_chunk_seconds)
        self._audio.labels(model).inc(record.media_seconds)
        self._underrun.labels(model).inc(record.underrun_seconds)
        if record.reason != "stop":
            return
        self._factor.labels(model).observe(record.total_seconds / record.media_seconds)
        if record.gapless:
            self._streams.labels(model).inc()
            self._gapless.labels(model).inc(0 if record.underrun_seconds > 0 else 1)


class _StageCollector(Collector):
    """Reads the engine's state when it is scraped."""

    def __init__(self, omni: OmniClient) -> None:
        self._omni = omni

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are known without asking the engine."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The metrics of the moment."""
        health = self._omni.health()
        yield from _server_metrics(health)
        yield from _stage_metrics(health.stages)
        yield from _replica_metrics([(stage, r) for stage in health.stages for r in stage.replicas])


def _server_metrics(health: Health) -> Iterable[Metric]:
    yield GaugeMetricFamily("omni_ready", "1 when every stage takes work.", value=float(health.ready))
    late = health.late_messages
    yield CounterMetricFamily("omni_late_messages", "Messages of requests already forgotten.", value=late)


def _stage_metrics(stages: Iterable[StageStatus]) -> Iterable[Metric]:
    labels = ["model", "stage"]
    running = GaugeMetricFamily("omni_requests_running", "Requests that hold a slot.", labels=labels)
    waiting = GaugeMetricFamily("omni_requests_waiting", "Requests without a slot yet.", labels=labels)
    moved = CounterMetricFamily("omni_transfer_bytes", "Bytes that the stage has put out.", labels=labels)
    for stage in stages:
        key = [stage.pipeline, stage.stage]
        running.add_metric(key, stage.running)
        waiting.add_metric(key, stage.waiting)
        moved.add_metric(key, stage.transfer_bytes)
    return running, waiting, moved


def _replica_metrics(replicas: list[tuple[StageStatus, ReplicaStatus]]) -> Iterable[Metric]:
    labels = ["model", "stage", "replica"]
    up = GaugeMetricFamily("omni_replica_up", "1 when the worker takes work.", labels=labels)
    batch = GaugeMetricFamily("omni_batch_size", "Requests in a step, on average.", labels=labels)
    age = GaugeMetricFamily("omni_last_step_age_seconds", "Since the last step, with work.", labels=labels)
    steps = CounterMetricFamily("omni_steps", "Steps done.", labels=labels)
    restarts = CounterMetricFamily("omni_restarts", "Times that the worker was replaced.", labels=labels)
    for stage, replica in replicas:
        key = [stage.pipeline, stage.stage, replica.name]
        up.add_metric(key, float(replica.state == "ready"))
        batch.add_metric(key, replica.batch_size)
        age.add_metric(key, replica.last_step_age)
        steps.add_metric(key, replica.steps)
        restarts.add_metric(key, replica.restarts)
    return up, batch, age, steps, restarts
