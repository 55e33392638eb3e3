"""Any experiment, as a mapping, JSON or YAML, is valid or refused with a plain error."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.strategies import (
    DEEP_LEVELS,
    TEXTS,
    changed,
    fuzz,
    json_bytes,
    odd_values,
    spoilt,
)
from tests.trial_core.config.test_determined import FOR_DETERMINED
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig, IgnoredFieldWarning, error_lines, load_config
from trial_core.config.script import script_config
from trial_core.config.yaml_file import override, parse_yaml
from trial_core.errors import ConfigError, TrialflowError
from trial_core.models.data_templates import parse_data

EVERY_FIELD: dict[str, Any] = {
    "name": "gpt",
    "description": "a",
    "labels": ["b"],
    "entrypoint": "model_def:MyTrial",
    "code": ".",
    "hyperparameters": {"lr": 0.1, "layers": [1, {"type": "const", "val": 2}],
                        "width": {"type": "log", "base": 2, "minval": 1, "maxval": 9.5},
                        "depth": {"type": "int", "minval": 1, "maxval": 2**40}},
    "data": {"begin": "{{ scheduled_time }}"},
    "resources": {"slots_per_trial": 2},
    "searcher": {
        "name": "single", "metric": "loss", "smaller_is_better": True,
        "max_length": {"epochs": 3}, "source_checkpoint_uuid": "u", "source_weights_only": True,
    },
    "scheduling_unit": 10,
    "min_validation_period": {"batches": 5},
    "min_checkpoint_period": 0,
    "perform_initial_validation": False,
    "checkpoint_policy": "all",
    "checkpoint_storage": {
        "url": "s3://bucket/prefix", "options": {"key": "k", "config_kwargs": {"s3": {}}},
        "save_trial_best": 1, "keep_every": {"batches": 10},
    },
    "checkpointing": {"memory_gib_per_rank": 1.5, "when_busy": "postpone", "trusted": False},
    "reproducibility": {"experiment_seed": 7},
    "max_restarts": 0,
    "stopping": {"grace_seconds": 5, "time_budget_seconds": 7.5, "stall_timeout_seconds": None},
    "retraining": {
        "model": "m", "start": "warm", "margin": 0.1, "callbacks": ["a:b"],
        "schedule": {"cron": "0 3 * * *", "timezone": "UTC"},
    },
    "environment": {"environment_variables": {"A": "1", "B": 2}},
}  # fmt: skip
SHORT = {
    "entrypoint": "model_def:MyTrial",
    "searcher": {"metric": "loss", "max_length": {"batches": 100}},
}
FORMS: list[dict[str, Any]] = [
    {"checkpoint_storage": form}
    for form in (
        "a folder",
        {"type": "shared_fs", "host_path": "/mnt", "storage_path": "a"},
        {"type": "directory", "container_path": "/mnt"},
        {"type": "s3", "bucket": "b", "prefix": "p", "access_key": "k", "endpoint_url": "http://a"},
        {"type": "azure", "container": "c", "account_url": "https://a.blob.core.windows.net"},
    )
] + [
    {"environment": {"environment_variables": each}}
    for each in (["A=1"], {"cpu": ["A=1"], "gpu": ["A=2"]}, {"A": 0.5})
]
DETERMINED: dict[str, Any] = parse_yaml(FOR_DETERMINED, "")
EXPERIMENTS = [EVERY_FIELD, SHORT, DETERMINED, *({**SHORT, **form} for form in FORMS)]
experiments = st.sampled_from(EXPERIMENTS).flatmap(changed)

YAML_TEXTS = [
    FOR_DETERMINED,
    yaml.safe_dump(EVERY_FIELD),
    "a: &a [1, *a]\n",
    "a: &a {b: 1}\nc: {<<: *a, <<: [*a]}\n",
    "? [1, 2]\n: 3\n",
    "a: !!int ten\nb: !!float 1\nc: !!binary eA==\nd: !!python/name:os.system\n",
    '"\\UFFFFFFFF": "\\ud800"\n',
    "%YAML 1.2\n--- {a: 0x7f, b: 0o7, c: .inf, d: 1_0}\n...\n",
    "--- 1\n--- 2\n",
]


def nested(value: Any) -> Any:
    """Plain data with its marks of deep values replaced: Python's reader makes no such values."""
    if isinstance(value, dict):
        return {key: nested(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [nested(inner) for inner in value]
    if not isinstance(value, str) or value not in DEEP_LEVELS:
        return value
    deep: list[Any] = []
    for _ in range(min(DEEP_LEVELS[value], 3000)):
        deep = [deep]
    return deep


def check_config(config: ExperimentConfig) -> None:
    """A valid experiment survives JSON, and can be asked everything."""
    text = json.dumps(config.model_dump(mode="json"))
    for again in (
        ExperimentConfig.model_validate(json.loads(text)),
        ExperimentConfig.model_validate_json(text),
        ExperimentConfig.model_validate_json(config.model_dump_json()),
    ):
        assert again == config
        assert again.digest() == config.digest()
    repr(config)
    config.schedule()
    config.retention()
    try:
        config.effective_retraining()
    except ConfigError as error:
        check_lines(str(error))


def check_lines(text: str) -> None:
    """An error can be shown on a terminal, and does not repeat pydantic's words."""
    assert text.encode()
    assert "pydantic" not in text


def check_mapping(mapping: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFieldWarning)
        try:
            config = ExperimentConfig.from_mapping(mapping)
        except ConfigError as error:
            check_lines(str(error))
            return
        check_config(config)


@fuzz(60, mapping=experiments)
def test_any_mapping_is_an_experiment_or_refused(mapping: Any) -> None:
    """As a script gives it."""
    check_mapping(nested(mapping))


@fuzz(40, data=experiments.map(json_bytes).flatmap(spoilt))
def test_any_json_is_an_experiment_or_refused(data: bytes) -> None:
    """As the parameter of a flow run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFieldWarning)
        try:
            config = ExperimentConfig.model_validate_json(data)
        except ValidationError as error:
            check_lines("\n".join(error_lines(error)))
            return
        check_config(config)


overrides = st.builds(
    "{}={}".format,
    st.lists(
        st.sampled_from([*EVERY_FIELD, "batches", "url", "lr", "", "a" * 300, "\0"]), max_size=3
    ).map(".".join),
    st.sampled_from(["1", "{a: 1}", "[", "\0", "!!int x", "*a", "null", '"\\ud800"', "1e999"]),
) | st.sampled_from(TEXTS)


@fuzz(
    40,
    data=st.sampled_from(YAML_TEXTS).map(str.encode).flatmap(spoilt)
    | experiments.map(json_bytes)
    | st.sampled_from(YAML_TEXTS).map(lambda text: text.encode("utf-16")),
    given=st.lists(overrides, max_size=2),
)
def test_any_file_is_an_experiment_or_refused(data: bytes, given: list[str]) -> None:
    """In any encoding, with any overrides."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        path = Path(folder, "experiment.yaml")
        path.write_bytes(data)
        check_file(path, given)


def check_file(path: Path, given: Sequence[str] = ()) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFieldWarning)
        try:
            config = load_config(path, given)
        except ConfigError as error:
            check_lines(str(error))
            return
        check_config(config)


@fuzz(20, given=st.lists(overrides, max_size=3))
def test_any_data_of_a_run_are_plain_or_refused(given: list[str]) -> None:
    """What `--data` is given can be stored."""
    try:
        data = parse_data(given)
    except ConfigError as error:
        check_lines(str(error))
        return
    assert json.loads(json.dumps(data)) == data


@fuzz(20, conf=experiments | odd_values, hparams=odd_values)
def test_any_experiment_of_a_script_is_valid_or_refused(conf: Any, hparams: Any) -> None:
    """What `exp_conf` and `hparams` are given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFieldWarning)
        try:
            check_config(script_config(nested(conf), nested(hparams)))
        except ConfigError as error:
            check_lines(str(error))


@fuzz(20, storage=changed(EVERY_FIELD["checkpoint_storage"]))
def test_any_storage_is_opened_or_refused(storage: Any) -> None:
    """Whatever its options are."""
    try:
        config = ExperimentConfig.from_mapping({**SHORT, "checkpoint_storage": nested(storage)})
        CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    except TrialflowError as error:
        check_lines(str(error))


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        (r'a: "\UFFFFFFFF"', "not valid YAML"),
        (f"%YAML {'9' * 5000}.1\n--- {{}}", "not valid YAML"),
        (r'a: "\ud800"', "not valid YAML at line 1, column 4"),
        ('code: "~\\0"', "code: no such folder"),
        (f"code: {'a' * 300}\nentrypoint: a:B\nsearcher: {SHORT['searcher']}", "no such folder"),
    ],
    ids=["escape", "directive", "surrogate", "NUL", "long name"],
)
def test_a_file_that_python_cannot_hold_is_refused(
    tmp_path: Path, yaml_text: str, expected: str
) -> None:
    """With an error that names the file."""
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml_text)
    with pytest.raises(ConfigError, match=expected) as error:
        load_config(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"hyperparameters": {"a": "<deep 600>"}},
        {"data": {"a": "<deep 100000>"}},
        {"entrypoint": ["<deep 100000>"]},
        {"checkpoint_storage": {"type": "<deep 100000>"}},
        {"hyperparameters": {"a": "\ud800"}},
        {"hyperparameters": {"\ud800": 1}},
        {"\ud800": 1},
        {"environment": {"environment_variables": {"A": "\0"}}},
        {"environment": {"environment_variables": ["A=\0"]}},
        {
            "checkpoint_storage": {
                "type": "azure",
                "container": "a",
                "account_url": "http://[SECRET",
            }
        },
    ],
    ids=lambda fields: ascii(fields)[:60],
)
def test_a_value_that_no_process_can_be_given_is_refused(fields: dict[str, Any]) -> None:
    """Too deep, not UTF-8, or with a NUL character."""
    with pytest.raises(ConfigError) as error:
        ExperimentConfig.from_mapping(nested({**SHORT, **fields}))
    check_lines(str(error.value))
    assert "SECRET" not in str(error.value)


def test_an_override_with_very_many_parts_is_refused() -> None:
    """Each part is a level."""
    with pytest.raises(ConfigError, match="more than 100 parts"):
        override({}, [".".join(["a"] * 1000) + "=1"])


@pytest.mark.parametrize("options", [{"config_kwargs": 3}, {"config_kwargs": {"s3": [1]}}], ids=str)
def test_a_storage_with_options_of_a_wrong_kind_is_refused(options: dict[str, Any]) -> None:
    """The error names the option."""
    with pytest.raises(TrialflowError, match="must be a mapping"):
        CheckpointStore("s3://bucket", options)
