"""Predicted against measured times of a layer's linear operators, with one efficiency a device.

The measurements are those of Vidur (arXiv 2405.05465, microsoft/vidur `data/profiling`): medians of
kernel times on one GPU in float16 by number of tokens, for the whole layer and for one worker's
share of it under tensor parallelism. The question: how well does the larger of operations over peak
and bytes over bandwidth, scaled by a single number, tell the time of the products, and where not?
"""

import bisect
import csv
import dataclasses
import io
import math
import os
import statistics
from collections.abc import Iterable, Sequence

from kvlab.models.config import DecoderConfig
from kvlab.research.devices import Device
from kvlab.research.operators import LayerWork, Operator, step_operators, total

KERNELS = {
    "attn_pre_proj": ("query", "key", "value"),
    "attn_post_proj": ("output",),
    "mlp_up_proj": ("gate", "up"),
    "mlp_down_proj": ("down",),
}
"""Measured kernels, and the operators that each computes."""

TOKEN_RANGES = (8, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 32_768)
"""Last token counts of the ranges of a table."""

StrPath = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class MeasuredLayer:
    """Time of the linear operators of one layer.

    Attributes:
      config: of the worker's share of the model.
      tokens: of the call.
      workers: that share the layer; 1 is the whole one.
      seconds: of each of `KERNELS`.
    """

    config: DecoderConfig
    tokens: int
    workers: int
    seconds: tuple[float, ...]

    @property
    def layer_s(self) -> float:
        """Of all kernels."""
        return sum(self.seconds)


@dataclasses.dataclass(frozen=True)
class ErrorRow:
    """Relative errors of predictions, (predicted - measured) / measured, in a range of tokens.

    Attributes:
      first, last: token counts of the range.
      count: measurements in it.
      bias: median error; below 0 the prediction is too fast.
      median, p90, largest: of the errors' magnitudes.
    """

    first: int
    last: int
    count: int
    bias: float
    median: float
    p90: float
    largest: float


def worker_share(config: DecoderConfig, workers: int) -> DecoderConfig:
    """What one of several workers has under tensor parallelism: heads and MLP width divided.

    Source: Megatron-LM (arXiv 1909.08053), section 3.

    Args:
      config: the whole model, with equally many KV heads in all layers.
      workers: how many share it.

    Raises:
      ValueError: heads or the MLP's width do not divide.
    """
    num_heads, num_kv_heads, width = config.num_heads, config.kv_heads[0], config.hidden_dim
    if any(size % workers for size in (num_heads, num_kv_heads, width)):
        raise ValueError(
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}, hidden_dim={width} do not all "
            f"divide among {workers} workers"
        )
    return dataclasses.replace(
        config,
        num_heads=num_heads // workers,
        num_kv_heads=num_kv_heads // workers,
        hidden_dim=width // workers,
    )


def read_linear_times(
    path: StrPath, config: DecoderConfig, workers: Sequence[int] = (1,)
) -> list[MeasuredLayer]:
    """Reads a file of Vidur's measurements.

    Args:
      path: `mlp.csv` with `num_tokens`, `num_tensor_parallel_workers` and a column
        `time_stats.<kernel>.median` in milliseconds for each of `KERNELS`.
      config: the model that was measured; its dtypes are those of the measurement.
      workers: tensor-parallel sizes to keep.

    Raises:
      ValueError: a column or number is missing, or the file's sizes are not the config's.
    """
    columns = [f"time_stats.{kernel}.median" for kernel in KERNELS]
    sizes = {"n_embd": config.embed_dim, "n_head": config.num_heads}
    sizes |= {"n_kv_head": config.kv_heads[0], "n_expanded_embd": config.hidden_dim}
    wanted = [*columns, *sizes, "num_tokens", "num_tensor_parallel_workers"]
    shares = {count: worker_share(config, count) for count in workers}
    measured = []
    rows = csv.DictReader(io.StringIO(_text(path), newline=""))
    missing = [name for name in wanted if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"{os.fspath(path)} lacks the columns {', '.join(missing)}")
    for row in rows:
        try:
            numbers = {name: float(row[name]) for name in wanted}
        except (TypeError, ValueError):
            raise ValueError(f"{os.fspath(path)}, line {rows.line_num}: no number") from None
        other = [name for name, size in sizes.items() if numbers[name] != size]
        if other:
            raise ValueError(
                f"{os.fspath(path)}, line {rows.line_num}: {other[0]}={row[other[0]]}, and the "
                f"config has {sizes[other[0]]}; give the config of the model that was measured"
            )
        count = int(numbers["num_tensor_parallel_workers"])
        if count in shares:
            seconds = tuple(numbers[name] / 1e3 for name in columns)
            tokens = int(numbers["num_tokens"])
            measured.append(MeasuredLayer(shares[count], tokens, count, seconds))
    return measured


