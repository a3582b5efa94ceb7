"""What was asked for and not served, in sentences: no request is left out without a word."""

from collections.abc import Mapping


def left_out_of_workload(metrics: Mapping[str, float], max_length: int) -> str | None:
    """Says what a workload lost before anything was served; None where nothing was lost.

    Args:
      metrics: `skipped_rows` and `requests_too_long`, where known.
      max_length: longest sequence, in tokens.
    """
    skipped, long = (int(metrics.get(name, 0)) for name in ("skipped_rows", "requests_too_long"))
    parts = []
    if skipped:
        parts.append(f"{skipped:,} malformed {'row' if skipped == 1 else 'rows'}")
    if long:
        parts.append(f"{_requests(long)} longer than max_length={max_length:,}")
    if not parts:
        return None
    were = "was" if skipped + long == 1 else "were"
    return f"{' and '.join(parts)} of the workload {were} left out before any was taken"


def refused_by_pool(metrics: Mapping[str, float], advice: str) -> str | None:
    """Says how many requests had no room even alone; None where all had.

    Args:
      metrics: `requests_refused`, where known, and `requests`, those that were served.
      advice: what gives them room.
    """
    refused = int(metrics.get("requests_refused", 0))
    if not refused:
        return None
    asked = refused + int(metrics.get("requests", 0))
    return (
        f"{refused:,} of {_requests(asked)} had no room even alone and "
        f"{'was' if refused == 1 else 'were'} left out; {advice}"
    )


def _requests(count: int) -> str:
    return f"{count:,} {'request' if count == 1 else 'requests'}"
