"""Counters, histograms and the text that scrapers read."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path

import pytest

from domicile.kube.ring_metrics import HELP as RING_COUNTERS
from domicile.observe.catalogue import COUNTERS
from domicile.observe.exposition import (
    Histogram,
    MetricFamily,
    Sample,
    gauge,
    gauges,
    number,
    write,
)
from domicile.observe.metrics import BOUNDS_S, MAX_HANDLERS, Metrics

SOURCE = Path(__file__).resolve().parents[3] / "src" / "domicile"
COUNTED = re.compile(r"""\bcount\(\s*["'](?P<name>[\w.]+)["']""")

GOLDEN = """\
# HELP domicile_lease_fenced_total Incarnations of this process that lost their lease (L5).
# TYPE domicile_lease_fenced_total counter
domicile_lease_fenced_total 3
# HELP domicile_handler_seconds Time it took.
# TYPE domicile_handler_seconds histogram
domicile_handler_seconds_bucket{type="cart",handler="add",le="0.001"} 1
domicile_handler_seconds_bucket{type="cart",handler="add",le="0.5"} 2
domicile_handler_seconds_bucket{type="cart",handler="add",le="+Inf"} 3
domicile_handler_seconds_sum{type="cart",handler="add"} 2.75
domicile_handler_seconds_count{type="cart",handler="add"} 3
# HELP domicile_shards Shards here,\\nwith a back\\\\slash.
# TYPE domicile_shards gauge
domicile_shards{role="a\\\\b \\"c\\"\\nd"} 12
domicile_shards{role="z"} 0.25
"""


def families() -> list[MetricFamily]:
    """One of each kind, with everything that has to be escaped."""
    taken = Histogram((0.001, 0.5))
    for seconds in (0.001, 0.25, 2.499):
        taken.add(seconds)
    samples = taken.samples((("type", "cart"), ("handler", "add")))
    return [
        MetricFamily(
            "domicile_lease_fenced_total", "counter", COUNTERS["lease.fenced"], (Sample(3),)
        ),
        MetricFamily("domicile_handler_seconds", "histogram", "Time it took.", samples),
        gauges(
            "domicile_shards",
            "Shards here,\nwith a back\\slash.",
            "role",
            {"z": 0.25, 'a\\b "c"\nd': 12},
        ),
        MetricFamily("domicile_nothing", "gauge", "Has no samples, so it is left out."),
    ]


def test_the_format_is_the_golden_one() -> None:
    assert write(families()) == GOLDEN


def test_the_reference_parser_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    read = {family.name: family for family in parser.text_string_to_metric_families(GOLDEN)}
    assert read["domicile_lease_fenced"].samples[0].value == 3
    assert read["domicile_shards"].documentation == "Shards here,\nwith a back\\slash."
    labels = [sample.labels for sample in read["domicile_shards"].samples]
    assert labels == [{"role": 'a\\b "c"\nd'}, {"role": "z"}]
    assert read["domicile_handler_seconds"].type == "histogram"
    assert [sample.value for sample in read["domicile_handler_seconds"].samples][:3] == [1, 2, 3]


def test_the_reference_parser_reads_all_of_a_process() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = Metrics()
    metrics.count("lease.fenced")
    metrics.took("cart", "add", 0.002)
    text = metrics.text([gauge("domicile_ready", "1 while ready.", True)])
    names = [family.name for family in parser.text_string_to_metric_families(text)]
    assert len(names) == len(set(names)) == len(COUNTERS) + 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"), (True, "1"), (2.0, "2"), (0.1, "0.1"), (1e-05, "1e-05"), (-3.5, "-3.5"),
        (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"), (2**53, "9007199254740992"),
    ],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_counters_start_at_zero_and_add_up() -> None:
    metrics = Metrics()
    assert set(metrics.counts.values()) == {0}
    metrics.count("lease.fenced")
    metrics.count("tcp.withheld_bytes", 70)
    metrics.count("one.of_their_own", 2)
    metrics.event("fenced", inc="x")
    assert metrics.counts["lease.fenced"] == 1
    text = metrics.text()
    assert "\ndomicile_lease_fenced_total 1\n" in text
    assert "\ndomicile_tcp_withheld_bytes_total 70\n" in text
    assert "\ndomicile_one_of_their_own_total 2\n" in text
    assert "\ndomicile_tell_lost_total 0\n" in text


def test_threads_lose_no_counts() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(20_000):
            metrics.count("one.of_their_own")
            metrics.count("tell.lost")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counts["tell.lost"] == metrics.counts["one.of_their_own"] == 80_000


def test_handler_times_fall_into_buckets() -> None:
    metrics = Metrics()
    for seconds in (0.000_005, 0.000_01, 0.003, 99.0):
        metrics.took("cart", "add", seconds)
    text = metrics.text()
    assert '_bucket{type="cart",handler="add",le="1e-05"} 2\n' in text, "a bound is inside"
    assert '_bucket{type="cart",handler="add",le="0.005"} 3\n' in text
    assert '_bucket{type="cart",handler="add",le="+Inf"} 4\n' in text
    assert list(BOUNDS_S) == sorted(BOUNDS_S)


def test_the_number_of_handlers_is_bounded() -> None:
    metrics = Metrics()
    for number_ in range(MAX_HANDLERS + 10):
        metrics.took("cart", f"h{number_}", 0.1)
    text = metrics.text()
    assert text.count('le="+Inf"') == MAX_HANDLERS + 1
    assert 'domicile_handler_seconds_count{type="(others)",handler="(others)"} 10\n' in text


def test_every_counter_of_the_source_is_explained() -> None:
    counted = {
        match["name"]
        for path in SOURCE.rglob("*.py")
        for match in COUNTED.finditer(path.read_text(encoding="utf-8"))
    }
    assert len(counted) > 30
    # The sharder's counters have the names of another project, and a table of their own.
    assert sorted(counted - set(COUNTERS) - set(RING_COUNTERS)) == [], (
        "say in observe/catalogue.py what they mean"
    )
    assert all(text.endswith(".") for text in COUNTERS.values())
    assert list(COUNTERS) == sorted(COUNTERS)
