"""The experiment file: defaults, overrides, YAML and JSON."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.support.strategies import plain_data
from trial_core.config import ExperimentConfig, OptimizationsConfig, load_config
from trial_core.config.error_text import ExperimentWarning
from trial_core.config.sections import CheckpointingConfig
from trial_core.config.yaml_file import parse_yaml
from trial_core.errors import ConfigError
from trial_core.schedule.sequencer import Schedule
from trial_core.schedule.units import Batch, Epoch

MINIMAL = """
entrypoint: model_def:MyTrial
searcher: {metric: validation_loss, max_length: {batches: 100}}
"""


def written(folder: Path, text: str, name: str = "experiment.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def experiment(**fields: Any) -> ExperimentConfig:
    searcher = {"metric": "loss", "max_length": {"batches": 100}}
    return ExperimentConfig(**{"entrypoint": "model_def:MyTrial", "searcher": searcher, **fields})


def test_missing_fields_have_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minimal file is named after its folder, and its code is in that folder."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "runs"))
    folder = tmp_path / "mnist"
    folder.mkdir()
    config = load_config(written(folder, MINIMAL))
    assert (config.name, config.code) == ("mnist", folder)
    assert config.checkpoint_storage.url == f"file://{tmp_path}/runs/checkpoints"
    assert config.checkpoint_storage.options == {}
    assert config.resources.slots_per_trial == 1
    assert config.reproducibility.experiment_seed == 0
    assert config.max_restarts == 5
    assert config.environment.environment_variables == {}
    assert config.schedule() == Schedule(
        max_length=Batch(100), reporting_period=None, checkpoint_policy="best"
    )


def test_a_meaningful_null_is_kept(tmp_path: Path) -> None:
    """null means no stall timeout, also after JSON; for other fields it means the default."""
    text = MINIMAL + "stopping: {stall_timeout_seconds: null, grace_seconds: null}\n"
    config = load_config(written(tmp_path, text))
    again = ExperimentConfig.model_validate_json(config.model_dump_json())
    for stopping in (config.stopping, again.stopping):
        assert (stopping.stall_timeout_seconds, stopping.grace_seconds) == (None, 25.0)


def test_a_rank_reads_a_section_without_refusing_anything() -> None:
    """Of the configuration of a script or a debugged trial, which may have any fields."""
    given = {"stall_timeout_seconds": None, "trusted": None, "memory_gib_per_rank": 2, "more": 1}
    seen = CheckpointingConfig.unchecked({"checkpointing": given})
    assert seen == CheckpointingConfig(stall_timeout_seconds=None, memory_gib_per_rank=2)
    assert CheckpointingConfig.unchecked({"checkpointing": None}) == CheckpointingConfig()
    assert OptimizationsConfig.unchecked({"optimizations": {"aggregation_frequency": "2"}}) == (
        OptimizationsConfig(aggregation_frequency=2)
    )
    with pytest.raises(ValueError, match="invalid literal for int"):
        OptimizationsConfig.unchecked({"optimizations": {"aggregation_frequency": "two"}})


def test_a_continuous_checkpoint_period() -> None:
    """It survives a flow's parameters, and is a choice beside a length in the UI's form."""
    config = experiment(min_checkpoint_period="continuous")
    assert config.schedule().checkpoint_period == "continuous"
    again = ExperimentConfig.model_validate(config.model_dump(mode="json"))
    assert again.min_checkpoint_period == "continuous"
    schema = ExperimentConfig.model_json_schema()["properties"]["min_checkpoint_period"]
    assert "continuous" in [each.get("const") for each in schema["anyOf"]]


def test_every_field_of_the_schedule_is_set() -> None:
    """Unequal values, so that swapped fields would be noticed."""
    config = experiment(
        searcher={"metric": "x", "smaller_is_better": False, "max_length": {"epochs": 3}},
        scheduling_unit=13,
        min_validation_period={"batches": 7},
        min_checkpoint_period={"epochs": 11},
        checkpoint_policy="all",
        perform_initial_validation=True,
    )
    assert config.schedule() == Schedule(
        max_length=Epoch(3),
        reporting_period=Batch(13),
        validation_period=Batch(7),
        checkpoint_period=Epoch(11),
        checkpoint_policy="all",
        smaller_is_better=False,
        step_zero_validation=True,
    )


def test_a_code_folder_is_relative_to_the_file(tmp_path: Path) -> None:
    """`code: src` is next to the experiment file, whatever the current folder."""
    (tmp_path / "src").mkdir()
    config = load_config(written(tmp_path, MINIMAL + "code: src\n"))
    assert (config.code, config.name) == (tmp_path / "src", "src")


def test_a_missing_code_folder_is_refused(tmp_path: Path) -> None:
    """Before any rank starts and fails to import."""
    path = written(tmp_path, MINIMAL + "code: sorce\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == f"{path}: code: no such folder: {tmp_path}/sorce"


@given(hyperparameters=st.dictionaries(st.text(max_size=8), plain_data, max_size=3))
def test_a_config_survives_json(hyperparameters: dict[str, Any]) -> None:
    """A config is a flow's parameter, so JSON must not change it."""
    config = experiment(
        hyperparameters=hyperparameters,
        resources={"slots_per_trial": "auto"},
        min_validation_period={"epochs": 2},
        checkpoint_storage={"type": "s3", "bucket": "b", "access_key": "k", "secret_key": "s"},
        environment={"environment_variables": ["A=1"]},
    )
    text = json.dumps(config.model_dump(mode="json"))
    assert ExperimentConfig.model_validate(json.loads(text)) == config
    assert ExperimentConfig.model_validate_json(text) == config