def _text(path: str | os.PathLike[str]) -> str:
    """A file's text; raises ValueError, with its name, where there is none."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is no text; a table of numbers is wanted") from error
    if not text:
        raise ValueError(f"{os.fspath(path)} is empty; a table of numbers is wanted")
    return text


def kernel_seconds(
    config: DecoderConfig, tokens: int, device: Device, tile: int = 1
) -> tuple[float, ...]:
    """Predicted seconds of each of `KERNELS` in one layer.

    Args:
      config: the model, or a worker's share of it.
      tokens: of the call.
      device: where; `Device.scaled` gives it an efficiency.
      tile: operations are those of tokens rounded up to a multiple of it: kernels compute whole
        tiles, and 128 is the usual one on GPUs. 1 is the exact count.
    """
    exact, padded = (_kernels(config, count) for count in (tokens, -(-tokens // tile) * tile))
    return tuple(
        device.seconds(rounded.flops, one.moved_bytes, config.dtype)
        for one, rounded in zip(exact, padded, strict=True)
    )


def _kernels(config: DecoderConfig, tokens: int) -> list[Operator]:
    work = LayerWork(config.kv_heads[0], tokens, 0)
    layer = {one.name: one for one in step_operators(config, [work], 0)}
    return [total([layer[name] for name in names]) for names in KERNELS.values()]


def fit_efficiency(device: Device, measured: Iterable[MeasuredLayer], tile: int = 1) -> float:
    """The share of the data sheet that makes the median error 0.

    One number for arithmetic and memory alike. The median ratio of ideal to measured time minimises
    the sum of the errors' absolute logarithms.

    Args:
      device: as its data sheet has it.
      measured: layers.
      tile: see `kernel_seconds`.
    """
    ratios = [
        sum(kernel_seconds(one.config, one.tokens, device, tile)) / one.layer_s for one in measured
    ]
    return math.exp(statistics.median(math.log(ratio) for ratio in ratios))


def error_rows(
    device: Device,
    measured: Iterable[MeasuredLayer],
    tile: int = 1,
    ranges: Sequence[int] = TOKEN_RANGES,
) -> list[ErrorRow]:
    """Errors of the predicted time of a layer's linear operators by number of tokens.

    Args:
      device: with its efficiency.
      measured: layers.
      tile: see `kernel_seconds`.
      ranges: last token count of each range.

    Returns:
      The ranges that hold measurements, and one row over all of them at the end.
    """
    errors: dict[int, list[float]] = {}
    ends = (*ranges, 2**63)
    everything, counts = [], []
    for one in measured:
        predicted = sum(kernel_seconds(one.config, one.tokens, device, tile))
        everything.append(predicted / one.layer_s - 1)
        counts.append(one.tokens)
        errors.setdefault(bisect.bisect_left(ends, one.tokens), []).append(everything[-1])
    starts = (1, *(end + 1 for end in ranges))
    rows = [_row(starts[i], min(ends[i], max(counts)), errors[i]) for i in sorted(errors)]
    return [*rows, _row(min(counts), max(counts), everything)] if everything else []


def linear_time_study(
    device: Device, files: Iterable[tuple[StrPath, DecoderConfig]], tile: int = 1
) -> tuple[float, list[ErrorRow]]:
    """Fits one efficiency to whole layers of several models and says how far it carries.

    With Vidur's files of Llama-2-7B and Llama-3-8B (whole layers, float16): A100-80GB 0.695, median
    error 4.2 %, p90 12.2 %; H100-80GB (Llama-2-7B alone) 0.685, 7.8 % and 25.8 %. Where it fails:

    - Around a layer's ridge point and beyond (163 tokens on the A100, 334 on the H100; errors from
      65 to 1,024 and from 193 to 1,024): predictions are too fast, by 42 % at worst. Kernels
      compute whole tiles of tokens, 136 as 256 (`tile=128`: p90 7.6 % and 16 %), and reads and sums
      of similar length overlap in part only.
    - 1 to 64 tokens: 5 to 16 % too slow, because reads reach a larger share of their limit than
      sums do.
    - Shares of a layer on 8 workers, kernels of 10 to 30 us where launching counts: with the same
      efficiency p90 is 35 % (A100) and 48 % (H100).

    Args:
      device: as its data sheet has it.
      files: `mlp.csv` of each model, and the model's config.
      tile: see `kernel_seconds`.

    Returns:
      The efficiency, and errors by number of tokens (`error_rows`).
    """
    measured = [one for path, config in files for one in read_linear_times(path, config)]
    efficiency = fit_efficiency(device, measured, tile)
    return efficiency, error_rows(device.scaled(efficiency), measured, tile)


def _row(first: int, last: int, errors: Sequence[float]) -> ErrorRow:
    sizes = sorted(map(abs, errors))
    p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
    bias = statistics.median(errors)
    return ErrorRow(first, last, len(errors), bias, statistics.median(sizes), p90, sizes[-1])
