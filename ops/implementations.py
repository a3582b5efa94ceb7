"""Which implementation of attention serves: by name, or the best for the backend.

Axes: B rows, T query positions, N query heads, H head size.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab.ops import jax_kernels
from kvlab.ops.cpu_kernels import attention as cpu_kernel
from kvlab.ops.cpu_kernels import library

IMPLEMENTATIONS = ("reference", "chunked", "cpu", *jax_kernels.BACKENDS)

Pool = cpu_kernel.Pool | jax_kernels.Pages
"""Where stored keys and values lie, as the kernels of one kind read them."""


def check_implementation(name: str | None) -> None:
    """Raises ValueError, with the legal names, unless an implementation is called so."""
    if name is not None and name not in IMPLEMENTATIONS:
        legal = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation={name!r} is not known; legal values: {legal}")


def resolve_implementation(name: str | None) -> str:
    """What a name stands for; None is the kernel for the backend if there is one, else `chunked`.

    Asked when attention is traced: the first time, this may compile the kernel for CPU. Whether a
    kernel of JAX can serve is another question (`jax_kernel`).

    Raises:
      ValueError: an unknown name, or `cpu` on another backend.
      UnavailableError: `cpu`, and its kernel cannot be compiled.
    """
    check_implementation(name)
    backend = jax.default_backend()
    if name is None and backend == "cpu":
        return "cpu" if library.available() else "chunked"
    if name is None:
        return jax_kernels.BEST.get(backend, "chunked")
    if name == "cpu":
        if backend != "cpu":
            raise ValueError(
                f"implementation='cpu' needs the CPU backend, and this is {backend}; use 'chunked'"
            )
        library.load()
    return name


def check_backend(name: str | None) -> None:
    """Refuses what can serve nothing here, before anything is begun.

    Raises:
      ValueError: an unknown name, or a kernel of another backend.
      UnavailableError: as `resolve_implementation`.
    """
    resolved = resolve_implementation(name)
    reason = jax_kernels.backend_obstacle(resolved) if resolved in jax_kernels.BACKENDS else None
    if reason is not None:
        raise ValueError(f"implementation={name!r} cannot serve: {reason}; use 'chunked'")


def kernel_pool(
    implementation: str | None, pools: Sequence[Pool | None], dtype: jnp.dtype
) -> cpu_kernel.Pool | None:
    """The pool that the CPU kernel is to read, or None where another implementation serves.

    Raises:
      ValueError: `cpu` is named, and its kernel cannot read this.
      UnavailableError: as `resolve_implementation`.
    """
    if resolve_implementation(implementation) != "cpu":
        return None
    readable = [pool if isinstance(pool, cpu_kernel.Pool) else None for pool in pools]
    return cpu_kernel.served_pool(readable, dtype, must=implementation is not None)


def jax_kernel(
    implementation: str | None,
    window: int | None,
    soft_cap: float | None,
    query: jax.Array,
    pool: Pool | None,
) -> str | None:
    """The kernel of JAX that is to serve a step; None where XLA or the CPU kernel does.

    Paged kernels serve steps of one query a row (decode), and cuDNN those of more (prefill).

    Args:
      implementation: of the layer's attention, and so its `window` and `soft_cap`.
      window: see `AttentionOptions`.
      soft_cap: see `AttentionOptions`.
      query: [B, T, N, H] float.
      pool: where the keys lie, of all that the layer attends to; None where they are not used as
        they are stored.

    Raises:
      ValueError: one is named that cannot serve this layer; the message says why.
    """
    name = resolve_implementation(implementation)
    if name not in jax_kernels.BACKENDS:
        return None
    pages = pool if isinstance(pool, jax_kernels.Pages) else None
    reason = jax_kernels.obstacle(
        name,
        query.dtype,
        query.shape[3],
        window,
        soft_cap,
        pages.key.shape[2] if pages is not None and pages.key.dtype == jnp.bfloat16 else None,
    )
    if reason is not None:
        if implementation is not None:
            raise ValueError(f"implementation={name!r} cannot serve: {reason}; use 'chunked'")
        return None
    is_decode = query.shape[1] == 1
    return name if is_decode == (name in jax_kernels.PAGED) else None
