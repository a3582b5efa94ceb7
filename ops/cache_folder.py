"""Where kvlab keeps between runs what it can make or fetch again."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """`$KVLAB_CACHE`, or `~/.cache/kvlab`: fetched models, compiled programs and kernels."""
    chosen = os.environ.get("KVLAB_CACHE")
    return pathlib.Path(chosen) if chosen else pathlib.Path.home() / ".cache" / "kvlab"
