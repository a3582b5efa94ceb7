"""Activations that are computed again for the derivative instead of being kept.

Source: "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), section 3.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

Layer = Callable[..., tuple[jax.Array, Any]]


def rematerialised(function: Layer) -> Layer:
    """The same function, of which only what goes in is kept for the derivative.

    `jax.checkpoint` has an optimization barrier before the second computation. XLA's CPU compiler
    drops it, computes early or only once, and holds every layer's activations all the same. Here 0
    times the cotangent is added to x, so the second computation waits for it on every backend.

    Args:
      function: of something static, parameters, x and more, which has no derivative; it gives an
        array like x and something that has no derivative either.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(static: Any, params: Any, x: jax.Array, *more: Any) -> tuple[jax.Array, Any]:
        return function(static, params, x, *more)

    def forward(static: Any, params: Any, x: jax.Array, *more: Any) -> tuple[Any, Any]:
        return function(static, params, x, *more), (params, x, more)

    def backward(static: Any, kept: Any, cotangents: Any) -> tuple[Any, ...]:
        (params, x, more), cotangent = kept, cotangents[0]

        def output(params: Any, x: jax.Array) -> jax.Array:
            return function(static, params, x, *more)[0]

        _, derivative = jax.vjp(output, params, x + 0 * cotangent)
        return (*derivative(cotangent), *(None for _ in more))

    apply.defvjp(forward, backward)
    again: Any = apply
    return again
