"""`--help=WORD`, and the keys of options that hold JSON as options of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from deepinfer.commands.parsing import OptionCommand
from deepinfer.commands.serve import load_config
from tests.cli.command import Run


def test_help_shows_the_options_with_a_word_and_no_others(run: Run) -> None:
    answer = run("serve", "--help=MAX")
    assert answer.returncode == 0 and answer.stderr == ""
    for name in ("--max-num-seqs", "--max-model-len", "--max-queue", "--max-body-size"):
        assert name in answer.stdout, name
    assert "--port" not in answer.stdout and "Examples" not in answer.stdout
    assert "--api-key" in run("serve", "--help=must send").stdout, "the text counts, too"


def test_help_of_a_group(run: Run) -> None:
    answer = run("generate", "--help=sampling").stdout
    assert "--temperature" in answer and "--json-schema" in answer
    assert "--max-model-len" not in answer and "Engine" not in answer


def test_hidden_options_are_found_but_not_in_the_plain_help(run: Run) -> None:
    everything, plain = run("serve", "--help=all").stdout, run("serve", "--help").stdout
    for name in ("--headless", "--speculative-algorithm"):
        assert name in everything and name not in plain
        assert name in run("serve", f"--help={name[2:]}").stdout
    assert "Engine" in plain and "Examples" in plain
    assert "--port" in everything and "--kv-cache-dtype" in everything


@pytest.mark.parametrize("word", ["zzz", ""])
def test_a_word_that_nothing_has_is_answered_with_the_groups(run: Run, word: str) -> None:
    answer = run("serve", f"--help={word}")
    assert answer.returncode == 2 and answer.stdout == "" and "the groups are Options, Engine" in answer.stderr


def parse(*arguments: str) -> str | None:
    """What a command with --speculative-config, --config and an argument is given for the first."""
    got: list[str | None] = []
    app = typer.Typer()

    def command(
        words: list[str] = typer.Argument(None),  # noqa: B008
        speculative_config: str | None = None,
        config: Path | None = typer.Option(None, callback=load_config, is_eager=True),  # noqa: B008
    ) -> None:
        got.append(speculative_config)
        got.extend(words or ())

    app.command(cls=OptionCommand)(command)
    app(list(arguments), standalone_mode=False)
    if got[1:]:
        assert got[1:] == ["--speculative-config.method"], "behind -- nothing is an option"
    return got[0]


def test_keys_are_merged_into_the_object() -> None:
    assert parse() is None
    alone = parse("--speculative-config.method", "ngram", "--speculative-config.num-speculative-tokens=4")
    assert json.loads(alone or "") == {"method": "ngram", "num_speculative_tokens": 4}
    given = '{"method": "dspark", "variable_length": true}'
    merged = parse("--speculative-config.variable_length", "false", "--speculative-config", given)
    assert json.loads(merged or "") == {"method": "dspark", "variable_length": False}
    assert parse("--", "--speculative-config.method") is None


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_config_file_has_a_mapping(tmp_path: Path, suffix: str) -> None:
    mapping = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 2}}
    if suffix == "yaml":
        pytest.importorskip("yaml")
    (tmp_path / f"x.{suffix}").write_text(json.dumps(mapping))  # YAML holds JSON
    file = ("--config", str(tmp_path / f"x.{suffix}"))
    assert json.loads(parse(*file) or "") == {"method": "ngram", "num_speculative_tokens": 2}
    over = parse(*file, "--speculative-config.num_speculative_tokens", "3")
    assert json.loads(over or "") == {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--speculative-config.foo", "3", "--speculative-config.method", "ngram"],
            "unknown key foo; known are method,",
        ),
        (["--speculative-config.num_speculative_tokens", "3"], "must name a method: ngram, dspark"),
        (["--speculative-config.method"], "--speculative-config.method requires a value"),
        (
            ["--speculative-config", "[1]", "--speculative-config.method", "ngram"],
            "--speculative-config must be a JSON",
        ),
        (["--port.x", "3"], "No such option"),
        (["--speculative-config.rejection_sample_method", "block", "--speculative-config.method", "ngram"], "standard"),
    ],
)
def test_bad_keys_are_refused_by_name(run: Run, options: list[str], told: str) -> None:
    answer = run("serve", "--port", "0", *options)
    assert answer.returncode == 2 and told in answer.stderr and "Traceback" not in answer.stderr


def test_generate_with_drafts_prints_the_same(run: Run, checkpoint: Path) -> None:
    answer = run("generate", "--model", str(checkpoint), "--speculative-config.method", "ngram", "-t", "0", "a b a b")
    assert answer.returncode == 0
    assert answer.stdout == run("generate", "--model", str(checkpoint), "-t", "0", "a b a b").stdout
