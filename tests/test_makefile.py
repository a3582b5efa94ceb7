"""`make run` where the model can be fetched, and where it cannot."""

import os
import pathlib
import subprocess

import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("fetched", [True, False])
def test_make_run_falls_back_to_a_model_that_comes_with_kvlab(tmp_path, fetched):
    """The environment is played: its `kvlab` writes down how it was called."""
    calls = tmp_path / "calls"
    played = tmp_path / "bin" / "kvlab"
    played.parent.mkdir()
    failing = "" if fetched else 'if [ "$1" = fetch ]; then exit 1; fi\n'
    played.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{failing}')
    played.chmod(0o755)
    for made in ("bin/python", ".installed"):  # newer than what they are made from
        (tmp_path / made).touch()
    made = subprocess.run(
        ["make", "run", f"VENV={tmp_path}"],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    fetch, sweep = calls.read_text().splitlines()
    assert fetch == "fetch smollm2-135m"
    config = "attention_cache" if fetched else "shipped"
    assert sweep == f"sweep --config={config} --out=runs/{config}"
    assert ("running on shakespeare-gqa4, which comes with kvlab" in made.stdout) == (not fetched)
