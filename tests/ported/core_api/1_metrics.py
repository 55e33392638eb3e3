"""Stage 1: reports metrics."""

import logging

import determined as det


def main(core_context: det.core.Context, increment_by: int) -> None:
    x = 0
    for batch in range(12):
        x += increment_by
        steps_completed = batch + 1
        logging.info(f"x is now {x}")
        if steps_completed % 5 == 0:
            core_context.train.report_training_metrics(
                steps_completed=steps_completed, metrics={"x": x}
            )
    core_context.train.report_validation_metrics(steps_completed=steps_completed, metrics={"x": x})


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    with det.core.init() as core_context:
        main(core_context=core_context, increment_by=3)
