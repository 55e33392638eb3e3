"""The flow `train` runs a script with Hugging Face's Trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from tests.support.fitting import start
from tests.support.flow import train, train_until_stopped
from tests.support.slots import TOY, toy_config
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import download
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import StorageError, TrialflowError

pytestmark = [pytest.mark.slots, pytest.mark.server]
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

STEPS = "--save_steps 3 --eval_strategy steps --eval_steps 3"
NOT_RESTORED = ("runtime", "per_second", "num_tokens")  # TRL counts tokens from each start
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
}


def hf_config(here: Path, *arguments: str, slots: int = 1, kill: str = "-", way: str = "-") -> Any:
    """A run whose epochs have 10 steps on one slot."""
    given = " ".join(arguments)
    entrypoint = (
        f"python3 hf_script.py {here} {kill} {way} --output_dir {here}/out --use_cpu True "
        f"--per_device_train_batch_size 1 --report_to none --disable_tqdm True --logging_steps 2 "
        f"{given}"
    )
    return toy_config(
        here, entrypoint=entrypoint, searcher={"metric": "eval_loss"}, max_restarts=1,
        resources={"slots_per_trial": slots},
    )  # fmt: skip


def steps_of(here: Path) -> list[int]:
    return [json.loads(line) for line in (here / "steps").read_text().splitlines()]


def saved(here: Path, trial: str) -> dict[int, Manifest]:
    """The trial's checkpoints, by their steps."""
    store = CheckpointStore(f"file://{here}/checkpoints")
    manifests = store.list(trial)
    found = {each.progress.batches_trained: each for each in manifests}
    assert len(found) == len(manifests), "a step was stored twice"
    return found


def content(here: Path, trial: str, step: int) -> dict[str, Any]:
    """A checkpoint's files: digests, and what the Trainer has noted, without times."""
    store = CheckpointStore(f"file://{here}/checkpoints")
    manifest = saved(here, trial)[step]
    found: dict[str, Any] = {each.path: each.digest for each in manifest.files}
    name = f"checkpoint-{step}/trainer_state.json"
    state = json.loads(store.storage.read(layout.file_key(manifest.uuid, name)) or b"")
    found[name] = [
        {key: value for key, value in line.items() if not key.endswith(NOT_RESTORED)}
        for line in state["log_history"]
    ]
    del found["metadata.json"]  # it names the trial
    return found


@pytest.mark.parametrize("way", ["-", pytest.param("det", marks=pytest.mark.long)])
def test_a_trainer_reports_stores_and_resumes(here: Path, way: str) -> None:
    """Metrics and checkpoints are the run's. It resumes at the step of its last one, and says what
    the Trainer makes of changed arguments."""
    first = train(hf_config(here, STEPS, "--max_steps 4", way=way))
    assert (first.batches_trained, first.changes) == (4, [])
    assert {"loss", "learning_rate", "batches", "epochs"} <= first.training_metrics.keys()
    assert "eval_loss" in first.validation_metrics
    stored = saved(here, first.trial)
    assert sorted(stored) == [3, 4]  # the last step, too
    names = {entry.path for entry in stored[4].files}
    assert {"metadata.json", "checkpoint-4/model.safetensors", "checkpoint-4/my_data.json"} <= names
    for step in (3, 4):  # evaluated before it was stored
        validation = stored[step].metrics["validation"]
        assert (validation["batches"], validation["epochs"]) == (step, step / 10)
        assert validation["eval_loss"] == stored[step].progress.best_metric

    # Its length is the Trainer's; a step has one sample. Counters of steps are no curves.
    assert first.throughput["samples_per_second"] == first.throughput["batches_per_second"] > 0
    report = Path(first.report_path).read_text()
    assert "batch 4 of 4" in report
    titles = {line.split(":")[0].split('"')[1] for line in report.splitlines() if "title" in line}
    curves = {"loss", "eval_loss", "grad_norm", "learning_rate", "throughput (samples/s)"}
    assert titles - {"machine of the driver"} == curves

    (here / "out" / "checkpoint-9").mkdir()  # left by a run that was killed before its upload
    shutil.rmtree(here / "out" / "checkpoint-4")
    changed = "--max_steps 6 --learning_rate 0.001"
    second = train(hf_config(here, STEPS, changed, way=way), trial=first.trial)
    assert second.batches_trained == 6
    assert steps_of(here) == [0, 1, 2, 3, 4, 5]
    # Nothing else of a checkpoint: the script's modules may be there.
    assert {each.name for each in (here / "out").iterdir()} <= {
        *(f"checkpoint-{step}" for step in (3, 4, 6, 9)), "runs"
    }  # fmt: skip
    later = "its schedule after the next step and with the checkpoint's base rate: max_steps 4 -> 6"
    stays = "learning_rate stays 5e-05 (not 0.001), because it restores its optimizer"
    noted, report = saved(here, first.trial)[6].changes[-1], Path(second.report_path).read_text()
    for text in (f"The new values count: Trainer, {later}", f"Trainer: {stays}"):
        assert all(text in told for told in (". ".join(second.changes), noted, report))


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("--gradient_accumulation_steps 2", "4 samples of the epoch are left out"),
        ("--optim sgd", r"the optimizer \(optim\) was torch.AdamW .* and is torch.SGD now"),
        ("--lr_scheduler_type reduce_lr_on_plateau", "lr_scheduler_type was linear when"),
    ],
)
def test_what_would_train_wrongly_is_refused_before_the_first_step(
    here: Path, changed: str, says: str
) -> None:
    """By name, with the way to do it."""
    first = train(hf_config(here, "--max_steps 4 --save_steps 4"))
    with pytest.raises(TrialflowError, match=says) as refused:
        train(hf_config(here, "--max_steps 6 --save_steps 4", STEPS, changed), trial=first.trial)
    assert "or begin a new trial with the checkpoint's weights" in str(refused.value)
    assert steps_of(here) == [0, 1, 2, 3]


