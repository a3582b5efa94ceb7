"""The form in which a cache stores keys and values: which numbers, at how many bits, what scales.

Axes: H head size, the rest is free. A stored array is a dict: `codes`, the numbers kept, and for
quantised forms `scale`, one float32 for each token and head, with an axis of length 1 where `codes`
has H. So the two lie alike, and a cache writes, reads, forks and copies both by one rule.

Quantisation is symmetric, per token and KV head: `value = code * scale`, where the largest
magnitude of the H values takes the largest code. A token's codes depend on that token alone, so no
query sees a scale that a later token made.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Stored = dict[str, jax.Array]

_LARGEST_CODE = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0}
_INT4_ZERO = 8  # codes -7 to 7 are kept as 1 to 15, two of them in a uint8


def encode(values: Float[Array, "*batch H"], storage: str) -> Stored:
    """What is stored of keys or values.

    Args:
      values: `[..., H] float`.
      storage: one of `kvlab.ops.specs.STORAGES`.

    Returns:
      `codes`: `[..., H]` in the storage's dtype, for int4 `[..., H / 2] uint8` (value i in the low
      half of byte i, value i + H / 2 in its high half); and `scale`: `[..., 1] float32` where the
      storage is quantised. A head that is all zeros has scale 0; one with a NaN or an infinity
      reads back as no finite number.
    """
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
    low, high = jnp.split((scaled + _INT4_ZERO).astype(jnp.uint8), 2, axis=-1)
    return {"codes": low | (high << 4), "scale": scale}


def decode(stored: Stored, storage: str, axis: int) -> Float[Array, "..."]:
    """The values that stored ones stand for.

    Args:
      stored: as `encode` gave it, its axes in any order.
      storage: the one it was encoded in.
      axis: where H lies.

    Returns:
      float32, or the stored dtype where the storage is not quantised.
    """
    codes = stored["codes"]
    if storage not in _LARGEST_CODE:
        return codes
    if storage == "int4":
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=axis).astype(jnp.int8) - _INT4_ZERO
    return codes.astype(jnp.float32) * stored["scale"]


def empty(shape: tuple[int, ...], axis: int, storage: str) -> Stored:
    """Zeros for values of a shape that has H at `axis` (counted from the front).

    Raises:
      ValueError: int4 with an odd H.
    """
    head_dim = shape[axis]
    if storage == "int4" and head_dim % 2:
        raise ValueError(
            f"storage=int4 keeps two values in a byte, and head_dim={head_dim} is odd; use "
            "storage=int8"
        )

    def zeros(width: int, dtype: str) -> jax.Array:
        return jnp.zeros((*shape[:axis], width, *shape[axis + 1 :]), dtype)

    if storage not in _LARGEST_CODE:
        return {"codes": zeros(head_dim, storage)}
    packed = storage == "int4"
    codes = zeros(head_dim // 2, "uint8") if packed else zeros(head_dim, storage)
    return {"codes": codes, "scale": zeros(1, "float32")}
