"""What the commands that measure share: a run folder around their work, and what is shown of it."""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.research.results import RunFolder
    from kvlab.research.rows import Row


def run_in_folder(
    work: "Callable[[RunFolder], list[Row]]",
    *,
    command: str,
    config: Mapping[str, Any],
    seed: int,
    question: str,
    out: str | None,
    name: str | None = None,
    points: int | None = None,
) -> int:
    """Does work in its run folder, new or resumed, and shows what came of it.

    Args:
      work: measures into the open folder, and gives the newest row of each point.
      command: that asks for it.
      config: the whole experiment, JSON-ready.
      seed: of the experiment.
      question: that it asks.
      out: the folder; None is runs/NAME-HASH.
      name: of the experiment; the command's if not given.
      points: how many rows there will be, where that is known.

    Returns:
      The exit status: 1 where a point failed.
    """
    from kvlab.research.results import RunFolder, config_hash

    name = name or command
    folder = pathlib.Path(out or f"runs/{name}-{config_hash(config)[:8]}")
    with RunFolder.open(
        folder,
        command=command,
        config=config,
        seeds=(seed,),
        argv=[argument for argument in sys.argv[1:] if argument != command],
        points=points,
        title=name.replace("_", " "),
        question=question,
    ) as opened:
        rows = work(opened)
    return present(folder, rows, command)


def present(out: pathlib.Path, rows: "Sequence[Row]", command: str) -> int:
    """Writes the report, prints the table, and gives the exit status: 1 where a point failed."""
    from kvlab.research.report import results_text, write_report

    page = write_report([out])
    print(results_text(rows, command))
    print(f"\nreport: {page}")
    failed = sum(row["status"] == "failed" for row in rows)
    if failed:
        print(f"kvlab {command}: {failed} of {len(rows)} points failed", file=sys.stderr)
    return 1 if failed else 0
