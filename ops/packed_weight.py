"""Weights laid out for the product x @ weight, whole or quantised.

A weight [D_in, D_out] is cut into P panels of L columns, each of which is read from its first byte
to its last. All sums run over D_in; there, `GROUP` values that follow each other share a scale.

Axes: P panels, L lanes (columns of a panel), J groups along D_in.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.cpu_kernels import huge_pages, library

QUANTISED = ("int8", "int4")
FORMATS = ("float32", "bfloat16", *QUANTISED)
GROUP = 32
_LANES = 16  # where no kernel asks for its own
_INT8_LARGEST = 127
_LARGEST_SCALE = float(np.finfo(np.float16).max)
_LEAST_SCALE = 2.0**-18  # in float16 a number as small is off by 1 % at most
_INT4_ZERO = 8  # stands for 0; values are -8 to 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight [D_in, D_out] in panels; columns past D_out and rows past D_in are zeros.

    Panels are float32 [P, D_in, L]; bfloat16 [P, ceil(D_in / 2), L, 2], two values along D_in side
    by side, as the dot instructions of processors want them; int8 [P, J * GROUP, L]; or uint8
    [P, J * GROUP / 2, L] of int4, the first of two values along D_in in the low half, 8 for 0.

    Attributes:
      panels: as above.
      scales: [P, J, L] float16, of quantised values; [0] for the others.
      shape: (D_in, D_out), static.
      format: one of `FORMATS`, static.
      implementation: of the product, static: `cpu` is kvlab's own kernel, `xla` is not.
    """

    __no_type_check__ = True  # as in PageTable

    panels: jax.Array
    scales: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    format: str = dataclasses.field(metadata={"static": True})
    implementation: str = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of panels and scales."""
        return self.panels.nbytes + self.scales.nbytes

    def columns(self, indices: jax.Array) -> jax.Array:
        """Columns [..., D_in] float32 of the weight; NaN for an index outside [0, D_out)."""
        lanes = self.panels.shape[2]
        places = indices // lanes, slice(None), indices % lanes
        scales = self.scales[places] if self.scales.size else None
        columns = self._unpacked(self.panels[places], scales)
        known = (indices >= 0) & (indices < self.shape[1])
        return jnp.where(known[..., None], columns, jnp.nan)

    def unpacked(self) -> jax.Array:
        """The numbers that the panels stand for, [P, L, D_in] float32."""
        scales = jnp.moveaxis(self.scales, 2, 1) if self.scales.size else None
        return self._unpacked(jnp.moveaxis(self.panels, 2, 1), scales)

    def _unpacked(self, panels: jax.Array, scales: jax.Array | None) -> jax.Array:
        """As stored, but with D_in last: [..., D_in] float32."""
        if self.format == "int4":
            panels = jnp.stack([panels & 15, panels >> 4], axis=-1).astype(jnp.int32) - _INT4_ZERO
        if self.format in ("int4", "bfloat16"):
            panels = panels.reshape(*panels.shape[:-2], -1)
        values = panels.astype(jnp.float32)
        if scales is not None:
            values *= jnp.repeat(scales.astype(jnp.float32), GROUP, axis=-1)
        return values[..., : self.shape[0]]


def pack(
    weight: jax.Array | np.ndarray, weight_format: str, implementation: str | None = None
) -> PackedWeight:
    """Packs a weight, on the host.

    int8 values are -127 to 127, int4 values -8 to 7; both are symmetric about 0 with one scale for
    32 values along D_in, as in the Q8_0 and Q4_0 of llama.cpp.

    Args:
      weight: [D_in, D_out] floating.
      weight_format: one of `FORMATS`.
      implementation: `cpu`, `xla`, or None for the best available.

    Raises:
      ValueError: an unknown format or implementation, no matrix, or a weight to be quantised that
        is not finite, or beyond what float16 scales can say.
      UnavailableError: `cpu` was named and the kernel cannot serve.
    """
    if weight_format not in FORMATS:
        legal = ", ".join(FORMATS)
        raise ValueError(f"weights={weight_format!r} are not known; legal values: {legal}")
    if implementation not in (None, "cpu", "xla"):
        raise ValueError(f"implementation={implementation!r} is not known; legal values: cpu, xla")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise ValueError(
            f"a weight {tuple(weight.shape)} given; want [D_in, D_out], 1 or more each"
        )
    if implementation is None:
        implementation = best_implementation()
    lanes = library.load().KvlabLanes() if implementation == "cpu" else _LANES
    length, count = weight.shape
    scales = np.zeros(0, np.float16)
    if weight_format in QUANTISED:
        values = _panels(np.asarray(weight, np.float32), lanes, GROUP)
        panels, scales = (_int8 if weight_format == "int8" else _int4)(values)
    elif weight_format == "bfloat16":
        values = _panels(np.asarray(weight, jnp.dtype(jnp.bfloat16)), lanes, 2)
        pairs = values.reshape(values.shape[0], -1, 2, lanes)
        panels = np.ascontiguousarray(pairs.transpose(0, 1, 3, 2))
    else:
        panels = _panels(np.asarray(weight, np.float32), lanes, 1)
    if implementation == "cpu":
        panels, scales = huge_pages.placed(panels), huge_pages.placed(scales)
    on_device, scales_on_device = jax.device_put((panels, scales))
    shape = (length, count)
    return PackedWeight(on_device, scales_on_device, shape, weight_format, implementation)


def packed_bytes(shape: tuple[int, int], weight_format: str) -> int:
    """Bytes of a packed weight [D_in, D_out], without the columns that fill its last panel.

    Args:
      shape: (D_in, D_out).
      weight_format: one of `FORMATS`; int8 takes 8.5 and int4 4.5 bits a value, scales included.
    """
    length, count = shape
    groups = -(-length // GROUP)
    scaled = {"int8": GROUP + 2, "int4": GROUP // 2 + 2}  # bytes of a group and its scale
    if weight_format in scaled:
        return count * groups * scaled[weight_format]
    return count * (4 * length if weight_format == "float32" else 4 * -(-length // 2))


def best_implementation() -> str:
    """`cpu` where the kernel serves the backend, otherwise `xla`."""
    return "cpu" if jax.default_backend() == "cpu" and library.available() else "xla"


def _panels(weight: np.ndarray, lanes: int, multiple: int) -> np.ndarray:
    """[D_in, D_out] to [P, D_in, L], with D_in padded to a multiple."""
    length, count = weight.shape
    num_panels = -(-count // lanes)
    panels = np.zeros((num_panels, -(-length // multiple) * multiple, lanes), weight.dtype)
    whole = count // lanes
    split = weight[:, : whole * lanes].reshape(length, whole, lanes)
    panels[:whole, :length] = split.transpose(1, 0, 2)
    if whole < num_panels:
        panels[whole, :length, : count - whole * lanes] = weight[:, whole * lanes :]
    return panels


def _int8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Panels [P, J * GROUP, L] float32 to int8 and scales."""
    grouped = _grouped(values)
    scales = _as_float16(np.abs(grouped).max(axis=2) / np.float32(_INT8_LARGEST))
    rounded = np.rint(grouped * _inverse(scales)[:, :, None])
    # A scale among the least of float16 may lie well below what its group asks for.
    rounded = rounded.clip(-_INT8_LARGEST, _INT8_LARGEST)
    return rounded.astype(np.int8).reshape(values.shape), scales


