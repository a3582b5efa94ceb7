"""Writes families.npz: the logits that transformers gives for every case of tiny_families.py.

Run in an environment with torch and transformers (the `peers` extra):

    python tests/goldens/make_families.py
"""

import importlib.util
import pathlib
import sys
import tempfile
import types

import numpy as np

HERE = pathlib.Path(__file__).parent


def reference_logits(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """transformers' logits of whole texts, float32, eager attention, no cache.

    Args:
      folder: a Hugging Face model folder.
      tokens: [rows, length] int32.

    Returns:
      [rows, length, vocab_size] float32.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        output = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False)
    return output.logits.numpy()


def _tiny_families() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_families", HERE / "tiny_families.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_families"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Writes the file, and prints the size of each case's logits."""
    families = _tiny_families()
    logits = {}
    for case in families.CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = families.write_tiny_folder(case, pathlib.Path(folder))
            logits[case] = reference_logits(path, families.tokens(case))
        print(f"{case}: {logits[case].shape}, std {logits[case].std():.2f}")
    np.savez_compressed(HERE / "families.npz", **logits)


if __name__ == "__main__":
    main()
