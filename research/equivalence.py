"""What variants of a model compute on a few short texts, and how far two computations are apart.

Axes: T tokens of a prompt, n decoded tokens, D model width, V vocabulary, n positions of logits.
"""

import dataclasses
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.ops.attention import READ_BLOCK
from kvlab.ops.page_table import PageTable
from kvlab.ops.retention import Retention
from kvlab.ops.specs import CacheSpec, Kivi4, Paged, Placement, Recompute, Ring
from kvlab.research import inference
from kvlab.research.cache import unwrapped
from kvlab.research.inference import Params
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session
from kvlab.research.variants import apply_attention

STEPS = 4  # tokens decoded after each prompt
SLOTS, ROWS, CHUNK = 4, 2, 16
_LENGTHS = (1, 16, 63, 81)  # around a page, a chunk, a group of KIVI and a read block
_LONGEST = 320  # tokens: no text is made longer so that a ring comes round
_MOST_CONFIGS = 8  # whose programs are kept
_EVERY = 16  # tokens: lengths of sessions are multiples


@dataclasses.dataclass(frozen=True)
class OwnRing:
    """Rings of the layers' own windows, and pages of 16 where a layer has none.

    A model without windows gets rings that hold whole texts.
    """

    def __str__(self) -> str:
        return "ring"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A point on the axes, for whatever model.

    Args:
      placements: of the layers, taken in turn; one stands for all.
      storage: of all layers.
      retention: of all layers.
      attention: as `apply_attention` takes it; None is the model's own.
    """

    placements: tuple[Placement | OwnRing, ...]
    storage: str | Kivi4 = "float32"
    retention: Retention | None = None
    attention: str | None = None

    def __str__(self) -> str:
        words: list[object] = [self.attention, "+".join(map(str, self.placements))]
        words += [None if self.storage == "float32" else self.storage, self.retention]
        for field in dataclasses.fields(self.retention) if self.retention else ():
            value = getattr(self.retention, field.name)
            if field.name != "budget" and value != field.default:
                words.append(f"{field.name}={value}")
        return " ".join(str(word) for word in words if word)

    @property
    def is_continuous(self) -> bool:
        """Whether a last bit of the sums moves the results by a last bit, and never by a step.

        A rounding to fewer bits makes steps, and so does a choice of tokens by their attention.
        """
        by_place = self.retention is None or self.retention.observes is None
        return self.storage == "float32" and by_place

    def specs(self, model: DecoderConfig, max_length: int) -> tuple[CacheSpec, ...]:
        """The cache of each layer of a model, in sessions of `max_length` tokens."""
        windows = model.layer_windows
        specs = []
        for layer, window in enumerate(windows):
            placement = self.placements[layer % len(self.placements)]
            if isinstance(placement, OwnRing):
                whole = Ring(max_length) if not any(windows) else Paged(16)
                placement = Ring(window) if window else whole
            specs.append(CacheSpec(placement, self.storage, self.retention))
        return tuple(specs)


@dataclasses.dataclass(frozen=True)
class Seen:
    """Everything that one request saw."""

    hidden: np.ndarray  # [T, D] float: of the prompt, after the final norm
    logits: np.ndarray  # [steps + 1, V] float32: before the first token, and after each
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]

    @property
    def ends(self) -> "Seen":
        """Without the logits between the first and the last."""
        return dataclasses.replace(self, logits=self.logits[[0, -1]])


@dataclasses.dataclass(frozen=True)
class Base:
    """What the requests of a bench saw in a new session, and which pages they took."""

    seen: tuple[Seen, ...]
    pages: tuple[np.ndarray, ...]  # i32[rows, pages_per_sequence] of each page table


class Bench:
    """One model, some texts, and what its variants make of them.

    Attributes:
      model: the loaded model.
      prompts: token ids of each request, [T] int32; a request's usual slot is its index.
      strangers: two other texts, to share a batch with.
      max_length: tokens that a sequence may grow to.
    """

    def __init__(self, model: Model, seed: int) -> None:
        """Chooses texts: pieces of the project's English text, or random ids without a tokenizer.

        Args:
          model: the loaded model.
          seed: of the choice.

        Raises:
          ValueError: a context too short for a prompt and a continuation.
        """
        context = model.config.max_length
        if context <= STEPS:
            raise ValueError(
                f"the model's context is {context} tokens; this needs {STEPS + 1} or more"
            )
        lengths = [min(length, context - STEPS) for length in _prompt_lengths(model.config)]
        rounded = -(-(max(lengths) + STEPS) // _EVERY) * _EVERY
        self.model = model
        self.max_length = min(rounded, context)
        self._random = np.random.default_rng(seed)
        self._source = _text_ids(model)
        self.prompts = [self._text(length) for length in lengths]
        self.strangers = [self._text(length) for length in (lengths[3] - 1, min(5, lengths[1]))]
        self._params: dict[str | None, tuple[DecoderConfig, Params]] = {}
        self._bases: dict[Variant, Base] = {}
        self._oracle: dict[tuple[DecoderConfig, bytes], np.ndarray] = {}
        self._compiled: set[InferenceConfig] = set()

    def _text(self, length: int) -> np.ndarray:
        """A text of its own, [length] int32."""
        if self._source is None or len(self._source) < length:
            ids = self._random.integers(0, self.model.config.vocab_size, length)
            return ids.astype(np.int32)
        start = self._random.integers(0, len(self._source) - length + 1)
        return self._source[start : start + length]

    def _variant(self, attention: str | None) -> tuple[DecoderConfig, Params]:
        """The model with another attention."""
        if attention not in self._params:
            config, params = self.model.config, self.model.params
            if attention is not None:
                config, params = apply_attention(config, params, attention)
            self._params[attention] = config, params
        return self._params[attention]

    def config(self, variant: Variant, **changes: Any) -> InferenceConfig:
        """The shapes of a variant's sessions.

        Args:
          variant: the variant.
          **changes: fields that are to be other ones.

        Raises:
          ValueError: the model cannot have this variant.
        """
        model, _ = self._variant(variant.attention)
        if variant.attention is not None and model == self.model.config:
            raise ValueError(f"the model's own attention is {variant.attention}")
        config = InferenceConfig(
            model,
            variant.specs(model, self.max_length),
            slots=SLOTS,
            max_length=self.max_length,
            rows=ROWS,
            chunk=min(CHUNK, self.max_length),
            decode_steps=STEPS,
        )
        return dataclasses.replace(config, **changes)

    def session(self, variant: Variant, **changes: Any) -> Session:
        """A new session; the first of a configuration compiles its programs."""
        _, params = self._variant(variant.attention)
        session = Session(params, self.config(variant, **changes))
        if session.config not in self._compiled:
            session.warm_up()
            self._compiled.add(session.config)
        return session

    def base(self, variant: Variant) -> Base:
        """The prompts in a new session, in slot order, decoded greedily; computed once."""
        if variant not in self._bases:
            session = self.session(variant)
            seen = traced(session, dict(enumerate(self.prompts)))
            self._bases[variant] = Base(tuple(seen.values()), page_maps(session))
        return self._bases[variant]

    def oracle(self, window: int | None, text: np.ndarray) -> np.ndarray:
        """Hidden states of a text by the model without a cache, computed once.

        Args:
          window: of every layer instead of the model's own, where that is no narrower.
          text: [T] int32.

        Returns:
          [T, D].
        """
        model = self.model.config
        if window is not None:
            windows = tuple(min(own or window, window) for own in model.layer_windows)
            model = dataclasses.replace(model, windows=windows)
        key = model, text.tobytes()
        if key not in self._oracle:
            length = self.max_length
            config = InferenceConfig(
                model, CacheSpec(Recompute()), slots=1, max_length=length, chunk=length
            )
            self._oracle[key] = Session(self.model.params, config).prefill([text])[0]
        return self._oracle[key]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits [n, V] float32 of hidden states [n, D], by one program whatever n."""
        padded = np.zeros((self.max_length, hidden.shape[1]), hidden.dtype)
        padded[: len(hidden)] = hidden
        logits = inference.head(self.model.params, self.model.config, padded)
        return np.asarray(logits)[: len(hidden)]

    def free_programs(self) -> None:
        """Lets go of compiled programs once there are many: those of 30 layers take 200 MB."""
        if len(self._compiled) < _MOST_CONFIGS:
            return
        jax.clear_caches()
        self._compiled.clear()


