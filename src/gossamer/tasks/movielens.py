"""MovieLens: ratings of films, predicted by matrix factorization."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.tasks.data import split_by_owner
from gossamer.tasks.models import MatrixFactorization
from gossamer.tasks.task import RootMean, Task, TaskSource

log = logging.getLogger("gossamer")

SITE = "https://files.grouplens.org/datasets/movielens"


@dataclass(frozen=True)
class Stars:
    """The scale of the ratings, and how predictions on it are evaluated.

    Args:
        least: the lowest rating.
        most: the highest one.
        step: from one rating to the next.
    """

    least: float
    most: float
    step: float

    def has(self, rating: float) -> bool:
        """Whether a user can give this rating."""
        return self.least <= rating <= self.most and (rating / self.step).is_integer()

    def clip(self, ratings: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
        """Ratings, clipped to the scale."""
        return ratings.clamp(self.least, self.most)

    def squared_error(
        self, outputs: Float[Tensor, " samples"], targets: Float[Tensor, " samples"]
    ) -> Float[Tensor, ""]:
        """Mean of (clip(output) - target)^2."""
        return squared_error(self.clip(outputs), targets)

    def absolute_error(
        self, outputs: Float[Tensor, " samples"], targets: Float[Tensor, " samples"]
    ) -> Float[Tensor, ""]:
        """Mean of |clip(output) - target|."""
        return (self.clip(outputs) - targets).abs().mean()

    def accuracy(
        self, outputs: Float[Tensor, " samples"], targets: Float[Tensor, " samples"]
    ) -> Float[Tensor, ""]:
        """Share of the samples whose clipped output, rounded to the next rating of the scale, is the target."""
        rounded = (self.clip(outputs) / self.step).round() * self.step
        return (rounded == targets).to(torch.float32).mean()


def squared_error(
    outputs: Float[Tensor, " samples"], targets: Float[Tensor, " samples"]
) -> Float[Tensor, ""]:
    """Mean of (output - target)^2."""
    return F.mse_loss(outputs, targets)


@dataclass(frozen=True)
class Release:
    """One of the published sets of ratings.

    Args:
        file: the file of ratings, below the data root.
        delimiter: between the fields of a line.
        header: whether the first line names the columns.
        stars: the scale of the ratings.
        counts: how many ratings, users and rated films there are.
    """

    file: str
    delimiter: str
    header: bool
    stars: Stars
    counts: tuple[int, int, int]


COLUMNS = ("userId", "movieId", "rating")
"""The fields that are read, by GroupLens's names; without a header they are the first three."""

RELEASES = {
    "latest-small": Release(
        "movielens/ml-latest-small/ratings.csv", ",", True, Stars(0.5, 5, 0.5), (100_836, 610, 9724)
    ),
    "100k": Release("movielens/ml-100k/u.data", "\t", False, Stars(1, 5, 1), (100_000, 943, 1682)),
}


class Ratings(NamedTuple):
    """Ratings in the order of their file, users and films by GroupLens's ids."""

    users: Int[np.ndarray, " ratings"]
    films: Int[np.ndarray, " ratings"]
    stars: Float[np.ndarray, " ratings"]


