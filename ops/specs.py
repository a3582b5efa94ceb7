"""The cache axes as frozen, hashable specs: where keys and values lie, and in what form.

One `CacheSpec` describes the cache of one layer. A model runs with one spec per layer, so any axis
may differ between layers. Specs are static under `jax.jit`; arrays live in `kvlab.ops.caches`.
Nothing here imports jax: the command line's help lists these names.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.ops.retention import Retention

STORAGES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4", "kivi4")
PLACEMENTS = ("recompute", "contiguous", "paged", "ring")
RETENTIONS = ("all", "window", "sinks", "h2o", "snapkv", "random")


@dataclasses.dataclass(frozen=True)
class Recompute:
    """No cache: every step computes the whole text again. The baseline and the oracle."""

    def __str__(self) -> str:
        return "recompute"


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """One reserved run of `max_length` token slots per sequence."""

    def __str__(self) -> str:
        return "contiguous"


@dataclasses.dataclass(frozen=True)
class Paged:
    """Pages of `page_size` tokens, taken from a shared pool as a sequence grows.

    Source: PagedAttention (arXiv 2309.06180), section 4.1.

    Args:
      page_size: tokens a page.

    Raises:
      ValueError: `page_size` is below 1.
    """

    page_size: int = 16

    def __post_init__(self) -> None:
        """Validates the page size."""
        if not _is_whole(self.page_size) or self.page_size < 1:
            raise ValueError(
                f"page_size={self.page_size} given: a page holds a whole number of tokens, at "
                "least one; use page_size=1 or more (16 is the usual choice)"
            )

    def __str__(self) -> str:
        return f"paged:{self.page_size}"


@dataclasses.dataclass(frozen=True)
class Ring:
    """The last tokens of a windowed layer, in slots that are taken in turn (position modulo size).

    The layer attends to a window, the model's own if that is narrower. Beside the window a ring
    holds what the first queries of a prefill call still need while its last tokens are written:
    window + chunk - 1 slots, rounded up to the read block.

    Args:
      window: positions that a query sees, its own included.

    Raises:
      ValueError: `window` is below 1.
    """

    window: int

    def __post_init__(self) -> None:
        """Validates the window."""
        if not _is_whole(self.window) or self.window < 1:
            raise ValueError(
                f"window={self.window} given: a ring holds a whole number of positions, 1 or more"
            )

    def __str__(self) -> str:
        return f"ring:{self.window}"


Placement = Recompute | Contiguous | Paged | Ring


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_placement(name: str, page_size: int, window: int | None = None) -> Placement:
    """Turns a placement's name into its spec.

    Args:
      name: one of `PLACEMENTS`.
      page_size: tokens a page; used by `paged` alone.
      window: positions that a query sees; used by `ring` alone.

    Raises:
      ValueError: an unknown name; the message lists the legal ones. `ring` without a window.
    """
    if name == "recompute":
        return Recompute()
    if name == "contiguous":
        return Contiguous()
    if name == "paged":
        return Paged(page_size)
    if name == "ring":
        if window is None:
            raise ValueError("placement=ring needs a window; give window=256, say")
        return Ring(window)
    raise ValueError(f"placement={name!r} is not known; legal values: {', '.join(PLACEMENTS)}")


@dataclasses.dataclass(frozen=True)
class Kivi4:
    """Asymmetric 4-bit storage: keys by channel, values by token, the newest in full precision.

    Keys are quantised per channel in groups of `group` tokens, values per token in groups of
    `group` channels, each group with a scale and a zero point. A group of tokens is closed when it
    is complete, has been read in full precision, and `residual` newer tokens are there.
    Source: KIVI (arXiv 2402.02750), section 3.

    Args:
      group: tokens, and channels, of a group.
      residual: newest tokens that are in full precision at the least.

    Raises:
      ValueError: a group that is no power of two from 2 to 64, a residual below 0.
    """

    group: int = 32
    residual: int = 0

    def __post_init__(self) -> None:
        """Validates the sizes."""
        if self.group not in (2, 4, 8, 16, 32, 64):  # divides the read block
            raise ValueError(f"group={self.group} given: legal values: 2, 4, 8, 16, 32, 64")
        if not _is_whole(self.residual) or self.residual < 0:
            raise ValueError(f"residual={self.residual} given: want 0 tokens or more")

    def __str__(self) -> str:
        return f"kivi4:{self.group}:{self.residual}"


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """One layer's point on the cache axes.

    Args:
      placement: where keys and values lie.
      storage: the form they are stored in: a name of `STORAGES` (`kvlab.ops.storage`), or a
        `Kivi4`, for which `kivi4` stands.
      retention: which tokens stay (`kvlab.ops.retention`); None is all of them.
      table: index of the table (`Cache.tables`) that maps this layer's tokens; `assign_tables`
        sets it. Layers with the same mapping share a table.
      place: of this layer in a table of layers that each map their own tokens, else None;
        `assign_tables` sets it.

    Raises:
      ValueError: an unknown storage, or an impossible combination; the message names both fields
        and a legal neighbour.
    """

    placement: Placement = dataclasses.field(default_factory=Paged)
    storage: "str | Kivi4" = "float32"
    retention: "Retention | None" = None
    table: int = 0
    place: int | None = None

    def __post_init__(self) -> None:
        """Validates the combination."""
        placement, storage = self.placement, self.storage
        self._check_types()
        if storage == "kivi4":
            object.__setattr__(self, "storage", storage := Kivi4())
        if isinstance(storage, str) and storage not in STORAGES:
            raise ValueError(
                f"storage={storage!r} is not known; legal values: {', '.join(STORAGES)}"
            )
        if isinstance(placement, Recompute) and storage != "float32":
            raise ValueError(
                f"placement=recompute stores no keys or values, so storage={storage} means "
                "nothing there; use storage=float32, or placement=contiguous"
            )
        if self.retention is not None and isinstance(placement, Recompute | Ring):
            reason = "stores nothing to evict" if placement == Recompute() else "evicts by itself"
            raise ValueError(
                f"placement={placement} {reason}, so retention={self.retention} means nothing "
                "there; use retention=all, or placement=paged"
            )
        if isinstance(storage, Kivi4) and self.retention is not None:
            raise ValueError(
                f"retention={self.retention} evicts single tokens, and storage={storage} keeps "
                f"keys in groups of {storage.group}; use storage=int4, or retention=all"
            )
        page_size = placement.page_size if isinstance(placement, Paged) else 0
        if isinstance(storage, Kivi4) and page_size % storage.group:
            raise ValueError(
                f"storage={storage} closes groups of {storage.group} tokens, and page_size="
                f"{page_size} is no multiple of that; use page_size={storage.group}"
            )

    def _check_types(self) -> None:
        """Refuses names where specs are wanted, and policies that are no static values."""
        if not isinstance(self.placement, Placement):
            raise ValueError(
                f"placement={self.placement!r} is no placement; use parse_placement, or Paged(16), "
                "Contiguous(), Ring(256), Recompute()"
            )
        if self.retention is None:
            return
        if not hasattr(self.retention, "score"):
            raise ValueError(
                f"retention={self.retention!r} is no policy; use None, or one of "
                "kvlab.ops.retention, as Sinks(256)"
            )
        try:
            hash(self.retention)
        except TypeError as error:
            raise ValueError(
                f"retention={self.retention.name} cannot be part of a compiled program ({error}); "
                "its fields must be hashable: tuples, not lists or arrays"
            ) from None

    @property
    def evicts(self) -> bool:
        """Whether the layer may lose tokens that its attention could still see."""
        return self.retention is not None

    @property
    def one_row_a_sequence(self) -> bool:
        """Whether a prefill call may hold one piece of a sequence only, for want of slots."""
        return isinstance(self.placement, Ring) or isinstance(self.storage, Kivi4)


def assign_tables(
    specs: Sequence[CacheSpec], kv_heads: Sequence[int] | None = None
) -> tuple[CacheSpec, ...]:
    """Gives layers with the same mapping one shared table.

    Layers map alike where they have the same placement and hold the same number of tokens of
    every sequence. A policy whose heads share a budget makes that differ from layer to layer: such
    layers have places in one stacked table.

    Args:
      specs: one spec per layer.
      kv_heads: K of each layer; needed where KV heads choose their tokens.

    Returns:
      The same specs with `table` and `place` set; tables are numbered by first use.

    Raises:
      ValueError: `recompute` beside another placement: a layer without a cache needs the whole
        text as its input at every step, so all layers recompute or none does.
    """
    placements = list(dict.fromkeys(spec.placement for spec in specs))
    if len(placements) > 1 and Recompute() in placements:
        other = next(p for p in placements if p != Recompute())
        raise ValueError(
            f"placement=recompute on some layers and placement={other} on others: a layer without "
            f"a cache needs the whole text at every step; use {other} or recompute on every layer"
        )

    def mapping(layer: int, spec: CacheSpec) -> tuple[Hashable, ...]:
        policy = spec.retention
        if policy is None:  # a ring counts the tokens of a row, as contiguous does
            return (Contiguous() if isinstance(spec.placement, Ring) else spec.placement,)
        heads = kv_heads[layer] if policy.by_head and kv_heads is not None else 1
        return spec.placement, heads, policy.budget, policy.when, _stacks(spec)

    mappings = [mapping(layer, spec) for layer, spec in enumerate(specs)]
    tables = list(dict.fromkeys(mappings))
    assigned = []
    for layer, (spec, key) in enumerate(zip(specs, mappings, strict=True)):
        place = mappings[:layer].count(key) if _stacks(spec) else None
        assigned.append(dataclasses.replace(spec, table=tables.index(key), place=place))
    return tuple(assigned)


def _stacks(spec: CacheSpec) -> bool:
    """Whether a layer maps its own tokens."""
    return spec.retention is not None and spec.retention.shared_safeguard is not None
