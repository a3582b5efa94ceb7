"""The form in which a cache stores keys and values: which numbers, at how many bits, what scales.

Axes: H head size, g tokens or channels of a group, the rest is free. A stored array is a dict:
`codes`, the numbers kept, and for quantised forms `scale` (and `zero`), float32, with the axes of
`codes` and fewer entries where several codes share one. So all of them lie alike, and a cache
writes, reads, forks and copies them by one rule. Keys may carry notes beside: one number for each
token, such as the position it has in the text.

Two arrangements. Symmetric, per token and KV head: `value = code * scale`, where the largest
magnitude of the H values takes the largest code; a token's codes depend on that token alone. And
KIVI's (`Kivi4`): `value = code * scale + zero`, keys per channel in groups of g tokens, values per
token in groups of g channels.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvlab.ops.specs import Kivi4

Stored = dict[str, jax.Array]
Storage = str | Kivi4

_LARGEST_CODE = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0}
_INT4_ZERO = 8  # codes -7 to 7 are kept as 1 to 15, two of them in a uint8
_LARGEST_KIVI_CODE = 15

NOTES = {"position": "int32", "mass": "float32"}
"""What keys may carry of a token: its place in the text, the attention it has received."""


def encode(values: Float[Array, "*batch H"], storage: Storage) -> Stored:
    """What is stored of keys or values.

    Args:
      values: `[..., H] float`.
      storage: one of `kvlab.ops.specs.STORAGES`, but not `kivi4`, which takes whole groups
        (`encode_group`).

    Returns:
      `codes`: `[..., H]` in the storage's dtype, for int4 `[..., H / 2] uint8` (value i in the low
      half of byte i, value i + H / 2 in its high half); and `scale`: `[..., 1] float32` where the
      storage is quantised. A head that is all zeros has scale 0; one with a NaN or an infinity
      reads back as no finite number.
    """
    assert not isinstance(storage, Kivi4)
    if storage not in _LARGEST_CODE:
        return {"codes": values.astype(storage)}
    values = values.astype(jnp.float32)
    largest = _LARGEST_CODE[storage]
    # A product, because compilers turn a quotient by a constant into one, and not always alike.
    scale = jnp.max(jnp.abs(values), axis=-1, keepdims=True) * (1 / largest)
    # Clipped: above 464 a cast to float8_e4m3fn is NaN, and a quotient may round past the largest.
    scaled = jnp.clip(jnp.where(scale > 0, values / scale, 0.0), -largest, largest)
    if storage == "float8_e4m3fn":
        return {"codes": scaled.astype(storage), "scale": scale}
    scaled = jnp.round(scaled)
    if storage == "int8":
        return {"codes": scaled.astype(jnp.int8), "scale": scale}
    return {"codes": _packed((scaled + _INT4_ZERO).astype(jnp.uint8)), "scale": scale}


def encode_group(
    keys: Float[Array, "*batch g K H"], values: Float[Array, "*batch g K H"], storage: Kivi4
) -> tuple[Stored, Stored]:
    """What KIVI stores of a whole group of tokens.

    Source: KIVI (arXiv 2402.02750), section 3.2.

    Args:
      keys: `[..., g, K, H] float`, g = `storage.group` tokens.
      values: as `keys`.
      storage: the sizes.

    Returns:
      Of the keys, `codes [..., g, K, H / 2] uint8` with `scale` and `zero` of the group, given to
      each of its tokens, `[..., g, K, H]`. Of the values, `codes` alike, and `scale` and `zero`
      `[..., g, K, H / channels]`.
    """
    codes, scale, zero = _asymmetric(keys, -3)
    scale, zero = (jnp.broadcast_to(array, keys.shape) for array in (scale, zero))
    channels = _channel_group(keys.shape[-1], storage)
    grouped = values.reshape(*values.shape[:-1], -1, channels)
    value_codes, value_scale, value_zero = _asymmetric(grouped, -1)
    return (
        {"codes": _packed(codes), "scale": scale, "zero": zero},
        {
            "codes": _packed(value_codes.reshape(values.shape)),
            "scale": value_scale[..., 0],
            "zero": value_zero[..., 0],
        },
    )


def _asymmetric(values: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """4-bit codes uint8 of values that share a scale and a zero point along an axis."""
    values = values.astype(jnp.float32)
    zero = jnp.min(values, axis=axis, keepdims=True)
    spread = jnp.max(values, axis=axis, keepdims=True) - zero
    scale = spread * (1 / _LARGEST_KIVI_CODE)
    codes = jnp.where(scale > 0, (values - zero) / scale, 0.0)
    codes = jnp.clip(jnp.round(codes), 0, _LARGEST_KIVI_CODE)
    return codes.astype(jnp.uint8), scale, zero


def _channel_group(head_dim: int, storage: Kivi4) -> int:
    """Channels that share a scale: the group, or all where a head is smaller."""
    return min(storage.group, head_dim)


def values_in_a_byte(storage: Storage) -> int:
    """Codes that one entry of `codes` holds along H."""
    return 2 if storage == "int4" or isinstance(storage, Kivi4) else 1


def _packed(codes: jax.Array) -> jax.Array:
    """Two 4-bit codes a byte: value i of H in its low half, value i + H / 2 in its high half."""
    low, high = jnp.split(codes, 2, axis=-1)
    return low | (high << 4)


def decode(stored: Stored, storage: Storage, axis: int) -> Float[Array, "..."]:
    """The values that stored ones stand for.

    Args:
      stored: as it was encoded, its axes in any order; notes are passed over.
      storage: the one it was encoded in.
      axis: where H lies.

    Returns:
      float32, or the stored dtype where the storage is not quantised.
    """
    codes = stored["codes"]
    if isinstance(storage, Kivi4):
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=axis).astype(jnp.float32)
        return codes * _spread(stored["scale"], codes) + _spread(stored["zero"], codes)
    if storage not in _LARGEST_CODE:
        return codes
    if storage == "int4":
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=axis).astype(jnp.int8) - _INT4_ZERO
    return codes.astype(jnp.float32) * stored["scale"]


def _spread(shared: jax.Array, codes: jax.Array) -> jax.Array:
    """Gives every code the entry that it shares with its neighbours along one axis."""
    for axis, (entries, size) in enumerate(zip(shared.shape, codes.shape, strict=True)):
        if entries != size:
            shared = jnp.repeat(shared, size // entries, axis=axis)
    return shared


def empty_keys(shape: tuple[int, ...], storage: Storage, notes: Sequence[str] = ()) -> Stored:
    """Zeros for keys of a shape `[n, K, H, slots]`, and for notes on their tokens.

    Raises:
      ValueError: 4 bits with an odd H.
    """
    stored = _empty(shape, 2, storage)
    if isinstance(storage, Kivi4):
        groups = (*shape[:3], shape[3] // storage.group)
        stored |= {name: jnp.zeros(groups, jnp.float32) for name in ("scale", "zero")}
    return stored | {name: jnp.zeros((shape[0], 1, 1, shape[3]), NOTES[name]) for name in notes}


def empty_values(shape: tuple[int, ...], storage: Storage) -> Stored:
    """Zeros for values of a shape `[n, K, slots, H]`.

    Raises:
      ValueError: 4 bits with an odd H; KIVI's groups of channels do not divide H.
    """
    stored = _empty(shape, 3, storage)
    if isinstance(storage, Kivi4):
        channels = _channel_group(shape[3], storage)
        if shape[3] % channels:
            raise ValueError(
                f"storage={storage} keeps values in groups of {channels} channels, which do not "
                f"divide head_dim={shape[3]}; use a group that does, or storage=int4"
            )
        groups = (*shape[:3], shape[3] // channels)
        stored |= {name: jnp.zeros(groups, jnp.float32) for name in ("scale", "zero")}
    return stored


def _empty(shape: tuple[int, ...], axis: int, storage: Storage) -> Stored:
    """Codes, and the scale of symmetric forms, for values of a shape that has H at `axis`."""
    head_dim = shape[axis]
    packed = values_in_a_byte(storage) == 2
    if packed and head_dim % 2:
        raise ValueError(
            f"storage={storage} keeps two values in a byte, and head_dim={head_dim} is odd; use "
            "storage=int8"
        )

    def zeros(width: int, dtype: str) -> jax.Array:
        return jnp.zeros((*shape[:axis], width, *shape[axis + 1 :]), dtype)

    codes = zeros(head_dim // 2, "uint8") if packed else zeros(head_dim, str(storage))
    if storage in _LARGEST_CODE:
        return {"codes": codes, "scale": zeros(1, "float32")}
    return {"codes": codes}
