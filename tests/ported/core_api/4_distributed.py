"""Stage 4: several workers, which Determined's launcher for torch starts. Each adds the sum of what
all workers add; only the chief reports and stores."""

import logging

import determined as det
import torch.distributed as dist


def main(core_context: det.core.Context, increment_by: int) -> None:
    x, batch = 0, 0
    distributed = core_context.distributed
    for op in core_context.searcher.operations():
        while batch < op.length:
            x += sum(distributed.allgather(increment_by + distributed.rank))
            batch += 1
            if batch % 5 == 0:
                if distributed.rank == 0:
                    core_context.train.report_training_metrics(
                        steps_completed=batch, metrics={"x": x}
                    )
                    op.report_progress(batch)
                    with core_context.checkpoint.store_path({"steps_completed": batch}) as (
                        path,
                        _,
                    ):
                        path.joinpath("state").write_text(f"{x},{batch}")
                if core_context.preempt.should_preempt():
                    return
        if distributed.rank == 0:
            core_context.train.report_validation_metrics(steps_completed=batch, metrics={"x": x})
            op.report_completed(x)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    info = det.get_cluster_info()
    assert info is not None, "this example only runs on-cluster"
    dist.init_process_group("gloo")
    distributed = det.core.DistributedContext.from_torch_distributed()
    with det.core.init(distributed=distributed) as core_context:
        main(core_context, info.trial.hparams["increment_by"])
