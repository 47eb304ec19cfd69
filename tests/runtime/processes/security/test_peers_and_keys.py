"""The peers file, key files, and the commands that make them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import Cli
from gossamer.errors import BadInput
from gossamer.runtime.processes.security import trust as security
from gossamer.runtime.processes.security.keys import expand_addresses, make_keys
from gossamer.runtime.processes.security.peers import Peer, Peers, fingerprint, parse_address, read_rows
from gossamer.runtime.processes.security.trust import Security, key_file


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of a good file, to be spoiled."""
    made = make_keys(tmp_path / "keys", range(3))
    return [Peer.of(rank, f"10.0.0.{rank}:9000", der).model_dump() for rank, der in made.items()]


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "peers.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    peers = Peers.load(written(tmp_path, {"peers": rows[::-1]}))
    assert [row.rank for row in peers.rows] == [0, 1, 2]
    assert peers.addresses == [(f"10.0.0.{rank}", 9000) for rank in range(3)]
    peers.save(tmp_path / "again.yaml")
    assert Peers.load(tmp_path / "again.yaml").rows == peers.rows
    lines = (tmp_path / "again.yaml").read_text().splitlines()
    assert len(lines) == 1 + 4 * 3  # a certificate is one line


Spoil = Callable[[list[dict[str, Any]]], Any]


def change(index: int, **values: Any) -> Spoil:
    def spoil(rows: list[dict[str, Any]]) -> dict[str, Any]:
        rows[index] |= values
        return {"peers": rows}

    return spoil


def without(index: int, field: str) -> Spoil:
    def spoil(rows: list[dict[str, Any]]) -> dict[str, Any]:
        del rows[index][field]
        return {"peers": rows}

    return spoil


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda rows: {"peers": []}, "peers: got []"),
        (lambda rows: rows, "a list; accepted: a mapping with the list 'peers'"),
        (lambda rows: "peers: [", "not YAML"),
        (lambda rows: {"peers": rows, "more": 1}, "more: unknown field"),
        (lambda rows: {"peers": rows[1:]}, "no row for rank 0; accepted: one for each from 0 on"),
        (lambda rows: {"peers": [rows[0], rows[2]]}, "no row for rank 1"),
        (lambda rows: {"peers": [*rows, rows[1]]}, "rank 1 stands in 2 rows (ranks 1, 1)"),
        (change(1, rank=-1), "peers.1.rank: got -1"),
        (change(1, rank="one"), "peers.1.rank: got 'one'"),
        (change(1, rank=True), "peers.1.rank: got True"),
        (change(1, address="10.0.0.0:9000"), "address 10.0.0.0:9000 stands in 2 rows (ranks 0, 1)"),
        (change(1, address="10.0.0.1"), "peers.1.address: got '10.0.0.1'; accepted: \"host:port\""),
        (change(1, address="10.0.0.1:0"), "peers.1.address: got '10.0.0.1:0'"),
        (change(1, address="a..b:9000"), "peers.1.address: got 'a..b:9000'"),
        (change(1, address="10.0.0.1:65536"), "peers.1.address: got '10.0.0.1:65536'"),
        (change(1, address="2001:db8::1:9000"), "peers.1.address: got '2001:db8::1:9000'"),
        (change(1, address=9000), "peers.1.address: got 9000"),
        (change(1, certificate="not base64!"), "peers.1.certificate: got 'not base64!'; accepted: a certificate"),
        (change(1, certificate=""), "peers.1.certificate: got ''; accepted: a certificate (DER) of at most"),
        (change(1, fingerprint="sha256:" + "0" * 64), "rank 1: fingerprint: got sha256:000"),
        (without(1, "fingerprint"), "peers.1.fingerprint: missing; a value is required"),
        (change(1, port=5), "peers.1.port: unknown field"),
        (
            lambda rows: {"peers": [rows[0], {**rows[0], "rank": 1, "address": "10.0.0.9:1"}]},
            "stands in 2 rows (ranks 0, 1); accepted: in one",
        ),
    ],
)  # fmt: skip
def test_every_mistake_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], spoil: Spoil, problem: str
) -> None:
    with pytest.raises(BadInput) as caught:
        Peers.load(written(tmp_path, spoil(rows)))
    assert problem in str(caught.value)
    assert str(tmp_path / "peers.yaml") in str(caught.value)


