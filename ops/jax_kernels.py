"""The attention kernels that JAX ships: what each of them serves, and how it is called.

Axes: B rows of a step, T query positions, S key positions, N query heads, K KV heads, H head size,
P pages, p slots of a page, n pages of a row.

`tpu` and `triton` are JAX's Pallas kernels of paged attention, for TPUs and (deprecated) for GPUs.
They serve decode, straight from pages that lie [K, P, p, H] (`kvlab.ops.caches.head_major`).
`cudnn` is the fused attention of cuDNN; it serves prefill, over a copy of the rows' own keys and
values. XLA serves the other phase of each. All are for bfloat16: cuDNN takes nothing wider, and the
kernel for TPUs rounds what it reads to that. Modules of kernels are imported when one is asked for,
so that a jax without one of them is a reason and not a failed import.
"""

import contextlib
import contextvars
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PAGED = {
    "tpu": "jax.experimental.pallas.ops.tpu.paged_attention",
    "triton": "jax.experimental.pallas.ops.gpu.paged_attention",
}
"""Kernels that read pages, and the module of each."""

BACKENDS = {"tpu": "tpu", "triton": "gpu", "cudnn": "gpu"}
"""All kernels, and the backend that each runs on."""

BEST = {"tpu": "tpu", "gpu": "cudnn"}
"""Of each backend the kernel that is taken without being named, where it can serve."""

# Of heads and of pages, in words. A pool of other pages XLA for TPUs keeps in another order, and
# copies it whole to have it read; blocks of Triton are powers of two.
_SIZES = {
    "tpu": ("a multiple of 128", "a multiple of 8"),
    "triton": ("a power of two, 16 or more", "a power of two"),
}
_TPU_BLOCK = 512  # tokens that are fetched and multiplied at once
_TRITON_BLOCK = 128
_TRITON_SPLITS = 16  # parts of a row that are read side by side

_interpreted = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Runs Pallas kernels on any backend, step by step and slowly: for tests of their numbers."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


@dataclasses.dataclass(frozen=True)
class Pages:
    """Where the keys and values of a step's rows lie, as paged kernels read them.

    Attributes:
      key: [K, P, p, H] float.
      value: [K, P, p, H] float.
      page_indices: [B, n] int32, pages of each row in order; one that is out of range holds no key.
      lengths: [B] int32, slots from there on hold no key.
    """

    key: jax.Array
    value: jax.Array
    page_indices: jax.Array
    lengths: jax.Array


def backend_obstacle(kernel: str) -> str | None:
    """Why a kernel, one of `BACKENDS`, cannot serve anything here; None where it may."""
    backend = jax.default_backend()
    if backend == BACKENDS[kernel] or (_interpreted.get() and kernel in PAGED):
        return None
    return f"it needs the {BACKENDS[kernel].upper()} backend, and this is {backend}"


def obstacle(
    kernel: str,
    dtype: jnp.dtype,
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    page_size: int | None,
) -> str | None:
    """Why a kernel cannot serve a layer; None where it can.

    Args:
      kernel: one of `BACKENDS`.
      dtype: of the queries.
      head_dim: H.
      window: of the layer's attention.
      soft_cap: of the layer's attention.
      page_size: p of bfloat16 pages [K, P, p, H]; None where keys do not lie so.
    """
    if (reason := backend_obstacle(kernel)) is not None:
        return reason
    if dtype != jnp.bfloat16:
        return f"it computes in bfloat16, and the queries are {dtype.name}"
    if kernel == "cudnn":
        return _cudnn_obstacle(head_dim, soft_cap)
    return _paged_obstacle(kernel, head_dim, window, page_size)


def _paged_obstacle(
    kernel: str, head_dim: int, window: int | None, page_size: int | None
) -> str | None:
    """Why a paged kernel cannot serve a layer in bfloat16."""
    if window is not None:
        return f"it has no sliding window, and the layer has window={window}"
    heads, pages = _SIZES[kernel]
    fits = head_dim % 128 == 0 if kernel == "tpu" else head_dim >= 16 and _is_power(head_dim)
    if not fits:
        return f"it takes heads of {heads}, and head_dim={head_dim}"
    if page_size is None:
        return (
            "it reads pages that lie [K, P, p, H], which a cache made for it has with "
            f"placement=paged, storage=bfloat16, retention=all and a page_size of {pages}"
        )
    if page_size % 8 if kernel == "tpu" else not _is_power(page_size):
        return f"it takes pages of {pages}, and page_size={page_size}"
    return _missing(kernel)


def _is_power(size: int) -> bool:
    """Whether a size is a power of two."""
    return size & (size - 1) == 0


def _cudnn_obstacle(head_dim: int, soft_cap: float | None) -> str | None:
    """Why cuDNN cannot serve; as `jax.nn.dot_product_attention` would refuse."""
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return "it needs CUDA"
    most = 256 if float(device.compute_capability) >= 9.0 else 128
    if head_dim % 8 or head_dim > most:
        return f"it takes heads of a multiple of 8 up to {most} here, and head_dim={head_dim}"
    if soft_cap is not None:
        return f"it has no soft cap, and the layer has soft_cap={soft_cap}"
    return None


