"""What fixes the shapes of a session: model, cache specs and sizes.

Axes: B sequences (slots), R rows of a prefill call, V vocabulary, n tokens of a decode call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvlab.models.config import DecoderConfig
from kvlab.models.packing import check_format, pack_params
from kvlab.ops.implementations import check_implementation
from kvlab.ops.rope import DynamicNTK
from kvlab.ops.specs import CacheSpec, Paged, Recompute, Ring, assign_tables
from kvlab.research.cache import Cache, init_cache


@dataclasses.dataclass(frozen=True)
class InferenceConfig:
    """Everything that fixes the shapes, and so the bits, of a session. Static under jit.

    Args:
      model: the decoder.
      specs: the cache of each layer; one `CacheSpec` stands for all layers.
      slots: sequences the cache holds (B).
      max_length: most tokens of one sequence, prompt and continuation; past the model's context
        only where every layer keeps sinks with positions of the cache.
      rows: rows of one prefill call (R), of `chunk` tokens each; a long prompt takes several.
      chunk: tokens a row of one prefill call. `recompute` needs chunk = max_length, its steps
        being whole texts.
      num_pages: pages of each paged pool; None lets every slot reach `max_length`.
      decode_steps: most tokens a sequence gets from one decode call (n).
      implementation: of attention; None is the best available.
      weights: format of the weights; None is as loaded (`kvlab.models.packing`).

    Raises:
      ValueError: a size below 1, a `max_length` or a page past the model's context, another number
        of specs than layers, an impossible combination of specs, an unknown format of weights.
    """

    model: DecoderConfig
    specs: CacheSpec | tuple[CacheSpec, ...]
    slots: int
    max_length: int
    rows: int = 1
    chunk: int = 128
    num_pages: int | None = None
    decode_steps: int = 64
    implementation: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        """Validates, and spells the specs out per layer with their tables."""
        for field in ("slots", "max_length", "rows", "chunk", "decode_steps"):
            _require_whole(field, getattr(self, field))
        if self.num_pages is not None:
            _require_whole("num_pages", self.num_pages)
        given = self.specs
        specs = (given,) * self.model.num_layers if isinstance(given, CacheSpec) else given
        if self.max_length > self.model.max_length and not all(map(_streams, specs)):
            raise ValueError(
                f"max_length={self.max_length} is past the model's context of "
                f"{self.model.max_length} tokens; use {self.model.max_length} or less, or "
                "retention=sinks with positions=cache and when=decode or both on every layer"
            )
        if len(specs) != self.model.num_layers:
            raise ValueError(
                f"{len(specs)} cache specs for {self.model.num_layers} layers; give one spec, or "
                "one per layer"
            )
        follows_prompt = isinstance(getattr(self.model.rope, "scaling", None), DynamicNTK)
        if any(map(_turns_by_place, specs)) and (self.model.rope is None or follows_prompt):
            kind = "dynamic NTK" if follows_prompt else "learned positions"
            raise ValueError(
                f"positions=cache turns keys by their place in the cache, and this model has {kind}"
                "; use positions=text"
            )
        object.__setattr__(self, "specs", assign_tables(specs, self.model.kv_heads))
        for spec in specs:
            if (
                isinstance(spec.placement, Paged)
                and spec.placement.page_size > self.model.max_length
            ):
                raise ValueError(
                    f"page_size={spec.placement.page_size} is past the model's context of "
                    f"{self.model.max_length} tokens, so no sequence would fill a page; use "
                    f"page_size={self.model.max_length} or less"
                )
        if self.recomputes and self.chunk != self.max_length:
            raise ValueError(
                f"placement=recompute with chunk={self.chunk} and max_length={self.max_length}: "
                f"every step computes the whole text; use chunk={self.max_length}"
            )
        check_implementation(self.implementation)
        check_format(self.weights)

    @property
    def layer_specs(self) -> tuple[CacheSpec, ...]:
        """The cache of each layer, with its table."""
        assert isinstance(self.specs, tuple)
        return self.specs

    @property
    def recomputes(self) -> bool:
        """No layer has a cache: a step's input is the whole text."""
        return isinstance(self.layer_specs[0].placement, Recompute)

    @property
    def rows_per_sequence(self) -> int:
        """Rows of one prefill call that may be pieces of one sequence."""
        return 1 if any(spec.one_row_a_sequence for spec in self.layer_specs) else self.rows

    @property
    def evicts(self) -> bool:
        """Whether a layer has a policy of retention."""
        return any(spec.evicts for spec in self.layer_specs)

    @property
    def decoder(self) -> DecoderConfig:
        """The model as it attends: a ring narrows the window of its layer."""
        windows = [
            min(window or spec.placement.window, spec.placement.window)
            if isinstance(spec.placement, Ring)
            else window
            for window, spec in zip(self.model.layer_windows, self.layer_specs, strict=True)
        ]
        return dataclasses.replace(self.model, windows=tuple(windows))

    def pack(self, params: Any) -> Any:
        """Parameters as a session uses them; kvlab's kernel serves unless XLA was named."""
        kernel = self.implementation in (None, "cpu")
        return pack_params(params, self.model, self.weights, kernel)

    def init_cache(self) -> Cache:
        """An empty cache of this configuration."""
        return init_cache(
            self.model,
            self.layer_specs,
            slots=self.slots,
            max_length=self.max_length,
            chunk=self.chunk,
            num_pages=self.num_pages,
            implementation=self.implementation,
        )

    def init_logits(self) -> jax.Array:
        """Zeros [B, V] float32, to be filled by prefill."""
        return jnp.zeros((self.slots, self.model.vocab_size), jnp.float32)


def _require_whole(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field}={value!r} given; it must be a whole number, 1 or more")


def _turns_by_place(spec: CacheSpec) -> bool:
    """Whether keys are turned by their place in the cache."""
    return spec.retention is not None and spec.retention.placed_sinks is not None


def _streams(spec: CacheSpec) -> bool:
    """Whether a text may grow past the model's context: no key is ever further away than that."""
    return (
        spec.retention is not None
        and spec.retention.placed_sinks is not None
        and spec.retention.when != "prefill"
    )