@pytest.mark.parametrize("cut", [b"", b"\x00" * 20, None])
def test_what_is_no_certificate_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], cut: bytes | None
) -> None:
    der = Peer.model_validate(rows[1]).der
    wrong = der + der if cut is None else der[:-30] + cut
    rows[1] = Peer.of(1, rows[1]["address"], wrong).model_dump()
    with pytest.raises(BadInput, match="rank 1: certificate: accepted: one X.509 certificate"):
        Peers.load(written(tmp_path, {"peers": rows}))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file or directory; accepted: a peers file"):
        Peers.load(tmp_path / "none.yaml")


def test_addresses() -> None:
    assert parse_address("10.0.0.1:9000") == ("10.0.0.1", 9000)
    assert parse_address("a-host.example:1") == ("a-host.example", 1)
    assert parse_address("[2001:db8::1]:65535") == ("2001:db8::1", 65535)
    assert expand_addresses(["a:9", "[::1]:7-9"]) == ["a:9", "[::1]:7", "[::1]:8", "[::1]:9"]
    assert parse_address("a.example.:1") == ("a.example.", 1)
    for wrong in (
        "a",
        "a:",
        "a:9-7",
        "a:9-70000",
        ":9",
        "a b:9",
        "a..b:9",
        ".a:9",
        f"{'a' * 64}.b:9",
        "a\0:9",
    ):
        with pytest.raises(BadInput, match="--address: got"):
            expand_addresses([wrong])


def test_keys_are_their_owners_alone_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    old = os.umask(0)
    try:
        made = make_keys(folder, range(2))
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "node-0.pem": 0o600,
        "node-1.pem": 0o600,
    }
    before = key_file(folder, 1).read_bytes()
    with pytest.raises(BadInput, match=r"node-1.pem: there already; accepted: another folder, or --force"):
        make_keys(folder, [1, 2])
    assert key_file(folder, 1).read_bytes() == before
    assert not key_file(folder, 2).exists()
    assert make_keys(folder, [1], force=True)[1] != made[1]
    assert len({*made.values()}) == 2


@pytest.fixture
def deployment(tmp_path: Path) -> tuple[Path, Peers]:
    folder = tmp_path / "keys"
    made = make_keys(folder, range(2))
    return folder, Peers(Peer.of(rank, f"10.0.0.{rank}:9000", der) for rank, der in made.items())


