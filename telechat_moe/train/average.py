"""A moving average of the weights beside them; training does not see it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from telechat_moe.sharding.shards import EMA


class WeightAverage:
    """The average of some weights, float32 like these, in the memory of a CPU process.

    The first update copies the weights, as torch's ``AveragedModel`` does.

    Args:
        weights: Parameters by name; the average follows their memory.
        decay: Share of the average that an update keeps.
    """

    def __init__(self, weights: Mapping[str, Parameter], decay: float) -> None:
        self.decay = decay
        self.weights = dict(weights)
        self.averages = {
            f"{EMA}.{name}": Parameter(
                Tensor(w.asnumpy().copy()), name=f"{EMA}.{name}", requires_grad=False
            )
            for name, w in weights.items()
        }

    def update(self, number: int, applied: Tensor) -> None:
        """Average in the weights after an update, whose number counts from 1, if it was applied; on CPU the step has ended."""
        if not applied.asnumpy():
            return
        if number == 1:
            self.begin()
            return
        rate = np.float32(1.0 - self.decay)
        for average, weight in zip(self.averages.values(), self.weights.values(), strict=True):
            # On CPU asnumpy() is the memory of the parameter.
            mean, now = average.asnumpy(), weight.asnumpy()
            mean += rate * (now - mean)

    @staticmethod
    def absence_note(source: Path) -> str:
        """Return the note for the user that a checkpoint holds no average."""
        return f"{source.name} holds no average of the weights; it begins with its weights"

    def begin(self) -> None:
        """Set the average to the present weights."""
        for average, weight in zip(self.averages.values(), self.weights.values(), strict=True):
            average.asnumpy()[...] = weight.asnumpy()


class DeviceAverage(WeightAverage):
    """The same on a device: a graph computes it, and the host does not wait.

    Args:
        run: Runs a cell on a device that holds shards.
    """

    def __init__(
        self, weights: Mapping[str, Parameter], decay: float, run: Callable[..., object]
    ) -> None:
        super().__init__(weights, decay)
        self.run = run
        self.step = AverageStep(ParameterTuple(self.averages.values()), decay)

    def update(self, number: int, applied: Tensor) -> None:
        """See :meth:`WeightAverage.update`; what was applied the device knows."""
        values = (weight.value() for weight in self.weights.values())
        self.run(self.step, applied, Tensor(number == 1), *values)

    def begin(self) -> None:
        """See :meth:`WeightAverage.begin`."""
        for average, weight in zip(self.averages.values(), self.weights.values(), strict=True):
            ops.assign(average, weight.value())


class AverageStep(nn.Cell):
    """Average in the weights after an update."""

    def __init__(self, averages: ParameterTuple, decay: float) -> None:
        super().__init__(auto_prefix=False)
        self.averages, self.rate = averages, Tensor(np.float32(1.0 - decay))
        self.subtract, self.scale, self.add = ops.Sub(), ops.Mul(), ops.Add()
        self.select, self.assign = ops.Select(), ops.Assign()

    def construct(self, applied: Tensor, begins: Tensor, *weights: Tensor) -> Tensor:
        """Change the averages where the update was ``applied``; those that begin become the weights. Return True."""
        for i in range(len(self.averages)):
            mean, weight = self.averages[i], weights[i]
            moved = self.add(mean, self.scale(self.rate, self.subtract(weight, mean)))
            moved = self.select(begins, weight, moved)
            self.assign(mean, self.select(applied, moved, mean))
        return Tensor(True)
