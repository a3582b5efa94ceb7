"""Make tables, figures and one HTML page from run folders.

    kvlab report runs/default
    kvlab report runs/first runs/second --out=both.html

The page is self-contained; its figures also lie beside it as PNG files. Without --out it is
report.html in the first folder.
"""

import sys

from kvlab.experiments.flags import command_flags
from kvlab.experiments.main import execute

ARGUMENTS = "FOLDER..."
FLAGS = command_flags(out="the page, or a folder for it")


def main(argv: list[str]) -> None:
    """Writes the report of the folders and prints its tables and its path."""
    from kvlab.research.report import results_text, write_report
    from kvlab.research.results import read_manifest, read_rows

    folders = argv[1:]
    if not folders:
        raise ValueError("no run folder given; kvlab sweep writes one (kvlab report FOLDER...)")
    page = write_report(folders, FLAGS.out)
    for folder in folders:
        if len(folders) > 1:
            print(f"{folder}\n")
        print(results_text(read_rows(folder), read_manifest(folder)["command"]), end="\n\n")
    print(f"report: {page}")


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