@register("task", "movielens")
class MovieLens(TaskSource):
    """MovieLens (Harper and Konstan, ACM TiiS 5(4), 2015): ratings of films, predicted by matrix factorization.

    Inputs are int64 (user, film) pairs [samples, 2], both counted from 0 in the order of their ids; targets
    are float32 ratings [samples]. The owner of a rating is its user, by GroupLens's id. The loss is the mean
    squared error of the outputs as they are. The metrics, over all evaluated ratings of all users together:

    - ``rmse``: square root of the mean squared error, outputs clipped to the scale of the ratings;
    - ``mae``: mean absolute error, outputs clipped;
    - ``rmse_unclipped``: square root of the loss. decentralizepy and the DivShare artifact report it as
      "loss" (theirs is the root of a mean over batches, where a smaller last batch counts as a whole one);
    - ``accuracy``: share of the ratings that the clipped output, rounded to the scale, equals.

    Each user's ratings are split into training and test ratings by a draw that is the same for every seed. All nodes are
    evaluated on one sample of all users' test ratings. (The artifact evaluates each node on the test ratings of its own
    users only.)

    The data is not downloaded: unpack ``ml-latest-small.zip`` or ``ml-100k.zip`` from
    https://files.grouplens.org/datasets/movielens/ in the data root's folder ``movielens``. Its README holds
    the terms.

    Args:
        release: ``latest-small`` (100,836 ratings of 9,724 films by 610 users, 0.5 to 5 stars by halves) or
            ``100k`` (100,000 of 1,682 by 943, whole stars from 1 to 5).
        dimensions: length of the factors of users and films.
        biased: add the mean training rating and a bias for each user and each film. The mean is one constant
            over all nodes' training ratings.
        train_fraction: share of each user's ratings that is for training; the others are for testing.
    """

    release: Literal["latest-small", "100k"] = "latest-small"
    dimensions: PositiveInt = 20
    biased: bool = True
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.7

    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task; see :meth:`TaskSource.load`. It does not depend on the seed."""
        release = RELEASES[self.release]
        ratings = read_ratings(_file(data_root, self.release), release)
        users, user = np.unique(ratings.users, return_inverse=True)
        films, film = np.unique(ratings.films, return_inverse=True)
        found = len(ratings.stars), len(users), len(films)
        if found != release.counts:
            log.warning(
                "movielens %s: %d ratings, %d users, %d films; as published %d, %d, %d",
                *(self.release, *found, *release.counts),
            )

        pairs = torch.from_numpy(np.stack([user, film], axis=1))
        stars = torch.from_numpy(ratings.stars)
        train, test = map(torch.from_numpy, split_by_owner(user, self.train_fraction, "movielens-split"))
        mean = stars[train].mean(dtype=torch.float64).item() if self.biased else None
        scale = release.stars
        return Task(
            model=partial(MatrixFactorization, len(users), len(films), self.dimensions, mean),
            train=(pairs[train], stars[train]),
            test=(pairs[test], stars[test]),
            loss=squared_error,
            metrics={
                "rmse": RootMean(scale.squared_error),
                "mae": scale.absolute_error,
                "rmse_unclipped": RootMean(squared_error),
                "accuracy": scale.accuracy,
            },
            groups=torch.from_numpy(ratings.users)[train],
        )


def _file(data_root: Path | None, release: str) -> Path:
    file = RELEASES[release].file
    archive = f"{SITE}/ml-{release}.zip"
    if data_root is None:
        raise BadInput(
            f"data_root: null, but movielens is not fetched; accepted: a folder with {file}"
            f" (unpack {archive} in its folder movielens)"
        )
    if not (data_root / file).is_file():
        raise BadInput(
            f"data_root: {data_root} has no file {file}; accepted: a folder that has it"
            f" (unpack {archive} in {data_root / 'movielens'})"
        )
    return data_root / file


def read_ratings(path: Path, release: Release) -> Ratings:
    """The ratings in a file of GroupLens.

    Raises:
        BadInput: naming file and line, for a file that can't be read or has no ratings, a missing column, a line without
            a rating, or a second rating of a film by a user.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(
            f"data_root: {path} can't be read ({error.strerror}); accepted: a readable file"
        ) from error
    except UnicodeDecodeError as error:
        raise BadInput(
            f"data_root: {path} is no text (byte {error.start}); accepted: the file of GroupLens"
        ) from error
    places = _places(path, lines, release) if release.header else (0, 1, 2)
    first = 1 if release.header else 0
    if len(lines) <= first:
        raise BadInput(f"data_root: {path} has no ratings; accepted: the file of GroupLens")

    users, films, stars = [], [], []
    line_of: dict[tuple[int, int], int] = {}
    for number, line in enumerate(lines[first:], first + 1):
        fields = line.split(release.delimiter)
        try:
            user, film, rating = (
                kind(fields[place]) for kind, place in zip((int, int, float), places, strict=True)
            )
        except (IndexError, ValueError):
            raise _bad_line(path, number, line, release) from None
        if not (0 < user < 2**31 and 0 < film < 2**31 and release.stars.has(rating)):
            raise _bad_line(path, number, line, release)
        before = line_of.setdefault((user, film), number)
        if before != number:
            raise BadInput(
                f"data_root: {path}, line {number}: user {user} has rated film {film} in line {before};"
                " accepted: one rating a user and film"
            )
        users.append(user)
        films.append(film)
        stars.append(rating)
    return Ratings(np.array(users, np.int64), np.array(films, np.int64), np.array(stars, np.float32))


def _places(path: Path, lines: list[str], release: Release) -> tuple[int, ...]:
    """The field of a line that holds each of the columns."""
    names = lines[0].split(release.delimiter) if lines else []
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise BadInput(
            f"data_root: {path}, line 1: no column {missing[0]!r} in {_shown(','.join(names))};"
            f" accepted: a line that names {', '.join(COLUMNS)}"
        )
    return tuple(names.index(name) for name in COLUMNS)


def _bad_line(path: Path, number: int, line: str, release: Release) -> BadInput:
    stars = release.stars
    return BadInput(
        f"data_root: {path}, line {number}: {_shown(line)}; accepted: {', '.join(COLUMNS)}, the ids from 1"
        f" and the rating from {stars.least:g} to {stars.most:g} in steps of {stars.step:g}"
    )


def _shown(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:60] + "...")
