"""The variables that tell a rank its place."""

from __future__ import annotations

import ast
import inspect

from deepspeed.launcher import launch

from trial_core.common.python_source import without_collections
from trial_core.processes.slots.launcher import MachineShare, place_variables
from trial_core.rank.collectives import rendezvous


def of_deepspeeds_launcher() -> set[str]:
    """The variables that DeepSpeed's launcher always sets: ``current_env[NAME] = ...``."""
    with without_collections():
        tree = ast.parse(inspect.getsource(launch))
    (main,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    names = {
        eval(ast.unparse(target.slice), vars(launch))  # a constant of DeepSpeed's
        for node in ast.walk(main)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "current_env"
    }
    return names - {"OMP_NUM_THREADS"}  # with --bind_cores_to_rank


def test_a_rank_gets_what_other_launchers_set() -> None:
    """Those of torchrun, and all of DeepSpeed's: its checkpoint writers read CROSS_RANK."""
    share = MachineShare(3, 2, 7, ("10.0.0.1", 2345), "10.0.0.2", node=1, nodes=4)
    place = place_variables(share, 1)
    assert place == {
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345", "WORLD_SIZE": "7", "RANK": "4",
        "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "GROUP_RANK": "1",
        "CROSS_RANK": "1", "CROSS_SIZE": "4",
    }  # fmt: skip
    expected = of_deepspeeds_launcher()
    assert {"RANK", "CROSS_SIZE"} <= expected <= place.keys()
    assert expected <= rendezvous.host_single_rank().keys()
