"""Error messages for experiment files that cannot be used as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from trial_core.config import ExperimentConfig, error_lines, load_config
from trial_core.errors import ConfigError


def problems(**fields: Any) -> list[str]:
    """The lines of the error for a valid experiment with these fields changed."""
    searcher = {"metric": "loss", "max_length": {"batches": 100}}
    searcher.update(fields.pop("searcher", {}))
    mapping = {"entrypoint": "model_def:MyTrial", "searcher": searcher, **fields}
    with pytest.raises(ConfigError) as error:
        ExperimentConfig.from_mapping(mapping)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"searcher": {"max_length": {"batches": "ten"}}},
            'searcher.max_length.batches: expected a positive integer, got "ten"',
        ),
        (
            {"searcher": {"max_length": {"batches": 1, "epochs": 1}}},
            "searcher.max_length: expected either batches or epochs, got batches and epochs",
        ),
        (
            {"searcher": {"max_length": "long"}},
            'searcher.max_length: expected {batches: n} or {epochs: n}, got "long"',
        ),
        (
            {"min_validation_period": {"records": 10}},
            "min_validation_period.records: lengths are not counted in records; "
            "give batches or epochs",
        ),
        (
            {"min_checkpoint_period": {"epoch": 10}},
            'min_checkpoint_period.epoch: unknown field; did you mean "epochs"?',
        ),
        (
            {"min_checkpoint_period": "always"},
            'min_checkpoint_period: expected {batches: n}, {epochs: n} or "continuous", '
            'got "always"',
        ),
        (
            {"min_validation_period": "continuous"},
            'min_validation_period: expected {batches: n} or {epochs: n}, got "continuous"',
        ),
        (
            {"min_checkpoint_period": "continuous", "entrypoint": "python train.py"},
            "min_checkpoint_period: continuous needs a trial, as module:Class; a script says "
            "itself when it saves: remove it here",
        ),
        (
            {
                "min_checkpoint_period": "continuous",
                "stages": [{"run": "module:function", "after": "checkpoint-upload"}],
            },
            "stages[0].every: with min_checkpoint_period: continuous there is a checkpoint every "
            "few seconds; say how often to call the stage",
        ),
        (
            {"searcher": {"name": "adaptive_asha"}},
            'searcher.name: expected "single" (a run trains one trial), got "adaptive_asha"; to '
            "train several trials, use `trialflow search`; with single, one value is "
            "drawn from each search range",
        ),
        (
            {"searcher": {"smaller_is_better": "yes"}},
            'searcher.smaller_is_better: expected true or false, got "yes"',
        ),
        (
            {"searcher": {"source_trial_id": -1}},
            'searcher.source_trial_id: expected a trial\'s id, such as "gpt-00000000002a", or its '
            "number, got -1",
        ),
        (
            {"searcher": {"source_trial_id": 3, "source_checkpoint_uuid": "ab"}},
            "searcher.source_trial_id: source_checkpoint_uuid is given as well; remove one of them",
        ),
        (
            {"searcher": {"source_weights_only": True}},
            "searcher.source_weights_only: has no effect without source_checkpoint_uuid; name the "
            "checkpoint",
        ),
        (
            {"searcher": {"source_checkpoint_uuid": 1234}},
            "searcher.source_checkpoint_uuid: expected text, got 1234 (text needs quotes here)",
        ),
        (
            {"searcher": {"source_checkpoint_uuid": "../a"}},
            "searcher.source_checkpoint_uuid: expected a checkpoint's uuid or its beginning "
            '(letters, digits and dashes), got "../a"',
        ),
        (
            {"scheduling_unit": True},
            'scheduling_unit: expected a positive integer or "auto", got true',
        ),
        (
            {"scheduling_unit": 10**30},
            f"scheduling_unit: expected at most 9999999999, got {10**30}",
        ),
        (
            {"searcher": {"max_length": {"epochs": 10**10}}},
            "searcher.max_length.epochs: expected at most 9999999999, got 10000000000",
        ),
        (
            {"max_restarts": 1 << 99999},
            "max_restarts: expected at most 9999999999, got an integer of 100000 bits",
        ),
        (
            {"hyperparameters": {"a": [2**64]}},
            f"hyperparameters.a[0]: {2**64} does not fit into 64 bits; write it as text, in quotes",
        ),
        (
            {"resources": {"slots_per_trial": 5000}},
            "resources.slots_per_trial: expected at most 1024, got 5000",
        ),
        (
            {"stopping": {"grace_seconds": 1e300}},
            "stopping.grace_seconds: Input should be less than or equal to 315360000",
        ),
        (
            {"stopping": {"stall_timeout_seconds": float("inf")}},
            "stopping.stall_timeout_seconds: Input should be a finite number",
        ),
        (
            {"checkpointing": {"memory_gib_per_rank": 1e9}},
            "checkpointing.memory_gib_per_rank: Input should be less than or equal to 1048576",
        ),
        ({"max_restarts": -1}, "max_restarts: expected an integer of at least 0, got -1"),
        (
            {"reproducibility": {"experiment_seed": 2**31}},
            "reproducibility.experiment_seed: expected an integer from 0 to 2147483647, "
            "got 2147483648",
        ),
        (
            {"resources": {"slots_per_trial": -1}},
            'resources.slots_per_trial: expected a positive integer or "auto", got -1; '
            "0 is one rank on the CPU",
        ),
        ({"resources": [1]}, "resources: expected a mapping, got a list"),
        (
            {"checkpoint_policy": "bst"},
            'checkpoint_policy: expected "best", "all" or "none", got "bst"',
        ),
        ({"name": 3}, "name: expected text, got 3 (text needs quotes here)"),
        ({"labels": "one"}, 'labels: expected a list, got "one"'),
        ({"labels": ["a", 3]}, "labels[1]: expected text, got 3 (text needs quotes here)"),
        (
            {"data": {"a": [float("inf")]}},
            "data.a[0]: inf cannot be stored as JSON; write it as text, in quotes",
        ),
        ({"code": 3}, "code: expected the path of a folder, got 3"),
        (
            {"entrypoint": "model_def.MyTrial"},
            'entrypoint: expected "module:Class", such as "model_def:MyTrial", '
            'got "model_def.MyTrial"',
        ),
        (
            {"entrypoint": "model_def.py:MyTrial"},
            'entrypoint: expected "module:Class", such as "model_def:MyTrial", '
            'got "model_def.py:MyTrial"; did you mean "model_def:MyTrial"?',
        ),
        ({"hyperparamters": {}}, 'hyperparamters: unknown field; did you mean "hyperparameters"?'),
        (
            {"slots_per_trial": 2},
            'slots_per_trial: unknown field; did you mean "resources.slots_per_trial"?',
        ),
        ({"zebra": 1}, "zebra: unknown field"),
        ({"checkpoint_policy": "x" * 99}, f'checkpoint_policy: expected "best", "all" or "none", '
         f'got "{"x" * 57}..."'),
    ],
)  # fmt: skip
def test_one_mistake_is_one_line(fields: dict[str, Any], problem: str) -> None:
    """The line has the path, what was expected and what was seen."""
    assert problems(**fields) == [problem]


def test_a_misspelt_field_is_not_also_missing() -> None:
    """`metrc` for `metric` is one mistake, so one line."""
    mapping = {"entrypoint": "m:T", "searcher": {"metrc": "loss", "max_length": {"batches": 5}}}
    with pytest.raises(ConfigError) as error:
        ExperimentConfig.from_mapping(mapping)
    assert str(error.value) == 'searcher.metrc: unknown field; did you mean "metric"?'


def test_all_mistakes_are_listed(tmp_path: Path) -> None:
    """Every line begins with the file's name."""
    path = tmp_path / "experiment.yaml"
    path.write_text("scheduling_unit: many\nnme: x\n")
    with pytest.raises(ConfigError) as error:
        load_config(path, ["max_restarts=none"])
    assert str(error.value).splitlines() == [
        f"{path}: entrypoint: missing; for example entrypoint: model_def:MyTrial",
        f"{path}: searcher.max_length: missing; for example max_length: {{batches: 1000}}",
        f"{path}: searcher.metric: missing; for example metric: validation_loss",
        f'{path}: max_restarts: expected an integer of at least 0, got "none"',
        f'{path}: scheduling_unit: expected a positive integer or "auto", got "many"',
        f'{path}: nme: unknown field; did you mean "name"?',
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected fields such as entrypoint and searcher"),
        (
            b"just words",
            'expected a mapping of fields such as entrypoint and searcher, got "just words"',
        ),
        (b"a: 1\nb: c: d\n", "not valid YAML at line 2, column 5: mapping values are not allowed"),
        (
            b"a: 1\n\tb: 2\n",
            "not valid YAML at line 2, column 1: while scanning for the next token, found "
            "character '\\t' that cannot start any token (indent with spaces, not tabs)",
        ),
        (b"name: a\nname: b\n", 'not valid YAML at line 2, column 1: the key "name" is given'),
        (b"a: &x [*x]\n", "not valid YAML at line 1, column 4: found unconstructable recursive"),
        (b"a: !!python/object:os.x {}\n", "not valid YAML at line 1, column 4: could not determ"),
        (b"a: !!int ten\n", 'not valid YAML at line 1, column 4: "ten" is no int'),
        (b"a: \x00\n", "not valid YAML: unacceptable character #x0000"),
        pytest.param(b"[" * 5000, "not valid YAML: nested too deeply", id="nested"),
        (b"\xff\xfe\xff", "not a text file in UTF-8"),
    ],
)
def test_a_file_that_is_not_an_experiment_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """One line that begins with the file's name, without the parser's traceback."""
    path = tmp_path / "experiment.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_a_missing_file_is_reported_with_a_similar_name(tmp_path: Path) -> None:
    """The usual causes are a typing mistake and a folder instead of a file."""
    (tmp_path / "experiment.yaml").touch()
    missing = tmp_path / "experiment.yml"
    with pytest.raises(ConfigError) as error:
        load_config(missing)
    assert str(error.value) == (
        f"{missing}: no such file; did you mean {tmp_path}/experiment.yaml?"
    )
    with pytest.raises(ConfigError, match=r"no such file$"):
        load_config(tmp_path / "nowhere" / "experiment.yaml")
    with pytest.raises(ConfigError, match="is a folder; give the YAML file in it"):
        load_config(tmp_path)


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    """The line has the operating system's reason."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load_config(tmp_path / "file" / "experiment.yaml")


def test_pydantics_error_has_the_same_text() -> None:
    """Prefect creates a config without `load_config` and shows pydantic's error."""
    with pytest.raises(ValidationError) as error:
        ExperimentConfig(entrypoint="m:T", searcher={"metric": "x", "max_length": "ten"})  # type: ignore[arg-type]  # the point of the test
    (details,) = error.value.errors(include_url=False)
    assert details["loc"] == ("searcher", "max_length")
    assert details["msg"] == 'expected {batches: n} or {epochs: n}, got "ten"'
    assert details["input"] is None


def test_error_lines_works_for_other_models() -> None:
    """A model that is not a section gets the same messages."""

    class Other(BaseModel):
        path: str
        flags: list[bool]

    with pytest.raises(ValidationError) as error:
        Other.model_validate({"path": 3, "flags": 4})
    assert error_lines(error.value) == [
        "path: expected text, got 3 (text needs quotes here)",
        "flags: expected a list, got 4",
    ]
