"""Requests as they arrived, and the readers of published traces of them.

A trace says when each request came, how many tokens it brought and how many it was answered with.
Mooncake's also says which blocks of its prompt equal those of others. No trace holds text.

A row that cannot be right is an error that names the file and the line. So is one that asks for no
token: none of the files read so far (62,128 rows) holds a length of 0, and a request that generates
nothing has no time to its first token.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

from kvlab.research.arrivals import (
    MAX_LENGTH,
    Arrival,
    Workload,
    blocks_of,
    fitting,
    in_order,
)

MOONCAKE_BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""

_HEADERS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
    "sharegpt": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio",
}
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_TIMESTAMP_MS = 10**15
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

StrPath = str | os.PathLike[str]


def read_azure(
    path: StrPath, *, skip_bad_rows: bool = False, sha256: str | None = None
) -> Workload:
    """Reads a trace of the Azure LLM inference service.

    Source: Azure/AzurePublicDataset, published with Splitwise (ISCA'24, arXiv 2311.18677).

    Args:
      path: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens. A timestamp is a date
        and a time of day with up to 9 digits of a second; without an offset it is taken as UTC.
      skip_bad_rows: leave malformed rows out and count them. A row that is earlier than the good
        row before it counts as malformed.
      sha256: of the file's bytes, hexadecimal, as `file_sha256` gave it; None takes any.

    Returns:
      Times in seconds from the first request; no blocks.

    Raises:
      ValueError: the file cannot be read, has another sha256, is another kind of file or has no
        good row; or a row is malformed and `skip_bad_rows` is False.
    """
    return _read(path, "azure", _azure_row, skip_bad_rows, sha256)


def read_mooncake(
    path: StrPath, *, skip_bad_rows: bool = False, sha256: str | None = None
) -> Workload:
    """Reads a trace of Mooncake, the service behind Kimi.

    In the conversation trace every request has ceil(input_length / 512) ids, an id always follows
    the same id, and the id of a block that is filled in part is never that of a full one: equal ids
    are equal prefixes up to and with that block.

    Source: kvcache-ai/Mooncake, published with the paper (FAST'25, arXiv 2407.00079).

    Args:
      path: a JSON object a line, with timestamp (milliseconds), input_length, output_length and
        hash_ids.
      skip_bad_rows: as for `read_azure`.
      sha256: as for `read_azure`.

    Returns:
      Times in seconds from the first request, blocks of 512 tokens.

    Raises:
      ValueError: as `read_azure`.
    """
    return _read(path, "mooncake", _mooncake_row, skip_bad_rows, sha256)


def read_sharegpt(
    path: StrPath, *, skip_bad_rows: bool = False, sha256: str | None = None
) -> Workload:
    """Reads token counts of ShareGPT conversations, a row for each turn.

    The prompt of a turn holds the turns before it; see `first_turns`.

    Source: microsoft/sarathi-serve (OSDI'24, arXiv 2403.02310), counted by Llama 2's tokenizer,
    turns of up to 8,192 tokens.

    Args:
      path: CSV with the columns num_prefill_tokens, num_decode_tokens, num_total_tokens, pd_ratio.
        The third must be the sum of the first two; the last is not read.
      skip_bad_rows: as for `read_azure`.
      sha256: as for `read_azure`.

    Returns:
      Rows in the order of the file, all at 0 s, since the file has no times; no blocks.

    Raises:
      ValueError: as `read_azure`.
    """
    return _read(path, "sharegpt", _sharegpt_row, skip_bad_rows, sha256)


def first_turns(workload: Workload, max_length: int | None = None) -> Workload:
    """The first turn of every conversation of `read_sharegpt`, where it fits.

    A row goes on with the conversation of the row before if its prompt is longer than all that row
    holds, since it repeats it. A first turn that does not fit takes its conversation along.

    Args:
      workload: rows in the order of the file.
      max_length: most tokens of prompt and output together; None keeps every first turn.

    Returns:
      The turns, numbered anew; `too_long` grows by the first turns that do not fit.

    Raises:
      ValueError: no first turn fits.
    """
    rows = workload.arrivals
    first = [
        row
        for before, row in zip((None, *rows), rows, strict=False)
        if before is None or row.prompt_tokens <= before.total_tokens
    ]
    return fitting(dataclasses.replace(workload, arrivals=in_order(first)), max_length)


class _BadRowError(ValueError):
    """A row that cannot be right, in words that do not name the file."""


class _Row(NamedTuple):
    """What a line of a trace says."""

    time_ns: int
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def file_sha256(path: StrPath) -> str:
    """Names what a file holds, so that an experiment can be pinned to it.

    Raises:
      ValueError: it cannot be read.
    """
    return hashlib.sha256(_content(path)).hexdigest()


def _read(
    path: StrPath,
    kind: str,
    parse: Callable[[str], _Row],
    skip_bad_rows: bool,
    sha256: str | None,
) -> Workload:
    content = _content(path)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and sha256 != found:
        raise ValueError(
            f"trace {path} has changed: its sha256 was {sha256[:12]}..., and is {found[:12]}...; "
            "bring the old file back, or start a new run"
        )
    lines = _lines(path, kind, content)
    start = int(kind in _HEADERS)
    rows: list[_Row] = []
    skipped = 0
    for line_number, line in enumerate(lines[start:], start + 1):
        try:
            row = parse(_decoded(line))
            if rows and row.time_ns < rows[-1].time_ns:
                back_s = (rows[-1].time_ns - row.time_ns) / 1e9
                raise _BadRowError(f"the time runs back by {back_s:g} s, wanted rows in time order")
            rows.append(row)
        except _BadRowError as error:
            if not skip_bad_rows:
                raise ValueError(
                    f"{path}, line {line_number}: {error}; mend the row, or --skip_bad_rows leaves "
                    "such rows out and counts them"
                ) from None
            skipped += 1
    if not rows:
        raise ValueError(
            f"{path}, line {start + 1}: no good row of a request from here on "
            f"({skipped} malformed), wanted at least one; is it the file you meant?"
        )
    arrivals = tuple(
        Arrival(number, (row.time_ns - rows[0].time_ns) / 1e9, *row[1:])
        for number, row in enumerate(rows)
    )
    block_tokens = MOONCAKE_BLOCK_TOKENS if kind == "mooncake" else None
    return Workload(f"{kind}:{pathlib.Path(path).stem}", arrivals, block_tokens, skipped)


def _content(path: StrPath) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error.strerror}") from error


def _lines(path: StrPath, kind: str, content: bytes) -> list[bytes]:
    """The lines of a file of this kind; empty ones at its end are none."""
    lines = content.removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n")
    first = lines[0].decode(errors="replace").strip()
    wanted = _HEADERS.get(kind, "a JSON object a line")
    if not content.strip():
        raise ValueError(f"{path}, line 1: the file is empty, wanted {wanted}")
    other = next((name for name, header in _HEADERS.items() if header == first), None)
    if first.startswith("{"):
        other = "mooncake"
    if other not in (None, kind):
        raise ValueError(
            f"{path}, line 1: {_shown(first)} begins a file of kind {other}, wanted one of kind "
            f"{kind} ({wanted}); read it as {other}:{path}"
        )
    if kind in _HEADERS and first != wanted:
        raise ValueError(
            f"{path}, line 1: the header is {_shown(first)}, wanted {wanted!r} in UTF-8; "
            "put that line first, or name the columns so"
        )
    return lines


def _azure_row(line: str) -> _Row:
    moment, *lengths = _fields(line, "azure")
    prompt, output = map(_csv_length, ("ContextTokens", "GeneratedTokens"), lengths)
    return _Row(_nanoseconds(moment), prompt, output)


def _sharegpt_row(line: str) -> _Row:
    names = _HEADERS["sharegpt"].split(",")
    prompt, output, total = map(_csv_length, names[:3], _fields(line, "sharegpt"))
    if total != prompt + output:
        raise _BadRowError(
            f"num_total_tokens is {total}, wanted {prompt + output}, the sum of the lengths"
        )
    return _Row(0, prompt, output)


def _mooncake_row(line: str) -> _Row:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"{_shown(line)} is no JSON ({error})") from None
    if not isinstance(fields, dict) or not fields.keys() >= set(_MOONCAKE_KEYS):
        raise _BadRowError(
            f"{_shown(line)} came, wanted an object with {', '.join(_MOONCAKE_KEYS)}"
        )
    time_ms, prompt, output, ids = (fields[key] for key in _MOONCAKE_KEYS)
    if type(time_ms) not in (int, float) or not abs(time_ms) <= _MAX_TIMESTAMP_MS:
        raise _BadRowError(f"timestamp is {_shown(time_ms)}, wanted a number of milliseconds")
    prompt, output = _length("input_length", prompt), _length("output_length", output)
    if type(ids) is not list or not all(type(one) is int and one >= 0 for one in ids):
        raise _BadRowError(f"hash_ids is {_shown(ids)}, wanted a list of whole numbers from 0")
    wanted = blocks_of(prompt, MOONCAKE_BLOCK_TOKENS)
    if len(ids) != wanted:
        raise _BadRowError(
            f"hash_ids has {len(ids)} ids, wanted {wanted}: one for every "
            f"{MOONCAKE_BLOCK_TOKENS} tokens of {prompt}"
        )
    return _Row(round(time_ms * 10**6), prompt, output, tuple(ids))


def _decoded(line: bytes) -> str:
    try:
        return line.decode().strip()
    except UnicodeDecodeError as error:
        raise _BadRowError(f"byte {error.start} of the line is not UTF-8") from None


def _fields(line: str, kind: str) -> list[str]:
    wanted = _HEADERS[kind]
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != wanted.count(",") + 1:
        raise _BadRowError(f"{len(fields)} columns came ({_shown(line)}), wanted {wanted}")
    return fields


def _csv_length(name: str, text: str) -> int:
    return _length(name, int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text)


def _length(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_LENGTH:
        raise _BadRowError(
            f"{name} is {_shown(value)}, wanted a whole number of tokens from 1 to {MAX_LENGTH:,}"
        )
    return value


def _nanoseconds(moment: str) -> int:
    """Since 1970, to the last digit: float64 seconds since then would lose the seventh."""
    match = _MOMENT.fullmatch(moment)
    try:
        if match is None:
            raise ValueError
        whole = datetime.datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError:
        raise _BadRowError(
            f"TIMESTAMP is {_shown(moment)}, wanted a time like 2023-11-16 18:15:46.6805900"
        ) from None
    seconds = (whole - _EPOCH) // datetime.timedelta(seconds=1)
    return seconds * 10**9 + int((match[2] or "").ljust(9, "0"))


def _shown(value: object) -> str:
    """What came, short enough for a line of a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
