"""kvlab, as `kvlab peers` runs it: the paged cache, its best implementation."""

import jax
import numpy as np

from kvlab.experiments.peer_systems.system import Setting, log_softmax, two_best
from kvlab.models.load import load_model
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research import inference
from kvlab.research.inference import InferenceConfig
from kvlab.research.session import Session

_ROWS, _CHUNK = 2, 256  # of a prefill call: 512 tokens, as llama.cpp takes at once


class KvlabSystem:
    """See `System`; computes in bfloat16 beside bfloat16 weights, else in float32."""

    _bfloat16 = "bfloat16"

    def __init__(self, setting: Setting) -> None:
        """See `System`; XLA takes its threads from the affinity of the process."""
        dtype = self._bfloat16 if setting.precision == "bfloat16" else "float32"
        model = load_model(str(setting.model), dtype=dtype)
        chunk = min(_CHUNK, setting.max_length)
        config = InferenceConfig(
            model.config,
            CacheSpec(Paged(page_size=64)),
            slots=setting.batch,
            max_length=setting.max_length,
            rows=_ROWS,
            chunk=chunk,
            weights=setting.precision,
        )
        self._session = Session(model.params, config)
        self._session.warm_up()
        self.versions = {"jax": jax.__version__}

    def prefill(self, ids: np.ndarray) -> None:
        """See `System`."""
        self._session.release()
        self._session.prefill(list(ids), hidden=False)
        self._session.logits.block_until_ready()

    def decode(self, steps: int) -> np.ndarray:
        """See `System`."""
        continued = self._session.decode(steps)
        return np.array([continued[slot].tokens for slot in sorted(continued)])

    def forced(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `System`."""
        found = []
        for column in tokens.T:
            found.append(two_best(np.asarray(self._session.logits)))
            self._session.decode(1, forced={slot: [one] for slot, one in enumerate(column)})
        best, margins = zip(*found, strict=True)
        return np.stack(best, axis=1), np.stack(margins, axis=1)

    def log_probs(self, ids: np.ndarray) -> np.ndarray:
        """See `System`."""
        session = self._session
        session.release()
        hidden = session.prefill({0: ids})[0]
        return log_softmax(np.asarray(inference.head(session.params, session.config.model, hidden)))


class KvlabFloat32System(KvlabSystem):
    """Computes in float32 whatever the weights are."""

    _bfloat16 = "float32"