def test_the_digest_covers_only_what_is_trained() -> None:
    """Not the places of code and checkpoints, nor anything that may be a credential."""
    digest = experiment(name="a").digest()
    storage = {"url": "s3://user:SECRET@bucket", "options": {"secret": "SECRET"}}
    assert digest.startswith("sha256:")
    environment = {"environment_variables": {"TOKEN": "SECRET"}}
    watched = {
        "profiling": {"enabled": True}, "tensorboard_logging": False,
        "cost": {"per_slot_hour": 2.5},
    }  # fmt: skip
    elsewhere = experiment(
        name="a", code="/elsewhere", checkpoint_storage=storage, environment=environment, **watched
    )
    assert elsewhere.digest() == digest
    assert experiment(name="a", ignored_fields={"project": "b"}).digest() == digest
    assert experiment(name="a", optimizations={"aggregation_frequency": 2}).digest() != digest
    assert experiment(name="a", hyperparameters={"lr": 0.1}).digest() != digest
    assert experiment(name="a", scheduling_unit=7).digest() != digest


def test_the_digest_of_the_environment_hides_its_values() -> None:
    """It is in manifests. Each trial has another one, which takes long to guess."""

    def digest(trial: str, variables: dict[str, str]) -> str:
        of = experiment(name="a", environment={"environment_variables": variables})
        return of.environment_digest(trial)

    one = digest("a-1", {"A": "1", "B": "2"})
    assert one == digest("a-1", {"B": "2", "A": "1"})
    assert len({one, digest("a-1", {"A": "1"}), digest("a-2", {"A": "1", "B": "2"})}) == 3
    assert digest("a-1", {}) == digest("a-2", {})


def test_the_digest_of_a_release_does_not_change() -> None:
    """Manifests hold digests of earlier releases, which did not have all of today's fields."""
    digest = "sha256:b6720d700f3f75a2e6394a54a68ae7e7be6407ef3b35e7500f230e53f49e7133"
    assert experiment(name="a").digest() == digest


def test_a_single_batch_may_be_profiled() -> None:
    """The first and the last batch are then the same."""
    one = experiment(profiling={"begin_on_batch": 3, "end_after_batch": 3}).profiling
    assert (one.begin_on_batch, one.end_after_batch) == (3, 3)


def test_overrides_replace_and_create(tmp_path: Path) -> None:
    """Values are YAML; missing mappings on the path are created."""
    config = load_config(
        written(tmp_path, MINIMAL),
        [
            "searcher.max_length.batches=20",
            "hyperparameters.optimizer.lr=1e-3",
            "hyperparameters.layers=[1, 2]",
            "hyperparameters.expression=a=b",
            "resources.slots_per_trial=auto",
            "name=other",
        ],
    )
    assert config.searcher.max_length == Batch(20)
    assert config.hyperparameters == {
        "optimizer": {"lr": 0.001},
        "layers": [1, 2],
        "expression": "a=b",
    }
    assert (config.resources.slots_per_trial, config.name) == ("auto", "other")


