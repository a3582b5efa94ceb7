"""transformers on PyTorch, as `kvlab peers` runs it: its own GGUF loader, sdpa attention."""
# pyright: reportMissingImports=false

from typing import Any

import numpy as np
import torch
import transformers

from kvlab.experiments.peer_systems.system import Setting, log_softmax, two_best

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TransformersSystem:
    """See `System`."""

    def __init__(self, setting: Setting) -> None:
        """See `System`."""
        torch.set_num_threads(setting.threads)
        transformers.logging.set_verbosity_error()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            setting.model.parent,
            gguf_file=setting.model.name,
            dtype=_DTYPES[setting.precision],
            attn_implementation="sdpa",
        ).eval()
        self._past: Any = None
        self._logits: Any = None
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}

    @torch.inference_mode()
    def prefill(self, ids: np.ndarray) -> None:
        """See `System`."""
        self._past = self._logits = None
        self._feed(ids)

    @torch.inference_mode()
    def decode(self, steps: int) -> np.ndarray:
        """See `System`."""
        tokens = []
        for _ in range(steps):
            token = self._logits.argmax(dim=-1, keepdim=True)
            tokens.append(token)
            self._feed(token)
        return torch.cat(tokens, dim=1).numpy()

    @torch.inference_mode()
    def forced(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `System`."""
        found = []
        for column in tokens.T:
            found.append(two_best(self._logits.float().numpy()))
            self._feed(column[:, None])
        best, margins = zip(*found, strict=True)
        return np.stack(best, axis=1), np.stack(margins, axis=1)

    @torch.inference_mode()
    def log_probs(self, ids: np.ndarray) -> np.ndarray:
        """See `System`."""
        output = self._model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None])
        return log_softmax(output.logits[0].float().numpy())

    def _feed(self, ids: Any) -> None:
        ids = torch.as_tensor(ids, dtype=torch.long)
        output = self._model(
            input_ids=ids, past_key_values=self._past, use_cache=True, logits_to_keep=1
        )
        self._past, self._logits = output.past_key_values, output.logits[:, -1]
