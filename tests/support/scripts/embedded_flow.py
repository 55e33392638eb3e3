"""Runs a small flow on the embedded server: ``embedded_flow.py TASKS [hold]``.

With ``hold`` the flow prints a link to the page of its run, and waits until it is stopped.
"""

from __future__ import annotations

import sys
import time

from trialflow.flows.server.embedded_server import prefect_api


def main(tasks: int, hold: bool) -> None:
    print("begin", flush=True)
    with prefect_api() as api:
        from prefect import flow, get_run_logger, runtime, task
        from prefect.cache_policies import NO_CACHE

        @task(cache_policy=NO_CACHE, task_run_name="square {number}")
        def square(number: int) -> int:
            get_run_logger().info("squared %d", number)
            return number * number

        @flow(name="squares")
        def squares() -> int:
            get_run_logger().info("squaring")
            beside = square.submit(tasks)
            total = sum(square(number) for number in range(tasks)) + beside.result()
            if hold:
                wait(f"{api.ui_url}/runs/flow-run/{runtime.flow_run.id}?tab=TaskRuns")
            return total

        def wait(page: str) -> None:
            try:
                print(api.login.link(page) if api.login else page, flush=True)
                time.sleep(600)
            except KeyboardInterrupt:
                print("the flow is interrupted", flush=True)
                raise

        try:
            print(f"sum {squares()}", flush=True)
        except KeyboardInterrupt:
            print("the command is interrupted", flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), "hold" in sys.argv)
