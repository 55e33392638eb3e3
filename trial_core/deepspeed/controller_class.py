"""`DeepSpeedTrial.trial_controller_class`, found when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trial_core.controller.controller import Controller


class ControllerClass:
    """A class attribute that is the controller: which itself imports trials, hence so late."""

    def __get__(self, instance: object, owner: type) -> type[Controller]:
        from trial_core.controller.controller import Controller

        return Controller