def test_keys_that_others_can_read_are_refused(
    deployment: tuple[Path, Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, peers = deployment
    key = key_file(folder, 1)
    Security(key, peers, 1)
    for path, bad, good in ((key, 0o640, 0o600), (key, 0o604, 0o600), (folder, 0o750, 0o700)):
        path.chmod(bad)
        with pytest.raises(BadInput, match=rf"{path}: mode {bad:04o}, .*chmod {good:o}"):
            Security(key, peers, 1)
        path.chmod(good)
    monkeypatch.setattr(os, "geteuid", lambda: key.stat().st_uid + 1)
    with pytest.raises(BadInput, match="belongs to user"):
        Security(key, peers, 1)


def test_keys_that_do_not_fit_are_refused(deployment: tuple[Path, Peers]) -> None:
    folder, peers = deployment
    with pytest.raises(BadInput, match="for rank 0"):
        Security(key_file(folder, 1), peers, 0)
    with pytest.raises(BadInput, match="rank: 2; accepted: 0 to 1"):
        Security(key_file(folder, 1), peers, 2)
    with pytest.raises(BadInput, match="No such file"):
        Security(key_file(folder, 5), peers, 1)
    with pytest.raises(BadInput, match="accepted: a key file in a folder"):
        Security(folder, peers, 1)
    key = key_file(folder, 1)
    text = key.read_text()
    certificate = text[text.index("-----BEGIN CERT") :]
    for content, reason in [
        (certificate, "no private key that fits"),
        (text[: text.index("-----BEGIN CERT")], "no certificate in it"),
        (key_file(folder, 0).read_text()[: -len(certificate)] + certificate, "no private key that fits"),
    ]:
        key.write_text(content)
        with pytest.raises(BadInput, match=reason):
            Security(key, peers, 1)


def test_only_tls_1_3_with_both_certificates_and_no_tickets(deployment: tuple[Path, Peers]) -> None:
    folder, peers = deployment
    made = Security(key_file(folder, 1), peers, 1)
    for context in (made.client, made.server):
        assert context.minimum_version == context.maximum_version == security.ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == security.ssl.CERT_REQUIRED
        assert context.cert_store_stats()["x509"] == 2
    assert made.server.num_tickets == 0


def test_the_command_makes_keys_and_a_peers_file(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli(
        "keys", "keys", "--nodes", "3", "--address", "10.0.0.1:9000-9001", "--address", "b:9"
    )
    assert (code, err) == (0, "")
    peers = Peers.load(tmp_path / "keys" / "peers.yaml")
    assert [row.address for row in peers.rows] == ["10.0.0.1:9000", "10.0.0.1:9001", "b:9"]
    assert out.split() == [word for row in peers.rows for word in (str(row.rank), row.fingerprint)]
    for row in peers.rows:
        Security(key_file(tmp_path / "keys", row.rank), peers, row.rank)
    code, _, err = cli("keys", "keys", "--nodes", "3")
    assert code == 2
    assert "there already" in err
    assert Peers.load(tmp_path / "keys" / "peers.yaml").rows == peers.rows
    code, out, _ = cli("keys", "keys", "--nodes", "3", "--force", "--quiet")
    assert (code, out) == (0, "")


@pytest.mark.parametrize("place", [(), ("-o", "peers.yaml")], ids=["keys", "told"])
def test_a_rank_s_row_is_put_beside_the_others(place: tuple[str, ...], cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / (place[-1] if place else "keys/peers.yaml")
    for rank in (0, 1):
        made = cli("keys", "keys", "--rank", str(rank), "--address", f"10.0.0.{rank}:9000", *place)
        assert made[0] == 0, made
    both = Peers.load(file).rows
    assert [row.address for row in both] == ["10.0.0.0:9000", "10.0.0.1:9000"]
    again = ("--rank", "0", "--address", "10.0.0.7:9000", *place)
    assert cli("keys", "keys", *again)[0] == 2  # the key is there
    assert Peers.load(file).rows == both
    assert cli("keys", "keys", *again, "--force")[0] == 0
    moved, other = Peers.load(file).rows
    assert (moved.address, other) == ("10.0.0.7:9000", both[1])
    Security(key_file(tmp_path / "keys", 0), Peers.load(file), 0)
    file.write_text("peers: nobody")
    assert cli("keys", "keys", "--rank", "2", "--address", "10.0.0.2:9000", *place)[0] == 2
    assert not key_file(tmp_path / "keys", 2).exists()


def test_parts_from_several_machines_are_put_together(cli: Cli, tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        address = f"10.0.0.{rank}:9000"
        part = f"part-{rank}.yaml"
        assert cli("keys", f"keys-{rank}", "--rank", str(rank), "--address", address, "-o", part)[0] == 0
    parts = [f"part-{rank}.yaml" for rank in (2, 0, 1)]
    code, _, err = cli("peers", *parts[:2])
    assert code == 2
    assert "no row for rank 1" in err
    code, out, _ = cli("peers", *parts, parts[0], "-o", "peers.yaml")
    assert code == 0
    peers = Peers.load(tmp_path / "peers.yaml")
    assert [line.split() for line in out.splitlines()] == [
        [str(row.rank), row.address, row.fingerprint] for row in peers.rows
    ]
    for rank in range(3):
        Security(key_file(tmp_path / f"keys-{rank}", rank), peers, rank)
        assert read_rows(tmp_path / f"part-{rank}.yaml") == [peers.rows[rank]]
    # Two machines that both say that they are rank 1 don't go together.
    assert cli("keys", "other", "--rank", "1", "--address", "10.0.0.9:9000", "-o", "other.yaml")[0] == 0
    code, _, err = cli("peers", *parts, "other.yaml")
    assert code == 2
    assert "rank 1 stands in 2 rows" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--nodes, --rank: accepted: one of them"),
        (("--nodes", "2", "--rank", "1"), "--nodes, --rank: accepted: one of them"),
        (("--nodes", "2", "--address", "a:1"), "--address: got 1; accepted: 2, one a node"),
        (("--nodes", "2", "--address", "a:1", "--address", "a:1"), "--address: the same twice"),
        (("--nodes", "2", "-o", "x.yaml"), "--output: accepted together with --address"),
        (("--rank", "1", "--address", "a"), "--address: got 'a'; accepted: \"host:port\""),
    ],
)  # fmt: skip
def test_what_the_command_refuses(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    code, _, err = cli("keys", "keys", *arguments)
    assert code == 2
    assert problem in err
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_others_may_enter_gets_no_keys(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    code, _, err = cli("keys", "open", "--nodes", "1")
    assert code == 2
    assert "mode 0755, which lets others in; accepted: 0700 (chmod 700 open)" in err
    assert list((tmp_path / "open").iterdir()) == []


def test_fingerprints() -> None:
    assert fingerprint(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
