"""`trialflow`, the command line: its commands, and what happens to their errors.

Exit codes are listed in `trialflow.deployments.cli.console`. Commands import what they need when they run,
so that help answers at once: neither torch nor Prefect nor fsspec is imported here.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from trial_core.errors import TrialflowError
from trialflow.deployments.cli import (
    console,
    data_arrived,
    deploy,
    doctor,
    evaluate,
    experiment_options,
    export,
    models,
    retrain,
    train,
    up,
    worker,
)
from trialflow.deployments.cli.checkpoints import commands

app = App(
    name="trialflow",
    help="Train DeepSpeed models as Prefect flows, with checkpoints in object storage.",
    version=lambda: f"trialflow {importlib.metadata.version('trialflow')}",
    help_epilogue="Set TRIALFLOW_HOME to keep runs elsewhere than in ./trialflow-runs.",
    help_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=False),
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
app.command(train.train)
app.command(evaluate.evaluate)
app.command(retrain.retrain)
app.command(experiment_options.config)
app.command(commands.app)
app.command(models.app)
app.command(export.export)
app.command(up.up)
app.command(deploy.deploy)
app.command(data_arrived.data_arrived)
app.command(worker.worker)
app.command(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    _keep_the_terminal_clean()
    try:
        code = app(arguments)
        sys.stdout.flush()
    except CycloptsError as error:
        console.error(" ".join(str(error).split()))
        unused = error.unused_tokens if isinstance(error, UnusedCliTokensError) else None
        if any("=" in token for token in unused or []):
            console.note("every key=value needs a --set of its own")
        console.note(f"see: {' '.join(['trialflow', *(error.command_chain or [])])} --help")
        return console.REFUSED
    except TrialflowError as error:
        console.report(error)
        return console.exit_code(error)
    except KeyboardInterrupt:
        console.error("stopped by Ctrl-C")
        return console.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return console.FAILED
    except Exception as error:  # noqa: BLE001 - the process's top frame: told, and written down
        console.report_bug(error)
        return console.BUG
    return code if isinstance(code, int) else 0


def _keep_the_terminal_clean() -> None:
    """Libraries' warnings are no business of the user's, unless -W asks for them."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger("trial_core").addHandler(console.OWN_WARNINGS)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows no "→" shows a "?" instead of a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
