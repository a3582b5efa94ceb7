"""What is said of two caches that served the same requests: rows made by hand."""

import pytest

from kvlab.research.rows import make_row
from kvlab.research.serve_report import present_serve_trace


def rows_of(placement, running, waiting, mebibytes):
    config = {"placement": placement, "storage": "float32", "retention": "all", "max_length": 512}
    metrics = {
        **{"requests_ended": 1, "running_mean": running, "waiting_share": waiting},
        "kv_bytes_allocated": mebibytes * 2**20,
    }
    for point, values in ((config, metrics), (config | {"request": 0}, {})):
        when = "2026-12-01T00:00:00+00:00"
        yield make_row("serve_trace", point, 0, metrics=values, started=when, wall_s=1.0)


@pytest.mark.parametrize(
    ("waiting", "mebibytes", "wanted"),
    [
        (0.5, 48, "On the same memory paged has, of contiguous, x3.00 the requests at once."),
        (
            0.5,
            96,
            "On 96.0 MiB and 46.0 MiB (slots bound what a cache can use) paged has, of contiguous, "
            "x3.00 the requests at once.",
        ),
        (
            0.0,
            48,
            "No request ever waited for paged or contiguous, so memory decided nothing: how many "
            "run at once tells only how long they take. Raise the rate, or lower --kv_mib.",
        ),
    ],
    ids=["memory decides", "slots decide", "nothing decides"],
)
def test_caches_are_compared_for_what_decided(waiting, mebibytes, wanted):
    rows = [*rows_of("contiguous", 2.0, waiting, 46), *rows_of("paged", 6.0, waiting, mebibytes)]
    assert present_serve_trace(rows).findings == [wanted]
