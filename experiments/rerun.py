"""Repeat a run from its manifest and say which rows differ.

    kvlab rerun runs/attention_cache

Deterministic metrics (quality, bytes, counts) are compared; of timings the ratio is shown. The exit
status is 1 where a deterministic metric differs, or a row is missing or failed.
"""

import pathlib
import sys

from kvlab.experiments.flags import command_flags
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import present

ARGUMENTS = "RUN_FOLDER"
FLAGS = command_flags(out="the new run folder; RUN_FOLDER-rerun if not given")


def main(argv: list[str]) -> int:
    """Runs the experiment of a run folder again and compares the rows."""
    from kvlab.models.load import load_model
    from kvlab.research.comparison import compare_rows, timing_ratios
    from kvlab.research.experiment import Sweep
    from kvlab.research.results import RunFolder, read_manifest, read_rows
    from kvlab.research.sweep import point_label, run_sweep, sweep_points

    if len(argv) != 2:
        raise ValueError(f"rerun takes one run folder, {len(argv) - 1} given")
    source = pathlib.Path(argv[1])
    manifest = read_manifest(source)
    if manifest["command"] != "sweep":
        raise ValueError(f"{source} is a run of {manifest['command']!r}; rerun repeats sweeps")
    sweep = Sweep.from_json(manifest["config"])
    points = list(sweep_points(sweep))
    out = pathlib.Path(FLAGS.out or source.with_name(f"{source.name}-rerun"))
    with RunFolder.open(
        out,
        command="sweep",
        config=sweep.to_json(),
        seeds=(sweep.seed,),
        argv=manifest["argv"],
        points=len(points),
        title=manifest.get("title", ""),
        question=manifest.get("question", ""),
    ) as folder:
        if all(folder.finished(point.settings, sweep.seed) for point in points):
            print(f"{out} is finished already, so nothing is measured; --out names another folder")
        rows = run_sweep(sweep, load_model(sweep.model), folder)
    status = present(out, rows, "sweep")
    comparisons = compare_rows(read_rows(source), rows)
    print()
    for comparison in comparisons:
        if comparison.differs:
            print(f"{point_label(comparison.config)}: {comparison.describe()}")
    print(f"timings, new over old: {timing_ratios(comparisons) or 'none to compare'}")
    differing = sum(comparison.differs for comparison in comparisons)
    print(f"{differing} of {len(comparisons)} rows differ from {source}")
    return 1 if differing else status


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
