"""MovieLens: ratings of films, predicted by matrix factorization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.config.registry import register
from gossamer.errors import BadInput, first_line
from gossamer.files import check_fits
from gossamer.reads import note
from gossamer.tasks.data import split_by_owner
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.task import Metric, ModelField, RootMean, Task, TaskSource, model_factory

SITE = "https://files.grouplens.org/datasets/movielens"
COLUMNS = ("userId", "movieId", "rating")
"""The fields to read, by GroupLens's names. In a file without a header, they are the first three."""

Ratings = Float[Tensor, " samples"]


@dataclass(frozen=True)
class Release:
    """A published set of ratings: its file below the data root, the delimiter of its fields, whether it has a
    header, and the scale of its ratings."""

    file: str
    delimiter: str
    header: bool
    least: float
    most: float
    step: float

    def clipped(self, metric: Metric) -> Metric:
        """A metric of the outputs clipped to the scale."""
        return lambda outputs, targets: metric(outputs.clamp(self.least, self.most), targets)

    def accuracy(self, outputs: Ratings, targets: Ratings) -> Float[Tensor, ""]:
        """Fraction of the samples whose output, rounded to the nearest rating of the scale, is the target."""
        rounded = (outputs / self.step).round() * self.step
        return (rounded == targets).to(torch.float32).mean()


RELEASES = {
    "latest-small": Release("movielens/ml-latest-small/ratings.csv", ",", True, 0.5, 5, 0.5),
    "100k": Release("movielens/ml-100k/u.data", "\t", False, 1, 5, 1),
}


@register("task", "movielens")
class MovieLens(TaskSource):
    """MovieLens (Harper and Konstan, ACM TiiS 5(4), 2015): ratings of films, predicted by matrix factorization.

    Inputs are int64 (user, film) pairs [samples, 2], both counted from 0 in the order of their ids; targets
    are float32 ratings [samples]. The owner of a rating is its user, by GroupLens's id. The loss is the mean
    squared error of the unclipped outputs. The metrics, over all evaluated ratings of all users, are ``rmse``
    and ``mae`` of outputs clipped to the scale of the ratings; ``rmse_unclipped``, the square root of the
    loss, which decentralizepy and the DivShare artifact report as "loss"; and ``accuracy``, the fraction of
    ratings equal to the clipped output rounded to the scale. The split into training and test ratings is the
    same for every seed.

    The data is not downloaded: unpack ``ml-latest-small.zip`` or ``ml-100k.zip`` from
    https://files.grouplens.org/datasets/movielens/ in the data root's folder ``movielens``. Its README holds the terms."""

    # latest-small (100,836 ratings of 9,724 films by 610 users, 0.5 to 5 stars by halves) or 100k (100,000 of 1,682
    # by 943, whole stars from 1 to 5).
    release: Literal["latest-small", "100k"] = "latest-small"
    # A model gets the numbers of users and items (films), and mean_rating, the mean training rating over all nodes.
    model: ModelField = Field(default="matrix-factorization", validate_default=True)
    # Fraction of each user's ratings that is for training; the others are for testing.
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.7

    def load(self, data_root: Path | None, seed: int) -> Task:
        release = RELEASES[self.release]
        path = (data_root or Path()) / release.file
        if data_root is None or not path.is_file():
            accepted = f"a folder that has it (unpack {SITE}/ml-{self.release}.zip in its folder movielens)"
            problem = f"{data_root or 'null'} has no file {release.file}"
            raise BadInput(f"data_root: {problem}; accepted: {accepted}")
        note(path)
        ratings = read_ratings(path, release)
        owners, stars = ratings["userId"].to_numpy(writable=True), ratings["rating"].to_torch()
        users, user = np.unique(owners, return_inverse=True)
        films, film = np.unique(ratings["movieId"].to_numpy(), return_inverse=True)
        pairs = torch.from_numpy(np.stack([user, film], axis=1))
        train, test = map(torch.from_numpy, split_by_owner(user, self.train_fraction, "movielens-split"))
        facts: dict[str, Any] = {"users": len(users), "items": len(films), "shape": (2,), "classes": 1}
        facts["mean_rating"] = stars[train].mean(dtype=torch.float64).item()
        return Task(
            model=model_factory(self.model, data_root, **facts),
            train=(pairs[train], stars[train]),
            test=(pairs[test], stars[test]),
            loss=F.mse_loss,
            metrics={
                "rmse": RootMean(release.clipped(F.mse_loss)),
                "mae": release.clipped(F.l1_loss),
                "rmse_unclipped": RootMean(F.mse_loss),
                "accuracy": release.clipped(release.accuracy),
            },
            groups=torch.from_numpy(owners)[train],
            provenance=Provenance(
                f"MovieLens {self.release}",
                f"drawn, {1 - self.train_fraction:.3g} of each user's ratings, the same for every seed",
                {"all": [path]},
            ),
        )


def read_ratings(path: Path, release: Release) -> pl.DataFrame:
    """The ratings in a GroupLens file, in the file's order: users and films by their ids, int64, and float32 stars."""
    options: dict[str, Any] = {"separator": release.delimiter, "has_header": release.header}
    where, accepted = f"data_root: {path}", "GroupLens's file"
    try:
        check_fits(where, path)
        table = pl.read_csv(path, infer_schema=False, quote_char=None, **options)
        if not release.header:
            table = table.rename(dict(zip(table.columns, COLUMNS, strict=False)))
        text = table.select(COLUMNS)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise BadInput(f"{where} can't be read ({first_line(error)}); accepted: {accepted}") from None
    ids, stars = pl.col("userId", "movieId").cast(pl.Int64, strict=False), pl.col("rating")
    ratings = text.select(ids, stars.cast(pl.Float32, strict=False))
    on_scale = stars.is_between(release.least, release.most) & (stars % release.step == 0)
    valid = on_scale & (pl.col("userId") > 0) & pl.col("movieId").is_not_null()
    wrong = ratings.select(~valid.fill_null(False)).to_series().arg_true()
    if len(wrong) or ratings.is_empty():
        problem = "no ratings"
        if len(wrong):
            named = ", ".join(f"{name} {value}" for name, value in text.row(wrong[0], named=True).items())
            problem = f"line {wrong[0] + 1 + release.header} ({named})"
        scale = f"ratings from {release.least:g} to {release.most:g} in steps of {release.step:g}"
        raise BadInput(f"{where}: {problem}; accepted: {accepted}, with whole ids and {scale}")
    return ratings
