"""Trains the toy's model with bare DeepSpeed, and saves it: plain_deepspeed.py FOLDER STAGE."""

import sys

import deepspeed
import torch

# Only inference calls it, and its compilation takes minutes on a busy machine.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

folder, stage = sys.argv[1:]
model = torch.nn.Sequential(
    torch.nn.Linear(2, 16), torch.nn.Dropout(0.0), torch.nn.Tanh(), torch.nn.Linear(16, 2)
)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 8,
        "zero_optimization": {"stage": int(stage)},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    },
)
size = engine.train_micro_batch_size_per_gpu()
for step in range(4):
    generator = torch.Generator().manual_seed(step + 100 * engine.global_rank)
    loss = engine(torch.randn(size, 2, generator=generator)).square().mean()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint(folder)
