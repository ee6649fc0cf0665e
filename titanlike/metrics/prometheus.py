"""Serves the latest values of a run to Prometheus."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from titanlike.metrics.trackers import Values

# Values that may be missing because they are not finite: they are served as NaN.
FINITE = ("loss", "grad_norm", "validation_loss")
EVENTS = {
    "titanlike_non_finite_total": "Records with a loss or gradient norm that is not finite, and skipped steps.",
    "titanlike_loss_spikes_total": "Loss spikes.",
    "titanlike_failed_saves_total": "Checkpoints that could not be saved.",
}


class PrometheusEndpoint:
    """An HTTP server in a thread. Every number of a record is a gauge `titanlike_NAME`, events are counters, and all have the label
    `run`. Raises `OSError` if it cannot listen."""

    def __init__(self, address: str, port: int, run: str, num_steps: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._gauge_type, self._counter_type = GaugeMetricFamily, CounterMetricFamily
        self._run = run
        self._gauges = {"titanlike_num_steps": float(num_steps), "titanlike_last_record_timestamp_seconds": time.time()}
        self._events: Counter[str] = Counter()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr=address, registry=registry)

    def log(self, step: int, values: Values) -> None:
        """Takes the values of a record."""
        gauges = {"titanlike_last_record_timestamp_seconds": time.time()}
        if "loss" in values:
            gauges["titanlike_step"] = float(step)
        for name, value in values.items():
            if name.startswith("layers/"):
                continue  # too many series
            if isinstance(value, int | float):
                gauges[gauge_name(name)] = float(value)
            elif value is None and name in FINITE:
                gauges[gauge_name(name)] = math.nan
        self._gauges = self._gauges | gauges  # replaced, not changed: the server reads it in another thread
        is_finite = all(values.get(name, 0.0) is not None for name in FINITE)
        happened = ("skipped" in values or not is_finite, "loss_spike" in values, "save_failed" in values)
        self._events = self._events + Counter(name for name, one in zip(EVENTS, happened, strict=True) if one)

    def collect(self) -> Iterator[Any]:
        """Yields the metrics, for the client library."""
        for name, value in self._gauges.items():
            gauge = self._gauge_type(name, name, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge
        for name, text in EVENTS.items():
            counter = self._counter_type(name, text, labels=["run"])
            counter.add_metric([self._run], self._events[name])
            yield counter

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()


def gauge_name(name: str) -> str:
    """Returns the metric of a value: `titanlike_validation_loss`."""
    return "titanlike_" + re.sub(r"\W", "_", name)