def _int4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Panels [P, J * GROUP, L] float32 to pairs of int4 and scales.

    The value furthest from 0 becomes -8; the scale is then the one of least squares.
    """
    grouped = _grouped(values)
    least, most = grouped.min(axis=2), grouped.max(axis=2)
    furthest = np.where(-least > most, least, most)
    first = np.clip(np.rint(grouped * _inverse(furthest / -8)[:, :, None]), -8, 7)
    squares = (first * first).sum(axis=2)
    fitted = (grouped * first).sum(axis=2) / np.where(squares == 0, 1, squares)
    pairs = (
        (first.astype(np.int8) + _INT4_ZERO)
        .astype(np.uint8)
        .reshape(values.shape[0], -1, 2, values.shape[2])
    )
    return pairs[:, :, 0] | pairs[:, :, 1] << 4, _as_float16(fitted)


def _grouped(values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise ValueError("a weight to be quantised holds NaN or infinity; use weights=float32")
    return values.reshape(values.shape[0], -1, GROUP, values.shape[2])


def _as_float16(scales: np.ndarray) -> np.ndarray:
    """Scales rounded to float16.

    Raises:
      ValueError: they are too large for it, or all so small that it keeps too few of their bits.
    """
    largest = float(np.abs(scales).max())
    if largest > _LARGEST_SCALE or 0 < largest < _LEAST_SCALE:
        raise ValueError(
            f"a weight to be quantised has scales of {largest:.3g} at most, beyond float16 "
            f"({_LEAST_SCALE:.3g} to {_LARGEST_SCALE:.0f}); use weights=float32 or bfloat16"
        )
    return scales.astype(np.float16)


def _inverse(scales: np.ndarray) -> np.ndarray:
    wide = scales.astype(np.float32)
    return np.where(wide == 0, 0, 1 / np.where(wide == 0, 1, wide)).astype(np.float32)
