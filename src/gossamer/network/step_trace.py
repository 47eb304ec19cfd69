"""A compute profile from measured step times."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Literal

from gossamer.config.registry import FilePath, register
from gossamer.network.compute import ComputeProfile
from gossamer.network.tables import read_number, read_records
from gossamer.randomness import generator


@register("compute", "trace")
class StepTrace(ComputeProfile):
    """Steps take as long as a file says: CSV with the columns ``node`` and ``seconds_per_step``.

    A name in the column ``node`` stands for one measured device. Its rows, one or more, are the times of its successive
    steps, which begin again after the last.

    Args:
        path: the file; .csv or .csv.gz.
        assign: node k is device k mod their number, in the order of the file ("in-order"), or one that is "drawn" for it.
    """

    path: FilePath
    assign: Literal["in-order", "drawn"] = "in-order"

    _device: ClassVar[tuple[int, ...]] = ()
    """Of each node; settled() says which."""

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        devices = len(self._devices)  # reads the file, or says what is wrong with it
        device = tuple(
            rank % devices
            if self.assign == "in-order"
            else int(generator(seed, "compute.trace", rank).integers(devices))
            for rank in range(nodes)
        )
        return self.model_copy(update={"_device": device})

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        times = self._devices[self._device[rank]]
        return times[step % len(times)]

    @cached_property
    def _devices(self) -> list[list[float]]:
        devices: dict[str, list[float]] = {}
        for where, record in read_records(self.path, "compute.path", ("node", "seconds_per_step")):
            seconds = read_number(record["seconds_per_step"], f"{where}, seconds_per_step")
            devices.setdefault(record["node"], []).append(seconds)
        return list(devices.values())
