"""Loads a checkpoint of the toy's model with bare DeepSpeed, and trains a batch of it.

load_plain_deepspeed.py FOLDER STAGE IS_UNIVERSAL: prints the weights, the learning rate and the
number of steps as JSON, on rank 0.
"""

import json
import sys

import deepspeed
import torch

# Only inference calls it, and its compilation takes minutes on a busy machine.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

folder, stage, is_universal = sys.argv[1:]
model = torch.nn.Sequential(
    torch.nn.Linear(2, 16), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(16, 2)
)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 4,
        "zero_optimization": {"stage": int(stage)},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "checkpoint": {"load_universal": is_universal == "1"},
    },
)
path, _ = engine.load_checkpoint(folder)
assert path is not None
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    weights = {name: each.tolist() for name, each in model.state_dict().items()}
found = {"weights": weights, "lr": engine.get_lr(), "steps": engine.global_steps}
loss = engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 2)).square().mean()
engine.backward(loss)
engine.step()
if engine.global_rank == 0:
    print(json.dumps(found))
torch.distributed.destroy_process_group()  # else its threads may end the process with an abort
