"""`trialflow`: the command line's entry point. Runs a command and turns errors into exit codes.

`trialflow.deployments.cli.console` lists the exit codes. A command imports Prefect and fsspec only
when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from trial_core.errors import TrialflowError
from trialflow.deployments.cli import (
    config,
    console,
    control,
    deploy,
    doctor,
    evaluate,
    export,
    init,
    jobset,
    join,
    logs,
    mcp_server,
    migrate,
    models,
    retrain,
    runs,
    search,
    train,
    tune_batch,
    up,
)
from trialflow.deployments.cli.checkpoints import commands


def _shown_default(value: object) -> object:
    """Return the default that `--help` shows: nothing for flags and for unset options."""
    return None if value is None or value is False or value == "" else value


app = App(
    name="trialflow",
    help="Train PyTorch and DeepSpeed models as Prefect flows, with checkpoints in object storage.",
    version=lambda: f"trialflow {importlib.metadata.version('trialflow')}",
    help_epilogue="Runs are kept in ./trialflow-runs; set TRIALFLOW_HOME to use another folder.",
    help_format="markdown",
    default_parameter=Parameter(negative=(), show_default=_shown_default),
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
app.command(init.init)
app.command(migrate.migrate)
app.command(train.train)
app.command(tune_batch.tune_batch)
app.command(logs.logs)
app.command(control.start)
app.command(control.suspend)
app.command(control.resume)
app.command(control.cancel)
app.command(evaluate.evaluate)
app.command(retrain.retrain)
app.command(config.config)
app.command(commands.app)
app.command(runs.app)
app.command(search.app)
app.command(models.app)
app.command(export.export)
app.command(up.up)
app.command(deploy.deploy)
app.command(retrain.data_arrived)
app.command(up.worker)
app.command(join.join)
app.command(jobset.jobset)
app.command(doctor.doctor)
app.command(mcp_server.mcp)
app.register_install_completion_command(
    help="Write completion for the shell that calls this (bash, zsh, fish), and have it load that."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    _keep_the_terminal_clean()
    try:
        code = app(arguments)
        sys.stdout.flush()
    except CycloptsError as error:
        console.error(" ".join(str(error).split()))
        unused = error.unused_tokens if isinstance(error, UnusedCliTokensError) else None
        if any("=" in token for token in unused or []):
            console.note("give --set once for each key=value")
        console.note(f"see: {' '.join(['trialflow', *(error.command_chain or [])])} --help")
        return console.REFUSED
    except TrialflowError as error:
        console.report(error)
        return console.exit_code(error)
    except KeyboardInterrupt:
        console.error("stopped by Ctrl-C")
        return console.INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has closed it. Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return console.FAILED
    except Exception as error:  # noqa: BLE001 - the top frame: reports and records the error
        console.report_bug(error)
        return console.BUG
    return code if isinstance(code, int) else 0


def _keep_the_terminal_clean() -> None:
    """Hide libraries' warnings unless -W is given; print characters a terminal lacks as "?"."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    console.show_warnings()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