def test_a_mapping_of_overrides_keeps_its_values(tmp_path: Path) -> None:
    """A text stays a text; a folder of code is relative to the file, whatever type it has."""
    (tmp_path / "there").mkdir()
    path = written(tmp_path, MINIMAL)
    config = load_config(
        path,
        {"hyperparameters.lr": "1e-3", " searcher.max_length.epochs ": 2, "code": Path("there")},
    )
    assert config.hyperparameters == {"lr": "1e-3"}
    assert config.searcher.max_length == Epoch(2)
    assert config.code == tmp_path / "there"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({3: 1}, "overrides: 3: expected a path with dots, such as searcher.max_length.batches"),
        ({"a..b": 1}, 'overrides: "a..b": expected a path with dots'),
        ({"entrypoint.x": 1}, "overrides: entrypoint.x: entrypoint is not a mapping"),
        ({"name": "\ud800"}, "overrides: name: has a character that UTF-8 cannot encode"),
        ({"hyperparameters.lr": object()}, "FILE: hyperparameters.lr: expected plain data"),
    ],
)
def test_an_invalid_value_of_a_mapping_is_named(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    """The message has the path."""
    path = written(tmp_path, MINIMAL)
    with pytest.raises(ConfigError) as error:
        load_config(path, values)
    assert str(error.value).replace(str(path), "FILE").startswith(message)


@pytest.mark.parametrize("before", ["{batches: 100}", "{epochs: 5}", "100"])
def test_overriding_a_unit_replaces_the_length(tmp_path: Path, before: str) -> None:
    """A length has one unit: the override's."""
    path = written(tmp_path, MINIMAL.replace("{batches: 100}", before))
    assert load_config(path, ["searcher.max_length.epochs=2"]).searcher.max_length == Epoch(2)


def test_an_override_does_not_reach_through_an_alias(tmp_path: Path) -> None:
    """Fields that share a YAML anchor are overridden separately."""
    text = MINIMAL + "hyperparameters: {a: &x {lr: 1}, b: *x}\n"
    config = load_config(written(tmp_path, text), ["hyperparameters.a.lr=2"])
    assert config.hyperparameters == {"a": {"lr": 2}, "b": {"lr": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs", "--set epochs: expected key=value, such as searcher.max_length.batches=20"),
        ("=3", "--set : expected key=value"),
        ("a..b=3", "--set a..b: expected key=value"),
        ("entrypoint.x=3", "--set entrypoint.x: entrypoint is not a mapping, so x cannot be set"),
        ("a=[1", "--set a: not valid YAML at line 1"),
    ],
)
def test_an_invalid_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    """The message has the override's key, not its value, which may be a secret."""
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, MINIMAL), [override])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E6", 1e6),
        ("-.5", -0.5),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("10_000", 10_000),
        ("no", "no"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("True", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("{<<: {a: 1, b: 1}, b: 2}", {"a": 1, "b": 2}),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    """1e-5 is a number and `no` is text, as in Determined."""
    read = parse_yaml(text, "test")
    assert (read, type(read)) == (value, type(value))


def test_prefect_validates_and_serializes_the_config() -> None:
    """Prefect's schema check accepts a dumped config and refuses invalid values."""
    from prefect import flow
    from prefect.utilities.schema_tools import validate

    @flow
    def train(config: ExperimentConfig) -> ExperimentConfig:
        return config

    schema = train.parameters.model_dump_for_openapi()
    config = experiment(min_validation_period={"batches": 7}, resources={"slots_per_trial": "auto"})
    parameters = train.serialize_parameters({"config": config})
    assert validate(parameters, schema) == []
    assert train.validate_parameters(parameters)["config"] == config
    parameters["config"]["searcher"]["max_length"] = {"batches": 0}
    parameters["config"]["scheduling_unit"] = 0
    parameters["config"]["hyperparams"] = {}
    assert len(validate(parameters, schema) or []) == 3


def test_every_field_of_the_form_has_a_title_and_a_description() -> None:
    """The schema is the form in Prefect's UI."""
    schema = ExperimentConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, field in section["properties"].items():
            assert "title" in field, name
            assert "description" in field or "$ref" in field, name
    assert schema["required"] == ["entrypoint", "searcher"]


@pytest.mark.parametrize(
    ("override", "warning"),
    [
        ("hyperparameters.lr=1", ""),
        ("hyperparameters.widht=1", r"--set hyperparameters\.widht: .* unless .*mean \"width\"\?$"),
        ("hyperparameters.dropout=1", r"--set hyperparameters\.dropout: .* reads it$"),
        ("hyperparameters.adam.esp=1", r"--set hyperparameters\.adam\.esp: .*mean \"eps\"\?$"),
        ("hyperparameters.adam.betas.first=1", r"--set hyperparameters\.adam\.betas: "),
        ("hyperparameters.overwrite.optimizer.lr=1", ""),
        ("hyperparameters={dropout: 1}", ""),
        ("data.path=1", ""),
    ],
)
def test_an_override_of_no_hyperparameter_of_the_file(
    tmp_path: Path, override: str, warning: str
) -> None:
    """It may be misspelt, which is said. What the file leaves open may be set."""
    section = "hyperparameters: {lr: 1, width: 2, adam: {eps: 3}, overwrite: {}}\n"
    path = written(tmp_path, MINIMAL + section)
    expected = pytest.warns(ExperimentWarning, match=warning)
    with warnings.catch_warnings(), expected if warning else nullcontext():
        warnings.simplefilter("always" if warning else "error")
        load_config(path, [override])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(
            written(tmp_path, MINIMAL), [override]
        )  # a file without hyperparameters has no names to compare


@pytest.mark.parametrize(
    ("metric", "is_doubtful"),
    [("val_accuracy", True), ("F1", True), ("loss", False), ("vacc_loss", False)],
)
def test_the_smallest_accuracy_as_the_best_is_doubtful(metric: str, is_doubtful: bool) -> None:
    """A warning, unless the experiment says which direction is meant."""
    searcher = {"metric": metric, "max_length": {"batches": 1}}
    expected = pytest.warns(ExperimentWarning, match=f"the smallest {metric} counts as the best")
    with expected if is_doubtful else nullcontext():
        ExperimentConfig.from_mapping({"entrypoint": "a:B", "searcher": searcher})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        searcher["smaller_is_better"] = True
        ExperimentConfig.from_mapping({"entrypoint": "a:B", "searcher": searcher})


@pytest.mark.parametrize(
    ("entrypoint", "fields", "path"),
    [
        ("a:B", {"searcher": {"max_length": 6}}, "searcher.max_length: 6"),
        ("a:B", {"min_validation_period": 7}, "min_validation_period: 7"),
        ("a:B", {"min_checkpoint_period": 8}, "min_checkpoint_period: 8"),
        ("a:B", {"min_checkpoint_period": 0}, None),  # no period
        ("python train.py", {"searcher": {"max_length": 6}}, None),  # it counts its own steps
    ],
)
def test_a_length_without_a_unit(entrypoint: str, fields: dict[str, Any], path: str | None) -> None:
    """It counts batches, and a warning says so: epochs may be meant."""
    searcher = {"metric": "loss", "max_length": {"batches": 9}, **fields.get("searcher", {})}
    mapping = {"entrypoint": entrypoint, **fields, "searcher": searcher}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = ExperimentConfig.from_mapping(mapping)
        # As a parameter of a flow it has its unit.
        ExperimentConfig.model_validate_json(config.model_dump_json())
    seen = [str(each.message) for each in caught]
    assert len(seen) == (path is not None)
    if path is not None:
        number = path.split()[-1]
        assert seen[0].startswith(f"{path} has no unit and counts batches")
        assert f"write {{batches: {number}}}, or else {{epochs: {number}}}" in seen[0]
    if "searcher" in fields:
        assert config.searcher.max_length == Batch(6)


@pytest.mark.parametrize(
    ("entrypoint", "stage", "message"),
    [
        ("m:T", {"metrics": ["loss"]}, r"stages\[0\]\.metrics: searcher\.metric is needed when"),
        ("m:T", {"run": "samples"}, r'stages\[0\]\.run: expected "module:function" of the code'),
        ("m:T", {"after": "training", "every": {"batches": 3}}, r"stages\[0\]\.every: has no"),
        ("m:T", {"blockin": True}, r'stages\[0\]\.blockin: .*; did you mean "blocking"'),
        ("python a.py", {"after": "validate"}, r"stages\[0\]\.after: a script validates by"),
        ("python a.py", {"every": {"epochs": 1}}, r"stages\[0\]\.every: a script may have no"),
    ],
)
def test_a_stage_that_cannot_be(entrypoint: str, stage: dict[str, Any], message: str) -> None:
    """The error has its place in the file, and what to do."""
    mapping = {
        "name": "toy",
        "entrypoint": entrypoint,
        "searcher": {"metric": "loss", "max_length": {"batches": 5}},
        "stages": [{"run": "samples:write", "after": "checkpoint-upload", **stage}],
    }
    with pytest.raises(ConfigError, match=message):
        ExperimentConfig.from_mapping(mapping)