@pytest.mark.long
def test_a_trainer_does_not_resume_from_hidden_code(here: Path, tmp_path: Path) -> None:
    """DeepSpeed would unpickle the file without limits; the refusal names it before that."""
    first = train(hf_config(here, "--max_steps 2"))
    store, manifest = CheckpointStore(f"file://{here}/checkpoints"), saved(here, first.trial)[2]
    download(store, manifest.uuid, tmp_path / "other")
    inside = tmp_path / "other" / "checkpoint-2" / "global_step2"
    inside.mkdir()
    torch.save({"module": Trap(here / "sprung")}, inside / "mp_rank_00_model_states.pt")
    for reserved in (layout.MANIFEST_NAME, layout.CODE_NAME):
        (tmp_path / "other" / reserved).unlink()
    uuid = str(uuid4())
    store.announce_upload(first.trial, uuid, manifest.writer)
    files = upload_files(store, uuid, tmp_path / "other", 0)
    later = replace(manifest, uuid=uuid, files=files, code=None, created_at=utc_now())
    store.commit(later)
    with pytest.raises(TrialflowError, match=r"global_step2/mp_rank_00_model_states\.pt"):
        train(hf_config(here, "--max_steps 4"), trial=first.trial)
    assert not (here / "sprung").exists()


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_rules_are_told(here: Path, stage: int) -> None:
    """Its schedule takes the new rate, and its optimizer is asked which values it has."""
    (here / "ds.json").write_text(json.dumps({**ZERO, "zero_optimization": {"stage": stage}}))
    given = [f"--deepspeed {here}/ds.json --save_steps 4 --warmup_steps 2 --logging_steps 1"]
    before = "--max_steps 4 --learning_rate 0.001 --max_grad_norm 0.5 --weight_decay 0.1"
    first = train(hf_config(here, *given, before))
    after = "--max_steps 8 --learning_rate 0.01 --max_grad_norm 0.25 --weight_decay 0.3"
    second = train(hf_config(here, *given, after), trial=first.trial)
    [_, new, kept] = second.changes
    schedule = "Trainer, its schedule after the next step: max_steps 4 -> 8, learning_rate 0.001 ->"
    assert schedule in new
    assert second.training_metrics["learning_rate"] == pytest.approx(0.01)
    # ZeRO 2 restores its clipping, ZeRO 3 does not.
    clipping = "max_grad_norm stays 0.5 (not 0.25)" if stage == 2 else "max_grad_norm 0.5 -> 0.25"
    assert clipping in (kept if stage == 2 else new)
    assert "not used by the optimizer: weight_decay 0.1 -> 0.3 (it has 0.01)" in kept  # ds.json


@pytest.mark.long
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_a_trainer_that_is_killed_equals_one_that_is_not(here: Path, stage: int | None) -> None:
    """Weights, optimizer, learning rate, order of data, random numbers and metrics, bit for bit."""
    arguments = ["--num_train_epochs 2 --save_steps 2 --eval_strategy epoch --warmup_steps 3"]
    if stage is not None:
        (here / "ds.json").write_text(json.dumps({**ZERO, "zero_optimization": {"stage": stage}}))
        arguments.append(f"--deepspeed {here}/ds.json")
    whole = train(hf_config(here, *arguments, slots=2))
    expected = content(here, whole.trial, 10)
    assert {f"checkpoint-10/rng_state_{rank}.pth" for rank in (0, 1)} <= expected.keys()
    # Its epoch ends there: it was evaluated before it was stored.
    assert saved(here, whole.trial)[10].metrics["validation"]["batches"] == 10

    shutil.rmtree(here / "out")
    (here / "steps").unlink()
    killed = train(hf_config(here, *arguments, slots=2, kill="1:7"))
    assert (here / "killed").exists()
    steps = steps_of(here)
    begin = steps.index(7) + 1
    assert steps[begin] in (4, 6)  # the upload of the last one may not have ended
    assert steps[begin:] == list(range(steps[begin], 10))
    assert content(here, killed.trial, 10) == expected