def _missing(kernel: str) -> str | None:
    """Why a paged kernel is not there at all."""
    try:
        importlib.import_module(PAGED[kernel])
    except ImportError as error:
        return f"jax {jax.__version__} has no {PAGED[kernel]} ({error})"
    return None


def decode(
    kernel: str,
    query: Float[Array, "B 1 N H"],
    positions: Int[Array, "B 1"],
    valid: Bool[Array, "B 1"],
    pages: Pages,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B 1 N H"]:
    """One query a row over the row's pages, by a paged kernel.

    Args:
      kernel: one of `PAGED`.
      query: [B, 1, N, H] float.
      positions: [B, 1] int32, a query sees the slots up to its position.
      valid: [B, 1] bool; the output is 0 where False.
      pages: what is stored, slots in the order of the text.
      scale: factor on the scores.
      soft_cap: of the scores; None is off.

    Returns:
      [B, 1, N, H] in the query's dtype.
    """
    seen = jnp.minimum(positions[:, 0] + 1, pages.lengths)
    lengths = jnp.where(valid[:, 0], seen, 0)
    call = _tpu if kernel == "tpu" else _triton
    with _rules_of_jax():
        output = call(query[:, 0].astype(jnp.float32) * scale, pages, lengths, soft_cap)
    output = jnp.where((lengths > 0)[:, None, None], output, 0.0)
    return output[:, None].astype(query.dtype)


@contextlib.contextmanager
def _rules_of_jax() -> Iterator[None]:
    """JAX's kernels are not written under strict promotion, nor for another precision (Mosaic)."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision("default"),
    ):
        yield


def _tpu(query: jax.Array, pages: Pages, lengths: jax.Array, soft_cap: float | None) -> jax.Array:
    """JAX's Pallas kernel for TPUs; scaled queries [B, N, H] float32 to the output, float32."""
    page_size, most = pages.key.shape[2], pages.page_indices.shape[1]
    block = min(max(_TPU_BLOCK // page_size, 1), most)
    run: Any = importlib.import_module(PAGED["tpu"]).paged_attention
    with _interpreting_tpu():
        return run(
            query,
            pages.key,
            pages.value,
            lengths,
            _whole_blocks(pages, block),
            pages_per_compute_block=block,
            attn_logits_soft_cap=soft_cap,
        )


def _interpreting_tpu() -> contextlib.AbstractContextManager[Any]:
    if not _interpreted.get():
        return contextlib.nullcontext()
    pallas: Any = importlib.import_module("jax.experimental.pallas.tpu")
    return pallas.force_tpu_interpret_mode()


def _triton(
    query: jax.Array, pages: Pages, lengths: jax.Array, soft_cap: float | None
) -> jax.Array:
    """JAX's Triton kernel for GPUs; as `_tpu`, the query rounded to the dtype of the pages."""
    page_size, most = pages.key.shape[2], pages.page_indices.shape[1]
    block = max(_TRITON_BLOCK // page_size, 1)
    splits = min(_TRITON_SPLITS, -(-most // block))
    run: Any = importlib.import_module(PAGED["triton"]).paged_attention
    return run(
        query.astype(pages.key.dtype),
        pages.key,
        pages.value,
        _whole_blocks(pages, splits * block),
        lengths,
        pages_per_compute_block=block,
        k_splits=splits,
        attn_logits_soft_cap=soft_cap,
        interpret=_interpreted.get(),
    )


def _whole_blocks(pages: Pages, block: int) -> jax.Array:
    """Pages of each row up to a whole number of blocks, all in range.

    Where no page is mapped the row's first one stands. Kernels fetch it, multiply what it holds by
    a weight of 0, and would carry a NaN of another sequence over.
    """
    num_pages, mapped = pages.key.shape[1], pages.page_indices
    missing = -mapped.shape[1] % block
    padded = jnp.pad(mapped, ((0, 0), (0, missing)), constant_values=num_pages)
    in_range = (padded >= 0) & (padded < num_pages)
    return jnp.where(in_range, padded, jnp.clip(mapped[:, :1], 0, num_pages - 1))


def prefill(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    scale: float,
    implementation: str = "cudnn",
) -> Float[Array, "B T N H"]:
    """Dense attention under any mask, by `jax.nn.dot_product_attention`.

    Args:
      query: [B, T, N, H] bfloat16.
      key: [B, S, K, H] float, finite; used in the query's dtype.
      value: [B, S, K, H] float, finite.
      mask: [B, T, S] bool; a query that sees no key gives 0.
      scale: factor on the scores.
      implementation: JAX's name for what computes it; `xla` wherever there is no cuDNN.
    """
    attend: Any = jax.nn.dot_product_attention
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    fields = {"mask": mask[:, None], "scale": scale, "implementation": implementation}
    with _rules_of_jax():
        output = attend(query, key, value, **fields)
    return jnp.where(mask.any(axis=-1)[:, :, None, None], output, jnp.zeros((), output.dtype))
