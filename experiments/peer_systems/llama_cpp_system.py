"""llama.cpp, as `kvlab peers` runs it: through llama-cpp-python's C interface, batched."""
# pyright: reportMissingImports=false

import ctypes

import llama_cpp
import numpy as np

from kvlab.experiments.peer_systems.system import Setting, log_softmax, two_best

_BATCH, _MICRO_BATCH = 2048, 512  # llama.cpp's own defaults


class LlamaCppSystem:
    """See `System`; keys and values in float32 beside float32 weights, else float16.

    Flash attention is on where llama.cpp chooses it itself, as everywhere by default. On CPU it
    computes in less than float32, whatever keys and values are stored in.
    """

    _flash_attention = "AUTO"

    def __init__(self, setting: Setting) -> None:
        """See `System`."""
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self._quiet = quiet  # kept, or the callback would be gone
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(str(setting.model).encode(), params)
        if not model:
            raise ValueError(f"llama.cpp cannot load {setting.model}")
        self._model = model
        context = llama_cpp.llama_context_default_params()
        # A sequence's share of the context is rounded to whole blocks of 256.
        context.n_ctx = setting.batch * -(-setting.max_length // 256) * 256
        context.n_seq_max = setting.batch
        context.n_batch, context.n_ubatch = _BATCH, _MICRO_BATCH
        context.n_threads = context.n_threads_batch = setting.threads
        kind = "F32" if setting.precision == "float32" else "F16"
        context.type_k = context.type_v = getattr(llama_cpp, f"GGML_TYPE_{kind}")
        flash = f"LLAMA_FLASH_ATTN_TYPE_{self._flash_attention}"
        context.flash_attn_type = getattr(llama_cpp, flash)
        self._context = llama_cpp.llama_init_from_model(model, context)
        if not self._context:
            raise ValueError(f"llama.cpp has no memory for {setting.batch} sequences")
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._length, self._logits = 0, np.zeros((setting.batch, self._vocab_size), np.float32)
        self.versions = {"llama-cpp-python": llama_cpp.__version__}

    def __del__(self) -> None:
        """Gives back what C holds."""
        if getattr(self, "_context", None):
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
        if getattr(self, "_model", None):
            llama_cpp.llama_model_free(self._model)

    def prefill(self, ids: np.ndarray) -> None:
        """See `System`."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        count, length = ids.shape
        together = max(1, _BATCH // length)
        for first in range(0, count, together):
            part = ids[first : first + together]
            sequences = np.repeat(np.arange(first, first + len(part)), length)
            places = np.tile(np.arange(length), len(part))
            wanted = places == length - 1
            logits = self._feed(part.ravel(), places, sequences, wanted)
            self._logits[first : first + len(part)] = logits
        self._length = length

    def decode(self, steps: int) -> np.ndarray:
        """See `System`."""
        tokens = []
        for _ in range(steps):
            tokens.append(self._logits.argmax(axis=1))
            self._step(tokens[-1])
        return np.stack(tokens, axis=1)

    def forced(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `System`."""
        found = []
        for column in tokens.T:
            found.append(two_best(self._logits))
            self._step(column)
        best, margins = zip(*found, strict=True)
        return np.stack(best, axis=1), np.stack(margins, axis=1)

    def log_probs(self, ids: np.ndarray) -> np.ndarray:
        """See `System`."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        sequences, wanted = np.zeros(len(ids), int), np.ones(len(ids), bool)
        return log_softmax(self._feed(ids, np.arange(len(ids)), sequences, wanted))

    def _step(self, tokens: np.ndarray) -> None:
        places = np.full(len(tokens), self._length)
        self._logits = self._feed(
            tokens, places, np.arange(len(tokens)), np.ones(len(tokens), bool)
        )
        self._length += 1

    def _feed(
        self, tokens: np.ndarray, places: np.ndarray, sequences: np.ndarray, wanted: np.ndarray
    ) -> np.ndarray:
        """One `llama_decode`; the logits [.., V] of the tokens that are wanted."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for array, values in ((batch.token, tokens), (batch.pos, places), (batch.logits, wanted)):
            np.ctypeslib.as_array(array, (count,))[:] = values
        np.ctypeslib.as_array(batch.n_seq_id, (count,))[:] = 1
        for index, sequence in enumerate(sequences.tolist()):
            batch.seq_id[index][0] = sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        pointers = [
            llama_cpp.llama_get_logits_ith(self._context, int(i)) for i in np.flatnonzero(wanted)
        ]
        return np.stack([np.ctypeslib.as_array(one, (self._vocab_size,)) for one in pointers])


class LlamaCppNoFlashSystem(LlamaCppSystem):
    """Without flash attention: float32 throughout where weights are."""

    _flash_attention = "DISABLED"