@pytest.mark.long
def test_the_best_model_is_loaded_at_the_end_of_a_killed_run(here: Path) -> None:
    """As of one that is not killed. The folders that the limit removes are checkpoints still."""
    arguments = [
        "--max_steps 8 --save_steps 2 --eval_strategy steps --eval_steps 2",
        "--load_best_model_at_end True --save_total_limit 1 --metric_for_best_model eval_loss",
        "--greater_is_better True",  # so that an early one is the best
    ]
    train(hf_config(here, *arguments))
    whole = json.loads((here / "best.json").read_text())
    best, weights = whole
    assert best != "checkpoint-8", "the last one is the best: the test shows nothing"

    shutil.rmtree(here / "out")
    (here / "best.json").unlink()
    killed = train(hf_config(here, *arguments, kill="0:7"))
    assert (here / "killed").exists()
    assert json.loads((here / "best.json").read_text()) == whole
    stored = saved(here, killed.trial)
    assert sorted(stored) == [2, 4, 6, 8]
    step = int(best.removeprefix("checkpoint-"))
    download(CheckpointStore(f"file://{here}/checkpoints"), stored[step].uuid, here / "stored")
    loaded = load_file(here / "stored" / best / "model.safetensors")
    assert loaded["transformer.wte.weight"].tolist() == weights


@pytest.mark.long
def test_trls_trainer_has_the_same_callback(here: Path) -> None:
    """A run of SFTTrainer that is killed equals one that is not."""
    pytest.importorskip("trl")
    arguments = ["--max_steps 6 --save_steps 2"]
    whole = train(hf_config(here, *arguments, way="sft"))
    expected = content(here, whole.trial, 6)
    assert "checkpoint-6/tokenizer.json" in expected

    shutil.rmtree(here / "out")
    killed = train(hf_config(here, *arguments, way="sft", kill="0:5"))
    assert (here / "killed").exists()
    assert content(here, killed.trial, 6) == expected


@pytest.mark.long
def test_accelerates_state_is_a_checkpoint(here: Path) -> None:
    """`save_state` into `store_path`, `load_state` from `restore_path`: equal after a kill."""
    stored = []
    for kill in ("-", "1:10"):
        config = toy_config(
            here, entrypoint=f"python3 accelerate_script.py {here} {kill}", max_restarts=1,
            searcher={"metric": "loss"},
        )  # fmt: skip
        result = train(config)
        stored.append({each.path: each.digest for each in saved(here, result.trial)[16].files})
    assert (here / "killed").exists()
    assert stored[0] == stored[1]
    assert {"random_states_0.pkl", "random_states_1.pkl", "optimizer.bin"} <= stored[0].keys()
    assert steps_of(here)[16:27] == list(range(11))
    assert steps_of(here)[27] in (6, 9)


@pytest.mark.long
def test_an_upload_beside_training_that_fails_ends_the_run(here: Path) -> None:
    """Soon, and with its reason."""
    config = hf_config(here, f"--max_steps {10**6} --save_steps 3", kill="storage:4")
    with pytest.raises(StorageError, match="checkpoints"):
        train(config)
    assert len(steps_of(here)) < 10**5


@pytest.mark.long
def test_a_trainer_with_torchrun_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Prefect. A killed rank ends all; the same script, started again, continues."""
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", "latest")
    arguments = f"--output_dir {tmp_path}/out --use_cpu True --max_steps 6 --save_steps 2"
    script = [str(TOY / "hf_script.py"), str(tmp_path), "1:5", "-"]
    for _ in range(2):
        output = start("torchrun", tmp_path, 2, *script, *f"{arguments} --report_to none".split())
    begun, continued = steps_of(tmp_path)[:6], steps_of(tmp_path)[6:]
    assert begun == list(range(6)), output
    assert continued in (list(range(begin, 6)) for begin in (2, 4)), output


@pytest.mark.long
def test_a_trainer_that_is_stopped_saves_its_step(here: Path) -> None:
    """It is not evaluated first, and continues with the next step."""
    config = hf_config(here, STEPS, f"--max_steps {10**6}")
    stopped = train_until_stopped(config, 20)
    end = stopped.batches_trained
    assert stopped.stopped_early
    assert max(saved(here, stopped.trial)) == end
    train(hf_config(here, STEPS, f"--max_steps {end + 2}"), trial=stopped.trial)
    assert steps_of(here) == list(range(end + 2))
