"""Pages as JAX's paged kernels read them: all pages of a KV head side by side, H last.

Layout: keys and values [K, P, p, H], where `PagedCache` has keys [P, K, H, p] and values
[P, K, p, H]. In all else it is that cache: the same table, the same slots, the same blocks for XLA,
which reads them in prefill. Only what the kernels can read is stored so: bfloat16, whole texts.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import ReadStored, Step, Table
from kvlab.ops.jax_kernels import Pages
from kvlab.ops.specs import Kivi4
from kvlab.ops.storage import Stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadMajorPages(PagedCache):
    """Keys and values [K, P, p, H] of one layer, in a dtype that needs no scale."""

    @classmethod
    def init(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        storage: str | Kivi4,
        notes: Sequence[str] = (),
    ) -> "HeadMajorPages":
        """An empty cache of `num_pages` pages.

        Raises:
          ValueError: a storage with scales, or notes on tokens.
        """
        if isinstance(storage, Kivi4) or storage not in ("float32", "bfloat16") or notes:
            raise ValueError(
                f"storage={storage} with notes={tuple(notes)}: head-major pages hold float32 or "
                "bfloat16 and no notes; use PagedCache"
            )
        shape = num_kv_heads, num_pages, page_size, head_dim
        key, value = ({"codes": jnp.zeros(shape, storage)} for _ in range(2))
        return cls(key, value, storage)

    @property
    def num_units(self) -> int:
        """Pages (P)."""
        return self.key["codes"].shape[1]

    @property
    def unit_size(self) -> int:
        """Token slots of a page (p)."""
        return self.key["codes"].shape[2]

    @property
    def num_kv_heads(self) -> int:
        """KV heads (K)."""
        return self.key["codes"].shape[0]

    def pool(
        self,
        step: Step,
        table: Table,
        lengths: jax.Array,
        positions: jax.Array | None = None,
    ) -> Pages:
        """See `TokenSlots.pool`; slots lie in the order of the text."""
        assert positions is None
        pages = self.units(step, table)
        return Pages(self.key["codes"], self.value["codes"], pages, lengths)

    def reader(self, step: Step, table: Table) -> tuple[ReadStored, int, int]:
        """Pages side by side; see `TokenSlots.reader`."""
        del step
        pages_of, block_pages, count = self._block_pages(table)

        def block(codes: jax.Array, pages: jax.Array) -> jax.Array:
            found = codes.at[:, pages].get(mode="clip")  # [K, B, n, p, H]
            return found.reshape(*found.shape[:2], -1, found.shape[4]).swapaxes(0, 1)

        def read(index: jax.Array) -> tuple[Stored, Stored]:
            pages = pages_of(index)
            key, value = (block(part["codes"], pages) for part in (self.key, self.value))
            return {"codes": key.swapaxes(2, 3)}, {"codes": value}

        return read, block_pages * self.page_size, count

    def set(self, slots: jax.Array, key: Stored, value: Stored) -> "HeadMajorPages":
        """Stores tokens [.., K, H] at flat slots i32[..]; those past the end are dropped.

        The first token of a page clears it. Kernels fetch whole pages and weigh the slots past a
        row's end with 0, which would not hide a NaN that a former sequence left there.
        """
        page, offset = divmod(slots, self.unit_size)
        opened = jnp.where(offset == 0, page, self.num_units)
        # By number, not by a slice: XLA for TPUs turns the whole pool round to write across heads.
        head = jnp.arange(self.num_kv_heads, dtype=jnp.int32)
        head = head.reshape(-1, *[1] * slots.ndim)

        def put(codes: jax.Array, new: jax.Array) -> jax.Array:
            codes = codes.at[:, opened].set(jnp.zeros((), codes.dtype), mode="drop")
            new = jnp.moveaxis(new, -2, 0)
            return codes.at[head, page[None], offset[None]].set(new, mode="drop")

        return dataclasses.replace(
            self,
            key=jax.tree.map(put, self.key, key),
            value=jax.tree.map(put, self.value, value),
        )

    def at(self, slots: jax.Array) -> tuple[Stored, Stored]:
        """What is stored of tokens at flat slots i32[..], as `set` takes it."""
        page, offset = divmod(slots, self.unit_size)

        def found(codes: jax.Array) -> jax.Array:
            return jnp.moveaxis(codes.at[:, page, offset].get(mode="clip"), 0, -2)

        return jax.tree.map(found, self.key), jax.tree.map(found, self.value)
