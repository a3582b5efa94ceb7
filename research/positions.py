"""Logits of every position of given token lists, on any point of the axes, into an npz file.

Axes: T positions, D model width, V vocabulary.
"""

import contextlib
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvlab.research.inference import head
from kvlab.research.prompts import check_token_ids
from kvlab.research.session import Session


def position_logits(
    session: Session,
    lists: Sequence[Sequence[int]],
    decode_from: int | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[np.ndarray]:
    """Computes what the model predicts after every token.

    Args:
      session: an empty session; it is left empty.
      lists: token ids.
      decode_from: tokens from this place on go through decode, one at a time; None prefills all.
      on_tokens: told how many tokens have been computed since it was last told.

    Yields:
      Logits [T, V] float32 of each list, in order.

    Raises:
      ValueError: an empty list, one longer than the session's sequences, ids out of range, a
        `decode_from` below 1 (decode continues what prefill began) or past every list.
    """
    if decode_from is not None and decode_from < 1:
        raise ValueError(f"decode_from={decode_from} given: decode continues a text; use 1 or more")
    check_lists(session, lists)
    longest = max(map(len, lists))
    if decode_from is not None and decode_from >= longest:
        raise ValueError(
            f"decode_from={decode_from} is past the longest list, of {longest} tokens: nothing "
            "would go through decode; lower it"
        )
    told = on_tokens or (lambda _: None)
    # Only decode gains from lists side by side, and the logits of a list are large.
    side_by_side = 1 if decode_from is None else session.config.slots
    for first in range(0, len(lists), side_by_side):
        wave = dict(enumerate(lists[first : first + side_by_side]))
        logits = {slot: _prefilled(session, slot, ids, decode_from) for slot, ids in wave.items()}
        told(sum(len(ids[:decode_from]) for ids in wave.values()))
        if decode_from is not None:
            _decode(session, wave, decode_from, logits, told)
        session.release()
        for slot in wave:
            yield logits.pop(slot)


def check_lists(session: Session, lists: Sequence[Sequence[int]]) -> None:
    """Refuses token lists that a session cannot compute; see `position_logits`."""
    config = session.config
    check_token_ids(lists, config.model.vocab_size, "list")
    for number, ids in enumerate(lists, 1):
        if not ids:
            raise ValueError(f"list {number} is empty; give at least one token id")
        if len(ids) > config.max_length:
            raise ValueError(
                f"list {number} has {len(ids)} tokens, past max_length={config.max_length}; "
                f"shorten it or raise max_length (the model's context is "
                f"{config.model.max_length})"
            )


def _prefilled(session: Session, slot: int, ids: Sequence[int], end: int | None) -> np.ndarray:
    """Logits [T, V] of a list, those of its first `end` tokens filled in by prefill."""
    config = session.config
    logits = np.empty((len(ids), config.model.vocab_size), np.float32)
    hidden = session.prefill({slot: ids[:end]})[slot]
    for start in range(0, len(hidden), config.chunk):
        piece = hidden[start : start + config.chunk]
        # One shape, whatever the lengths, so that the head compiles once.
        padded = np.zeros((config.chunk, hidden.shape[1]), hidden.dtype)
        padded[: len(piece)] = piece
        rows = head(session.params, config.model, padded)
        logits[start : start + len(piece)] = np.asarray(rows)[: len(piece)]
    return logits


def _decode(
    session: Session,
    wave: dict[int, Sequence[int]],
    start: int,
    logits: dict[int, np.ndarray],
    told: Callable[[int], None],
) -> None:
    """Feeds the rest of each list one token a step, and fills in the logits of each step."""
    for place in range(start, max(map(len, wave.values()))):
        fed = {slot: [ids[place]] for slot, ids in wave.items() if len(ids) > place}
        session.decode(dict.fromkeys(fed, 1), forced=fed)
        rows = np.asarray(session.logits)
        for slot in fed:
            logits[slot][place] = rows[slot]
        told(len(fed))


@contextlib.contextmanager
def npz_writer(path: str | os.PathLike[str]) -> Iterator[Callable[[str, np.ndarray], None]]:
    """Writes an npz file array by array, so that they need not be in memory together.

    The file appears under its name when the block ends without an error, whole.

    Args:
      path: the file; its folder must be there.

    Yields:
      A function that adds an array under a name.

    Raises:
      OSError: the file cannot be written, or is a device or pipe.
    """
    target = pathlib.Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; give the path of a file")
    if target.exists() and not target.is_file():
        raise OSError(f"{target} is no regular file, and would be replaced; give another path")
    named, target = target, target.resolve()  # what a link points to is written; the link stays
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise type(error)(f"cannot write {named}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
                yield lambda name, array: _add(archive, name, array)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, target)
    except BaseException:
        pathlib.Path(partial).unlink(missing_ok=True)
        raise


def _add(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def _umask() -> int:
    """The process's mask, which mkstemp, made for secrets, does not apply."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
