"""The benchmarks are run by hand: what they start must still take their options."""

import sys

import pytest
import yaml

import launch
from benchmarks import training


@pytest.mark.parametrize("run", training.RUNS)
def test_the_launcher_takes_what_the_benchmark_gives_it(tmp_path, monkeypatch, run):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(training.config_of(3, 2)))
    options = training.launch_options(tmp_path, run, 2, tmp_path / "ours")
    monkeypatch.setattr(sys, "argv", ["launch.py", *options])
    args = launch.parse()
    assert args.gpus == args.threads == 2
    assert args.settings["method"] == run
