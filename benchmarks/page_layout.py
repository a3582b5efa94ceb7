"""Which layout of a page pool reads fastest? One decode step's attention of one layer, by layout.

    python benchmarks/page_layout.py

Keys as [P, K, H, p] (token axis last), [P, K, p, H] or [P, p, K, H]; values as [P, K, p, H] or
[P, p, K, H]. SmolLM2-135M's shapes (K 3, G 3, H 64), 512 tokens of context, read in blocks of 64.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

NUM_KV_HEADS, GROUPS, HEAD_DIM, BLOCK, CONTEXT = 3, 3, 64, 64, 512
LAYOUTS = {  # axes of keys, of values
    "K[P,K,H,p] V[P,K,p,H]": ("PKHp", "PKpH"),
    "K[P,K,p,H] V[P,K,p,H]": ("PKpH", "PKpH"),
    "K[P,p,K,H] V[P,p,K,H]": ("PpKH", "PpKH"),
}
ROUNDS = 15


@functools.partial(jax.jit, static_argnames=("layout", "page_size"))
def attend(query, k_pages, v_pages, page_indices, num_blocks, layout, page_size):
    """Online softmax over blocks of pages; [B, K, G, H] in and out."""
    keys_axes, values_axes = LAYOUTS[layout]
    pages_per_block = BLOCK // page_size

    def block(pages, axes, wanted):
        gathered = pages  # [B, n, ...axes of a page]
        names = "Bn" + axes[1:]
        order = [names.index(axis) for axis in wanted]
        moved = gathered.transpose(order)
        shape = {"B": moved.shape[0], "K": NUM_KV_HEADS, "H": HEAD_DIM, "s": BLOCK}
        return moved.reshape([shape[axis] for axis in wanted.replace("np", "s")])

    def body(index, state):
        maximum, normaliser, total = state
        start = index * pages_per_block
        pages = jax.lax.dynamic_slice_in_dim(page_indices, start, pages_per_block, 1)
        keys_order = {"PKHp": "BKHnp", "PKpH": "BKnpH", "PpKH": "BnpKH"}[keys_axes]
        values_order = {"PKpH": "BKnpH", "PpKH": "BnpKH"}[values_axes]
        keys = block(k_pages[pages], keys_axes, keys_order)
        values = block(v_pages[pages], values_axes, values_order)
        named = keys_order.replace("np", "s")
        scores = jnp.einsum(f"BKGH,{named}->BKGs", query, keys, precision="highest")
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        weights = jnp.exp(scores - new_maximum[..., None])
        rescale = jnp.exp(maximum - new_maximum)
        named = values_order.replace("np", "s")
        read = jnp.einsum(f"BKGs,{named}->BKGH", weights, values, precision="highest")
        total = total * rescale[..., None] + read
        return new_maximum, normaliser * rescale + weights.sum(-1), total

    shape = query.shape[:-1]
    state = (jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros(query.shape))
    _, normaliser, total = jax.lax.fori_loop(0, num_blocks, body, state)
    return total / normaliser[..., None]


def main() -> None:
    """Times every layout, interleaved, and prints medians with their range in ms."""
    generator = np.random.default_rng(0)
    sizes = {"K": NUM_KV_HEADS, "H": HEAD_DIM}
    for batch in (1, 8, 32):
        for page_size in (16, 64):
            per_sequence = CONTEXT // page_size
            sizes |= {"P": batch * per_sequence, "p": page_size}
            shape = (batch, NUM_KV_HEADS, GROUPS, HEAD_DIM)
            query = jnp.asarray(generator.normal(size=shape), jnp.float32)
            indices = generator.permutation(sizes["P"]).reshape(batch, -1).astype(np.int32)
            runs = {}
            for layout, axes in LAYOUTS.items():
                pools = [
                    jnp.asarray(generator.normal(size=[sizes[a] for a in part]), jnp.float32)
                    for part in axes
                ]
                runs[layout] = functools.partial(
                    attend, query, *pools, indices, CONTEXT // BLOCK, layout, page_size
                )
                runs[layout]().block_until_ready()
            samples = {layout: [] for layout in LAYOUTS}
            for _ in range(ROUNDS):
                for layout, run in runs.items():
                    began = time.perf_counter()
                    for _ in range(5):
                        result = run()
                    result.block_until_ready()
                    samples[layout].append((time.perf_counter() - began) / 5)
            for layout, times in samples.items():
                print(
                    f"batch {batch:2} page {page_size:2} {layout}: "
                    f"{1e3 * statistics.median(times):.3f} ms "
                    f"[{1e3 * min(times):.3f}-{1e3 * max(times):.3f}]"
                )


if __name__ == "__main__":
    main()
