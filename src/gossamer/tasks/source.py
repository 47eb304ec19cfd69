"""Where a task comes from: a built-in source, or a function of the user's."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from gossamer.config.registry import Component, FunctionComponent
from gossamer.errors import BadInput, cause
from gossamer.tasks.task import Task


class TaskSource(Component):
    """Base of the components of kind ``task``: parameters that :meth:`load` turns into a :class:`Task`."""

    @abstractmethod
    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task.

        Args:
            data_root: a folder with ``hub/<hub id>/...`` to read instead of the Hugging Face hub, or None.
            seed: the experiment's seed; whatever is drawn is keyed by it.

        Raises:
            BadInput: when the data is missing, damaged, or not what the parameters ask for.
        """


def load_task(component: Component, data_root: Path | None, seed: int) -> Task:
    """The task behind a component of kind ``task``: a :class:`TaskSource`, or a user's ``"module:function"``.

    Args:
        component: what the experiment's ``task`` says.
        data_root: a folder with ``hub/<hub id>/...`` to read instead of the Hugging Face hub, or None.
        seed: the experiment's seed.

    Raises:
        BadInput: for a component that is no source of tasks, a function that returns something else than a
            :class:`Task`, or data that can't be used.
    """
    if not isinstance(component, TaskSource | FunctionComponent):
        raise BadInput(
            f"task: {component.name_of()!r} is no source of tasks; accepted: a TaskSource, or a function that"
            " returns a Task"
        )
    try:
        task = component.load(data_root, seed) if isinstance(component, TaskSource) else component.call()
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"task: {component.name_of()!r} raised {cause(error)}") from error
    if not isinstance(task, Task):
        raise BadInput(
            f"task: {component.name_of()!r} returned {type(task).__name__}; accepted: gossamer.Task"
        )
    return task
