"""The throughput benchmark compares like with like, and its quick form runs end to end."""

from __future__ import annotations

import pytest

from deepinfer.bench import throughput
from deepinfer.bench.workloads import SHAPE, WORKLOADS, deepinfer_config, transformers_config, workload


def test_both_models_have_the_same_shape():
    ours, theirs = deepinfer_config(), transformers_config()
    for name, value in SHAPE.items():
        assert getattr(ours, name) == value and getattr(theirs, name) == value, name


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_in_every_process(name):
    requests, (shortest, longest), (fewest, most) = WORKLOADS[name]
    work = workload(name)
    assert work == workload(name) and len(work.prompts) == len(work.output_lens) == requests
    assert all(shortest <= len(prompt) <= longest for prompt in work.prompts)
    assert all(fewest <= count <= most for count in work.output_lens)
    assert work.num_output_tokens == sum(work.output_lens)
    vocab = deepinfer_config().vocab_size
    assert all(0 <= token < vocab for prompt in work.prompts for token in prompt)


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--repeats", "x"], ["--unknown"]])
def test_bad_arguments_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        throughput.main(arguments)
    assert error.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_quick_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    throughput.main(["--quick"])
    out = capfd.readouterr().out
    assert out.count(" x transformers generate()") == 3
    assert not list(tmp_path.iterdir())  # nothing is saved