def _prompt_lengths(model: DecoderConfig) -> tuple[int, ...]:
    """Tokens of each prompt; the longest goes once round the rings of a model with windows."""
    capacities = [
        -(-(window + CHUNK - 1) // READ_BLOCK) * READ_BLOCK
        for window in model.layer_windows
        if window
    ]
    rounds = [capacity + CHUNK + 1 for capacity in capacities]
    return (*_LENGTHS[:-1], max([_LENGTHS[-1], *(n for n in rounds if n <= _LONGEST)]))


def _text_ids(model: Model) -> np.ndarray | None:
    """The project's English text as token ids, [T] int32; None without a tokenizer."""
    if model.tokenizer is None:
        return None
    path = importlib.resources.files("kvlab.research") / "texts" / "english.txt"
    return np.asarray(model.tokenizer.encode(path.read_text("utf-8")), np.int32)


def traced(
    session: Session,
    prompts: Mapping[int, np.ndarray],
    forced: Mapping[int, Sequence[int]] | None = None,
) -> dict[int, Seen]:
    """Prefills prompts by slot and decodes `STEPS` tokens of each; see `continued`."""
    return continued(session, session.prefill(prompts), forced)


def continued(
    session: Session,
    hidden: Mapping[int, np.ndarray],
    forced: Mapping[int, Sequence[int]] | None = None,
) -> dict[int, Seen]:
    """Decodes sequences greedily, one token a call, keeping every logit.

    Args:
      session: holds them.
      hidden: of their prompts, [T, D] by slot.
      forced: token ids by slot, to be fed first.

    Returns:
      What each saw, by slot.
    """
    logits = [np.array(session.logits)]
    tokens: dict[int, list[int]] = {slot: [] for slot in hidden}
    log_probs: dict[int, list[float]] = {slot: [] for slot in hidden}
    for step in range(STEPS):
        fed = {slot: ids[step : step + 1] for slot, ids in (forced or {}).items()}
        for slot, got in session.decode(dict.fromkeys(hidden, 1), forced=fed).items():
            tokens[slot] += got.tokens
            log_probs[slot] += got.log_probs
        logits.append(np.array(session.logits))
    stacked = np.stack(logits)
    return {
        slot: Seen(states, stacked[:, slot], tuple(tokens[slot]), tuple(log_probs[slot]))
        for slot, states in hidden.items()
    }


def decoded_in_one_call(session: Session, hidden: Mapping[int, np.ndarray]) -> dict[int, Seen]:
    """As `continued`, by one call of the loop on the device: logits before and after it only."""
    before = np.array(session.logits)
    results = session.decode(dict.fromkeys(hidden, STEPS))
    after = np.array(session.logits)
    return {
        slot: Seen(states, np.stack([before[slot], after[slot]]), got.tokens, got.log_probs)
        for (slot, states), got in zip(hidden.items(), results.values(), strict=True)
    }


def prefilled_row_by_row(session: Session, slot: int, ids: np.ndarray) -> np.ndarray:
    """Prefills a prompt with one piece a call, in the last row, where `Session` fills all rows.

    Returns:
      Hidden states of its tokens, [T, D].
    """
    config = session.config
    hidden = []
    for start in range(0, len(ids), config.chunk):
        piece = ids[start : start + config.chunk]
        tokens = np.zeros((config.rows, config.chunk), np.int32)
        counts, total = np.zeros((2, config.rows), np.int32)
        slots = np.full(config.rows, config.slots, np.int32)
        tokens[-1, : len(piece)] = piece
        counts[-1], total[-1], slots[-1] = len(piece), len(ids), slot
        stored = np.zeros(config.rows, bool)
        _, states = session.prefill_rows(tokens, counts, slots, total, stored)
        hidden.append(np.asarray(states)[-1, : len(piece)])
    if config.evicts:
        session.evict([slot])
    return np.concatenate(hidden)


def page_maps(session: Session) -> tuple[np.ndarray, ...]:
    """Where each table's sequences have their pages, [rows, pages_per_sequence] int32 each."""
    tables = [unwrapped(table)[0] for table in session.cache.all_tables()]
    return tuple(np.asarray(t.page_indices) for t in tables if isinstance(t, PageTable))


def bit_difference(one: Seen, other: Seen) -> float:
    """The largest absolute difference of any number that was seen; inf where tokens differ."""
    if one.tokens != other.tokens:
        return np.inf
    pairs = [
        (one.hidden, other.hidden),
        (one.logits, other.logits),
        (np.asarray(one.log_probs), np.asarray(other.log_probs)),
    ]
    return largest([float(np.abs(left - right).max()) for left, right in pairs])


def largest(differences: Sequence[float]) -> float:
    """The largest difference; NaN where one is, which Python's `max` may pass over."""
    return float(np.max(differences))


def relative_difference(reference: np.ndarray, logits: np.ndarray) -> float:
    """The largest absolute difference of logits [n, V] over the largest absolute reference."""
    return float(np.abs(logits - reference).max() / np.abs(reference).max())


def clear_positions(reference: np.ndarray, bound: float) -> np.ndarray:
    """Where the two best logits of [n, V] differ by more than `bound` of the largest, bool[n]."""
    second, first = np.sort(reference, axis=-1)[:, -2:].T
    return first - second > bound * np.abs(reference).max()


def mean_kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean KL(reference || logits) over positions, of logits [n, V], in nats."""
    one, other = (_log_softmax(side.astype(np.float64)) for side in (reference, logits))
    return float(np.sum(np.exp(one) * (one - other), axis=-1).mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
