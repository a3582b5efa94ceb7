"""The cache axes as frozen, hashable specs: where keys and values lie, and in what form.

One `CacheSpec` describes the cache of one layer. A model runs with one spec per layer, so any axis
may differ between layers. Specs are static under `jax.jit`; arrays live in `kvlab.ops.caches`.
"""

import dataclasses
from collections.abc import Sequence

STORAGES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4")
PLACEMENTS = ("recompute", "contiguous", "paged")


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
        if self.page_size < 1:
            raise ValueError(
                f"page_size={self.page_size} given: a page holds at least one token; "
                "use page_size=1 or more (16 is the usual choice)"
            )

    def __str__(self) -> str:
        return f"paged:{self.page_size}"


Placement = Recompute | Contiguous | Paged


def parse_placement(name: str, page_size: int) -> Placement:
    """Turns a placement's name into its spec.

    Args:
      name: one of `PLACEMENTS`.
      page_size: tokens a page; used by `paged` alone.

    Raises:
      ValueError: an unknown name; the message lists the legal ones.
    """
    if name == "recompute":
        return Recompute()
    if name == "contiguous":
        return Contiguous()
    if name == "paged":
        return Paged(page_size)
    raise ValueError(f"placement={name!r} is not known; legal values: {', '.join(PLACEMENTS)}")


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """One layer's point on the cache axes.

    Args:
      placement: where keys and values lie.
      storage: the form they are stored in, one of `STORAGES` (`kvlab.ops.storage`).
      table: index of the table (`Cache.tables`) that maps this layer's tokens; `assign_tables`
        sets it. Layers with the same mapping share a table.

    Raises:
      ValueError: an unknown storage, or `recompute` with a storage it does not use.
    """

    placement: Placement = dataclasses.field(default_factory=Paged)
    storage: str = "float32"
    table: int = 0

    def __post_init__(self) -> None:
        """Validates the combination."""
        if self.storage not in STORAGES:
            raise ValueError(
                f"storage={self.storage!r} is not known; legal values: {', '.join(STORAGES)}"
            )
        if isinstance(self.placement, Recompute) and self.storage != "float32":
            raise ValueError(
                f"placement=recompute stores no keys or values, so storage={self.storage} means "
                "nothing there; use storage=float32, or placement=contiguous"
            )


def assign_tables(specs: Sequence[CacheSpec]) -> tuple[CacheSpec, ...]:
    """Gives layers with the same placement one shared table.

    Args:
      specs: one spec per layer.

    Returns:
      The same specs with `table` set; tables are numbered by first use.

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
    return tuple(
        dataclasses.replace(spec, table=placements.index(spec.placement)) for spec in specs
    )


def table_placements(specs: Sequence[CacheSpec]) -> tuple[Placement, ...]:
    """The placement of each table that `specs` refer to, in table order."""
    by_table = {spec.table: spec.placement for spec in specs}
    return tuple(by_table[index] for index in sorted(by_table))
