"""LEAF's models (Caldas et al., 2018, github.com/TalwalkarLab/leaf, folder models), with torch's layers: an LSTM has two
bias vectors where TensorFlow's has one."""

from __future__ import annotations

from jaxtyping import Float, Integer
from pydantic import PositiveInt
from torch import Tensor, nn

from gossamer.config.registry import register
from gossamer.tasks.models import Apply, Shape


@register("model", "leaf-cnn")
class LeafCNN(nn.Sequential):
    """LEAF's model of FEMNIST: two blocks of 5×5 convolution (32, 64), ReLU and 2×2 max pooling, and linear layers of
    ``width`` and the classes: 6,603,710 parameters for 1×28×28 pixels and 62 classes; decentralizepy's has a width of
    512."""

    def __init__(self, shape: Shape = (1, 28, 28), classes: int = 62, width: PositiveInt = 2048) -> None:
        channels, height, columns = shape
        layers: list[nn.Module] = []
        for inputs, outputs in ((channels, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        hidden = nn.Linear(64 * (height // 4) * (columns // 4), width)
        super().__init__(*layers, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(width, classes))


@register("model", "celeba-cnn")
class CelebACNN(nn.Sequential):
    """LEAF's model of CelebA: four blocks of 3×3 convolution (32), batch normalisation, 2×2 max pooling and ReLU, and a
    linear layer: 31,202 parameters for 3×84×84 pixels and two classes. As there, normalisation is by the batch in
    evaluations too, so that there are no buffers, and pixels are 0 to 255."""

    def __init__(self, shape: Shape = (3, 84, 84), classes: int = 2) -> None:
        channels, height, width = shape
        layers: list[nn.Module] = [Apply(Tensor.float)]
        for _ in range(4):
            convolution = nn.Conv2d(channels, 32, kernel_size=3, padding=1)
            norm = nn.BatchNorm2d(32, track_running_stats=False)
            layers += [convolution, norm, nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
            channels, height, width = 32, -(-height // 2), -(-width // 2)
        super().__init__(*layers, nn.Flatten(), nn.Linear(32 * height * width, classes))


class _WordLSTM(nn.Module):
    """An embedding of words and two LSTM layers, all of one width."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def outputs(self, words: Integer[Tensor, "samples length"]) -> Float[Tensor, "samples length width"]:
        found: Tensor = self.lstm(self.embedding(words.long()))[0]
        return found


@register("model", "sent140-lstm")
class Sent140LSTM(_WordLSTM):
    """LEAF's model of Sentiment140, with embeddings that are learned: linear layers of 128 and the classes over the last
    output; 1,174,786 parameters for 10,000 words."""

    def __init__(self, words: int = 10_000, classes: int = 2, width: PositiveInt = 100) -> None:
        super().__init__(words, width)
        self.fc1, self.fc2 = nn.Linear(width, 128), nn.Linear(128, classes)

    def forward(self, words: Integer[Tensor, "samples length"]) -> Float[Tensor, "samples classes"]:
        scores: Tensor = self.fc2(self.fc1(self.outputs(words)[:, -1]))
        return scores


@register("model", "next-word-lstm")
class NextWordLSTM(_WordLSTM):
    """LEAF's model of Reddit: a linear layer over each output; 6,182,672 parameters for 10,000 words."""

    def __init__(self, classes: int = 10_000, width: PositiveInt = 256) -> None:
        super().__init__(classes, width)
        self.linear = nn.Linear(width, classes)

    def forward(self, words: Integer[Tensor, "samples length"]) -> Float[Tensor, "samples length words"]:
        scores: Tensor = self.linear(self.outputs(words))
        return scores
