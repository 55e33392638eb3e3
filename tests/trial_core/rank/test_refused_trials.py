"""Trials that break a rule of the trial API, on real ranks, each with its message."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest
from deepspeed.accelerator import get_accelerator

from tests.support.ranks import run_ranks
from tests.support.slots import TOY, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.messages import BuildTrial
from trial_core.processes.slots.rank_main import TRIAL_MODULES
from trial_core.pytorch.sharded_model import CPU_RANKS_ADD_UP

pytestmark = pytest.mark.slots
SCRIPT = TOY.with_name("scripts") / "refused.py"


@dataclass
class Case:
    """A trial, the stage that rejects it, and the message: its beginning, and other parts."""

    entrypoint: str
    until: Literal["build", "load", "train", "validate", "save", "everything", "weights"]
    begins: str
    contains: tuple[str, ...] = ()
    hparams: dict[str, Any] = field(default_factory=dict)


TOO_SMALL = "the validation set is too small for pipeline parallelism, where"
NO_GROUP = {"validation_samples": 5, "accumulation": 4}
IN_GROUPS = "gradient_accumulation_steps = 4 micro-batches"
ACCEPTED = "not refused"
BATCH = {"global_batch_size": 8}
NO_STEP = "DeepSpeed model engine did not train for gradient accumulation steps: "

REFUSED = {
    "no engine": Case(
        "bad_trials:NoEngine", "build",
        "NoEngine.__init__ wrapped no engine; pass what deepspeed.initialize returns first to",
    ),
    "batch sizes": Case(
        "bad_trials:RefusedBatchSize", "build",
        "the DeepSpeed config's train_batch_size is ",
        contains=("data-parallel ranks train ", "resources.slots_per_trial that divides"),
    ),
    "fp16": Case(
        "engine_trials:OwnConfig", "build",
        "DeepSpeed rejects the trial's configuration: Type fp16 is not supported on your device.",
        hparams={"ds_config": {"fp16": {"enabled": True}}},
    ),
    "a compiled part": Case(
        "compiled_trials:CompiledEngine", "build",
        "DeepSpeed's ZeRO-3 has taken 4 parameters from modules that torch.compile has wrapped: ",
        contains=("blocks.0.scale, ", "engine.compile(...)"),
        hparams={"compiled": "parts", "ds_config": {"zero_optimization": {"stage": 3}}},
    ),
    "a removed key": Case(
        "engine_trials:OwnConfig", "build", "DeepSpeed has removed amp: use fp16, bf16 or ",
        hparams={"ds_config": {"amp": {"enabled": True}}},
    ),
    "a misspelt key": Case(
        "engine_trials:OwnConfig", "build",
        "the DeepSpeed config has an unknown key zero_optimization.overlap_com = True; did you "
        'mean "overlap_comm"?',
        hparams={"ds_config": {"zero_optimization": {"stage": 2, "overlap_com": True}}},
    ),
    "a checkpoint writer that DeepSpeed cannot build": Case(
        "engine_trials:OwnConfig", "build",
        "the DeepSpeed config's checkpoint.writer is not supported: ",
        hparams={"ds_config": {"checkpoint": {"writer": {"type": "python"}}}},
    ),
    "a checkpoint writer": Case(
        "engine_trials:OwnConfig", "build",
        "the DeepSpeed config's checkpoint.writer is not supported: ",
        hparams={"ds_config": {"checkpoint": {"writer": {
            "type": "python", "data_parallel": "replica",
        }}}},
    ),
    "a step after each micro-batch": Case(
        "engine_trials:OneStep", "build",
        "the DeepSpeed config's managed_gradient_accumulation is false, so that each engine.step()",
        contains=("train_batch is called 3 times a batch", "disable_auto_grad_accumulation()"),
        hparams={
            "accumulation": 3, "by_hand": False,
            "ds_config": {"managed_gradient_accumulation": False},
        },
    ),
    "a pipeline after another engine": Case("bad_trials:LatePipeline", "train", ACCEPTED),
    "unequal pipelines": Case("bad_trials:UnequalPipelines", "train", ACCEPTED),
    "a layout in which rank 0 alone reports": Case(
        "parallel_trials:RankZeroReports", "everything", ACCEPTED
    ),
    "mpus that do not fit": Case(
        "parallel_trials:MisfitMPU", "build",
        "the ModelParallelUnits of the ranks do not fit together: every rank must give the same "
        "data_parallel_world_size n, and together they must give each data_parallel_rank from 0 to "
        "n - 1; seen, rank by rank: ['0 of 2', '0 of 2']",
    ),
    "validated in both ways": Case(
        "evaluation_trials:BothWays", "build",
        "BothWays defines both of evaluate_batch and evaluate_full_dataset; define exactly one",
    ),
    "validated in neither way": Case(
        "evaluation_trials:NeitherWay", "build",
        "NeitherWay defines neither of evaluate_batch and",
    ),
    "one rank alone under ZeRO-3": Case(
        "evaluation_trials:FullDataset", "build",
        "FullDataset defines evaluate_full_dataset, which runs on a single rank, but its engine's "
        "forward pass needs the other ranks",
        hparams={"zero_stage": 3},
    ),
    "nothing to load": Case(
        "bad_trials:NoTrainingLoader", "load",
        "build_training_data_loader returned None on a rank that needs data; return a "
        "trial_core.pytorch.DataLoader",
    ),
    "nothing to train on": Case(
        "bad_trials:EmptyTraining", "load",
        "the training loader is empty: it has no batch at all",
    ),
    "a loader that does not shard": Case(
        "bad_trials:PlainLoader", "load",
        "build_training_data_loader returned torch.utils.data.dataloader.DataLoader; return a "
        "trial_core.pytorch.DataLoader",
    ),
    "a reducer with a metric's name": Case(
        "bad_trials:DuplicateMetricName", "train",
        "training metric(s) loss are both returned by the trial and given by a wrapped reducer; "
        "rename one of them",
    ),
    "half a batch": Case(
        "bad_trials:StepsOnce", "train",
        NO_STEP + "2 call(s) of train_batch led to 1 micro-step(s) of the first engine; expected 2",
        hparams={"accumulation": 2},
    ),
    "no metrics, and half a batch": Case(
        "bad_trials:ReturnsNothing", "train",
        "train_batch must return a dictionary mapping string names to metrics",
        hparams={"accumulation": 2},
    ),
    "no step": Case("bad_trials:ForgetsToStep", "train", ACCEPTED),
    "too little by hand": Case(
        "engine_trials:ByHandTooLittle", "train",
        NO_STEP + "1 call(s) of train_batch led to 3 micro-step(s) of the first engine; expected 4",
        ("each call must take as many micro-batches",),
        hparams={"accumulation": 4},
    ),
    "an engine that is trained more rarely": Case(
        "engine_trials:RareGenerator", "train", ACCEPTED
    ),
    "no whole group of micro-batches": Case(
        "parallel_trials:PipelineTrial", "validate", TOO_SMALL,
        (IN_GROUPS, "has 3 on some rank"), NO_GROUP,
    ),
    "no whole group, without a length": Case(
        "parallel_trials:UnsizedPipeline", "validate", TOO_SMALL,
        (IN_GROUPS, "fewer than that"), NO_GROUP,
    ),
    "more validation data than there is": Case(
        "evaluation_trials:TwoPerCall", "validate",
        "evaluate_batch asked for more micro-batches than the validation loader gave this rank, in "
        "call 1 of the validation",
        hparams={"validation_samples": 12},
    ),
    "no validation data": Case(
        "evaluation_trials:WithoutLength", "validate",
        "there are no validation metrics: the validation loader gave not a single batch",
        hparams={"validation_samples": 0},
    ),
    "a first checkpoint that cannot be restored": Case(
        "bad_trials:OverridesSave", "save",
        "the first checkpoint of this run cannot be restored, so it is not committed (TrialError: "
        'DeepSpeed found no checkpoint (tag "model0") in ',
        ("; a trial that overrides save must also override load", "verify_first: false"),
    ),
    "a save without a load": Case(
        "bad_trials:OverridesSave", "everything",
        'DeepSpeed found no checkpoint (tag "model0") in ',
        ("; a trial that overrides save must also override load",),
    ),
    "a save without a load_weights": Case(
        "bad_trials:OverridesSave", "weights",
        'DeepSpeed found no weights (tag "model0") in ',
        ("; a trial that overrides save must also override load_weights",),
    ),
    "parameters without a gradient": Case(
        "pytorch_trials:UnusedParameters", "train",
        "a backward pass of Heads did not reach all parameters, and each one must give every",
        ("context.wrap_model(model, find_unused_parameters=True)",),
    ),
    "parameters without a gradient, before another forward pass": Case(
        "pytorch_trials:HeadsInTurn", "train",
        "a backward pass of Heads did not reach all parameters, and each one must give every",
    ),
    "parameters with two gradients": Case(
        "pytorch_trials:Recomputes", "train",
        "a backward pass of Recomputing reached some parameters twice, and each one must give",
    ),
    "sparse gradients of several models": Case(
        "pytorch_trials:SparseEmbedding", "train",
        "a parameter of shape (5, 2) has a sparse gradient, and ranks cannot average it in "
        "step_optimizer; ",
        hparams={"unused": True},
    ),
    "a schedule of epochs without their length": Case(
        "pytorch_trials:UnknownEpochs", "train",
        "LRScheduler.StepMode.STEP_EVERY_EPOCH needs the length of an epoch, but the training",
    ),
    "nothing": Case("toy_trial:ToyTrial", "weights", ACCEPTED),
    "one of two models sharded": Case(
        "refused_sharding_trials:OneOfTwo", "build",
        "some of the trial's models are sharded with FSDP2 and others are not", hparams=BATCH,
    ),
    "an optimizer before its model is sharded": Case(
        "refused_sharding_trials:EarlyOptimizer", "build",
        "14 parameter tensor(s) of optimizer 0 belong to no wrapped model. FSDP2 replaces a "
        "model's parameters: construct the optimizer after context.wrap_model", hparams=BATCH,
    ),
    "an unknown sharding": Case(
        "refused_sharding_trials:Misspelt", "build",
        'wrap_model: sharding is "none" or "fsdp2", got \'fsdp\'', hparams=BATCH,
    ),
    "a sharded list of modules": Case(
        "refused_sharding_trials:NoForward", "build",
        "wrap_model cannot shard a ModuleList, which has no forward method", hparams=BATCH,
    ),
    "compression of a sharded model": Case(
        "refused_sharding_trials:LateCompression", "build",
        "wrap_optimizer(fp16_compression=True) comes too late for models that are sharded with",
        hparams=BATCH,
    ),
    "a sharded model on one rank": Case(
        "refused_sharding_trials:WholeSet", "build",
        "WholeSet defines evaluate_full_dataset, which runs on a single rank, but a forward pass "
        "of models sharded with FSDP2 needs the other ranks", hparams=BATCH,
    ),
    "a mesh of some ranks": Case(
        "refused_sharding_trials:OnHalfTheRanks", "build",
        "FSDPLinear's parameter weight is sharded over 1 of 2 ranks; pass fully_shard a device "
        "mesh of all ranks", hparams=BATCH,
    ),
    "an optimizer whose state differs by rank": Case(
        "refused_sharding_trials:OddOptimizer", "everything",
        "optimizer 0 (OwnMoments) does not divide its 'own' among the ranks as FSDP2 divides the "
        "parameter, of shape (", hparams=BATCH,
    ),
}  # fmt: skip
if CPU_RANKS_ADD_UP:
    REFUSED["a model that is sharded by hand over CPU ranks that add up"] = Case(
        "sharded_trials:ShardedByHand", "build",
        "FSDPNet is sharded over CPU ranks by fully_shard, with which torch", hparams=BATCH,
    )  # fmt: skip


LONG = {
    # Tests without ranks have their messages.
    "nothing to load", "nothing to train on", "a loader that does not shard",
    "a reducer with a metric's name", "mpus that do not fit", "a removed key",
    "a checkpoint writer",
    # Others are like them.
    "a checkpoint writer that DeepSpeed cannot build", "a pipeline after another engine",
    "unequal pipelines", "a layout in which rank 0 alone reports", "no metrics, and half a batch",
    "an engine that is trained more rarely", "no whole group, without a length",
    "a save without a load_weights", "parameters without a gradient, before another forward pass",
    "parameters with two gradients", "sparse gradients of several models",
    "one of two models sharded", "an unknown sharding", "a sharded list of modules",
    "compression of a sharded model", "a mesh of some ranks",
    "an optimizer whose state differs by rank", "validated in neither way",
    "a save without a load",
}  # fmt: skip
assert REFUSED.keys() >= LONG


@pytest.fixture(scope="module")
def messages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """The message of each selected trial, by rank. All trials share one start of two ranks."""
    selected = [
        item.callspec.params["what"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_a_rejected_trial.__name__
    ]
    requests = []
    for index, case in enumerate(REFUSED[what] for what in selected):
        folder = tmp_path_factory.mktemp(f"refused-{index}")
        config = toy_config(
            folder, entrypoint=case.entrypoint, hyperparameters=case.hparams,
            checkpointing={"verify_first": None if case.until == "save" else False},
        )  # fmt: skip
        build = BuildTrial(
            trial="toy-0000beef",
            experiment=config.model_dump(mode="json"),
            run_dir=str(folder),
            storage=CheckpointStore(config.checkpoint_storage.url).spec,
        )
        requests.append([msgspec.to_builtins(build), case.until])
    ranks: Any = run_ranks(
        SCRIPT.read_text(), 2, preload=TRIAL_MODULES, TRIALS=json.dumps(requests)
    )
    return [dict(zip(selected, messages, strict=True)) for messages in ranks]


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[pytest.mark.long] if what in LONG else []) for what in REFUSED],
)
def test_a_rejected_trial(messages: list[dict[str, str]], what: str) -> None:
    """The same error on every rank, with DeepSpeed's reason if it has one."""
    if what == "fp16" and get_accelerator().is_fp16_supported():
        pytest.skip(f"this device ({get_accelerator().device_name()}) computes in fp16")
    for rank in (0, 1):
        message = messages[rank][what]
        assert message.startswith(REFUSED[what].begins)
        assert [part for part in REFUSED[what].contains if part not in message] == []
