"""A loop with accelerate, without a Trainer, as a Core API script: ``accelerate_script.py FOLDER``.

It notes rank 0's steps in FOLDER. ``RANK:STEP`` as a second argument: kill RANK at STEP, once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import trial_core

FOLDER, KILL = Path(sys.argv[1]), sys.argv[2]
STEPS = 16


def kill_once(rank: int, step: int) -> None:
    if f"{rank}:{step}" == KILL and not (FOLDER / "killed").exists():
        (FOLDER / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    set_seed(1)
    # The order of data is that of the seed and the epoch alone.
    data = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=data)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    loader = torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    with trial_core.init() as context:
        uuid, step, should_stop = context.info.latest_checkpoint, 0, False
        if uuid is not None:
            step = context.checkpoint.get_metadata(uuid)["steps_completed"]
        while step < STEPS and not should_stop:
            epoch, done = divmod(step, len(loader))
            batches = accelerator.skip_first_batches(loader, done)
            batches.set_epoch(epoch)
            for batch in batches:
                if uuid is not None:  # now: to begin an epoch draws random numbers
                    with context.checkpoint.restore_path(uuid) as path:
                        accelerator.load_state(str(path))
                    uuid = None
                if accelerator.is_main_process:
                    with (FOLDER / "steps").open("a") as file:
                        file.write(f"{step}\n")
                kill_once(accelerator.process_index, step)
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                should_stop = context.preempt.should_preempt()
                if step % 3 == 0 or step == STEPS or should_stop:
                    mean = accelerator.reduce(loss.detach(), "mean")
                    if accelerator.is_main_process:
                        context.train.report_training_metrics(step, {"loss": mean})
                    metadata = {"steps_completed": step}
                    stored = context.checkpoint.store_path(metadata, shard=True, wait=False)
                    with stored as (path, _):
                        accelerator.save_state(str(path))
                if should_stop or step == STEPS:
                    break


if __name__ == "__main__":
    main()
