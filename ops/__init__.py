"""Pure functions and array pytrees: attention, RoPE, norms, page table, caches, sampling."""
