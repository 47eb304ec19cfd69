from __future__ import annotations

import io
import logging
import os
import pickle
import re
import socket
import sys

import numpy as np
import polars as pl
import pytest

from gossamer.errors import BadInput
from gossamer.files import cache_folder
from gossamer.tasks import data as module
from gossamer.tasks.data import hub_dataset, label_decoder
from gossamer.tasks.pixels import image_decoder

Image = pytest.importorskip("PIL.Image")

COLUMNS = {"img": image_decoder(4, 5, 3), "label": label_decoder(3)}
ROWS = {"train": 12, "test": 5}
HUB_ID = "someone/small_images"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GOSSAMER_CACHE", str(folder))
    return folder


def encoded(pixels: np.ndarray, image_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(
        file, format=image_format, **({"lossless": True} if image_format == "WEBP" else {})
    )
    return file.getvalue()


def drawn(split: str, rows: int, shape=(4, 5, 3)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(len(split))
    return rng.integers(0, 256, (rows, *shape), dtype=np.uint8), rng.integers(0, 3, rows)


def write(path, images: list[bytes], labels) -> None:
    """Write a Parquet file in the format of the hub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": image, "path": None} for image in images]
    schema = {"img": pl.Struct({"bytes": pl.Binary, "path": pl.String}), "label": pl.Int64}
    pl.DataFrame({"img": rows, "label": labels}, schema=schema).write_parquet(path)


@pytest.fixture
def root(tmp_path):
    """A data root with one data set; its training split has two files, in PNG and lossless WebP."""
    folder = tmp_path / "root" / "hub" / HUB_ID / "plain"
    pixels, labels = drawn("train", 12)
    write(folder / "train-00000-of-00002.parquet", [encoded(p) for p in pixels[:7]], labels[:7])
    write(folder / "train-00001-of-00002.parquet", [encoded(p, "WEBP") for p in pixels[7:]], labels[7:])
    pixels, labels = drawn("test", 5)
    write(folder / "test-00000-of-00001.parquet", [encoded(p) for p in pixels], labels)
    return tmp_path / "root"


def parquet(root, name: str):
    return next((root / "hub" / HUB_ID).rglob(f"{name}*.parquet"))


def refused(root, columns=COLUMNS, rows=ROWS) -> str:
    with pytest.raises(BadInput) as raised:
        hub_dataset(HUB_ID, columns, rows, root)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_arrays_equal_stored_pixels_and_labels(root):
    splits = hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    for split, rows in ROWS.items():
        pixels, labels = drawn(split, rows)
        assert np.array_equal(splits[split]["img"], pixels)
        assert np.array_equal(splits[split]["label"], labels)
        assert splits[split]["img"].dtype == np.uint8
        assert splits[split]["label"].dtype == np.int64


def test_grey_images_have_one_channel(tmp_path):
    pixels, labels = drawn("grey", 3, (4, 5))
    write(tmp_path / "hub" / HUB_ID / "train.parquet", [encoded(p) for p in pixels], labels)
    splits = hub_dataset(HUB_ID, {"img": image_decoder(4, 5, 1)}, {"train": 3}, tmp_path)
    assert np.array_equal(splits["train"]["img"][..., 0], pixels)


def test_second_load_decodes_nothing(root, monkeypatch):
    first = hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    monkeypatch.setattr(module, "read_split", lambda *_: pytest.fail("decoded again"))
    second = hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    for split in ROWS:
        for column in COLUMNS:
            assert np.array_equal(first[split][column], second[split][column])


def test_a_changed_file_is_decoded_again(root):
    hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    pixels, labels = drawn("test", 5)
    write(parquet(root, "test"), [encoded(p) for p in 255 - pixels], labels)
    assert np.array_equal(hub_dataset(HUB_ID, COLUMNS, ROWS, root)["test"]["img"], 255 - pixels)


def test_a_changed_file_of_equal_size_and_time_is_decoded_again(root):
    """The images stay, and the labels are others of the same length."""
    _, labels = drawn("test", 5)
    path = parquet(root, "test")
    before, first = path.stat(), hub_dataset(HUB_ID, COLUMNS, ROWS, root)["test"]["label"]
    assert first.tolist() == labels.tolist()
    content = path.read_bytes()
    pixels, _ = drawn("test", 5)
    write(path, [encoded(p) for p in pixels], (labels + 1) % 3)
    assert path.stat().st_size == before.st_size
    assert path.read_bytes() != content
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hub_dataset(HUB_ID, COLUMNS, ROWS, root)["test"]["label"].tolist() == ((labels + 1) % 3).tolist()


def test_data_written_while_it_is_decoded_is_not_cached(root, cache):
    def decode(column, where, place):
        if "'test'" in where:
            write(parquet(root, "test"), [encoded(p) for p in drawn("test", 5)[0]], [0] * 5)
        return label_decoder(3)(column, where, place)

    hub_dataset(HUB_ID, {"label": decode}, ROWS, root)
    assert [*cache.rglob("*.safetensors")] == []


@pytest.mark.parametrize("damage", ["truncated", "empty", "pickle"])
def test_damaged_cache_files_are_decoded_again(root, cache, caplog, damage):
    hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    [path] = cache.rglob("*.safetensors")
    content = path.read_bytes()
    path.write_bytes(
        {"truncated": content[:-1], "empty": b"", "pickle": pickle.dumps({"train/img": 1})}[damage]
    )
    with caplog.at_level(logging.WARNING, logger="gossamer"):
        splits = hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    assert "decoded again" in caplog.text
    assert np.array_equal(splits["train"]["img"], drawn("train", 12)[0])
    assert path.read_bytes() == content


def test_unwritable_cache_is_only_logged(root, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, logger="gossamer"):
        splits = hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    assert len(splits["train"]["label"]) == 12
    assert "set GOSSAMER_CACHE to a writable folder" in caplog.text


def test_failed_cache_write_leaves_no_file(root, cache, monkeypatch):
    def fail(*_args, **_options):
        raise OSError("disk full")

    monkeypatch.setattr(module, "save_file", fail)
    hub_dataset(HUB_ID, COLUMNS, ROWS, root)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_data_root_without_the_data_set_is_refused(tmp_path):
    (tmp_path / "root").write_text("")
    for root in (tmp_path / "nowhere", tmp_path / "root"):
        assert refused(root).startswith(
            f"data_root: {root}/hub/{HUB_ID} is not a folder; accepted: a folder with hub/{HUB_ID}"
        )
    assert f"data_root: {tmp_path}/hub/{HUB_ID} is not a folder" in refused(tmp_path)
    (tmp_path / "hub" / HUB_ID).mkdir(parents=True)
    assert "split 'train': 0 rows; accepted: 12" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_file_is_named(root, keep):
    path = parquet(root, "train-00001")
    path.write_bytes(path.read_bytes()[:keep])
    assert refused(root).startswith(f"{path} can't be read (")


@pytest.mark.parametrize("cut", [4, 40])
def test_a_file_that_is_damaged_inside_is_named(root, cut):
    path = parquet(root, "train-00001")
    content = path.read_bytes()
    path.write_bytes(content[:cut] + bytes(len(content) - cut - 8) + content[-8:])
    assert f"{path} can't be read (" in refused(root)


def test_a_damaged_image_is_named_by_its_row(tmp_path):
    pixels, labels = drawn("train", 3)
    images = [encoded(p) for p in pixels]
    images[1] = images[1][:40]
    write(tmp_path / "hub" / HUB_ID / "train.parquet", images, labels)
    assert "split 'train', column 'img', row 2 of train.parquet: cannot identify image file" in refused(
        tmp_path, rows={"train": 3}
    )


def test_image_of_wrong_size_is_refused(tmp_path):
    pixels, labels = drawn("train", 3, (6, 5, 3))
    write(tmp_path / "hub" / HUB_ID / "train.parquet", [encoded(p) for p in pixels], labels)
    assert "row 1 of train.parquet: 5x6 pixels; accepted: 5x4" in refused(tmp_path, rows={"train": 3})


def test_labels_out_of_range_are_refused(root):
    message = refused(root, {**COLUMNS, "label": label_decoder(2)})
    assert re.search(
        r"column 'label': \d other values \(the first, 2, in row \d of plain/train-00000-of-00002.parquet\); accepted: class",
        message,
    )


def test_missing_file_is_found_by_row_count(root):
    parquet(root, "train-00001").unlink()
    assert "split 'train': 7 rows; accepted: 12" in refused(root)


def test_missing_split_or_column_is_refused(root):
    assert "split 'validation': 0 rows" in refused(root, rows={"validation": 1, "test": 5})
    assert "no column 'picture'; accepted: the whole data set" in refused(root, {"picture": COLUMNS["img"]})
    assert "column 'label': Int64; accepted: images" in refused(root, {"label": COLUMNS["img"]})


def test_data_root_is_read_without_network(root, monkeypatch):
    def no_network(*_args, **_options):
        pytest.fail("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    assert len(hub_dataset(HUB_ID, COLUMNS, ROWS, root)["test"]["label"]) == 5


def test_network_error_names_the_data_root(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_args, **_options):
        raise ConnectionError("Couldn't reach the Hub\nwith details")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    message = refused(None)
    assert "can't be read from the Hugging Face hub (Couldn't reach the Hub)" in message
    assert f"data_root set to a folder that has it under hub/{HUB_ID}" in message


def test_hub_is_queried_by_id_only_once(root, monkeypatch):
    hub, queries = pytest.importorskip("huggingface_hub"), []

    def download(hub_id, **options):
        queries.append((hub_id, options))
        return str(root / "hub" / hub_id)

    monkeypatch.setattr(hub, "snapshot_download", download)
    for _ in range(2):
        splits = hub_dataset(HUB_ID, COLUMNS, ROWS, None)
        assert np.array_equal(splits["test"]["img"], drawn("test", 5)[0])
    assert queries == [(HUB_ID, {"repo_type": "dataset", "allow_patterns": ["*.parquet"]})]


def test_missing_hub_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'gossamer[data]'" in refused(None)


def test_missing_pillow_names_the_extra(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "no package 'pillow'; accepted: after pip install 'gossamer[data]'" in refused(root)


def test_empty_data_root_does_not_use_the_hub_cache(root, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda hub_id, **_: str(root / "hub" / hub_id))
    hub_dataset(HUB_ID, COLUMNS, ROWS, None)
    (tmp_path / "empty" / "hub" / HUB_ID).mkdir(parents=True)
    assert "split 'train': 0 rows" in refused(tmp_path / "empty")


def test_cache_folder_follows_environment_variables(monkeypatch, tmp_path):
    monkeypatch.delenv("GOSSAMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gossamer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    if os.name == "posix":
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_folder() == tmp_path / "home" / ".cache" / "gossamer"
