"""The transport over TLS: which peers are accepted, and what is visible on the wire."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from pathlib import Path

import pytest
import torch
import transport_scene
from cryptography import x509
from cryptography.hazmat.bindings.openssl.binding import Binding
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from transport_scene import TOKEN, Peer, dial, network, on_loop, proxied

from gossamer.errors import BadInput
from gossamer.messages import raw
from gossamer.runtime.processes.security import Security, issue
from gossamer.runtime.processes.transport import connection
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.processes.transport.wire import BEAT, hello

pytestmark = pytest.mark.usefixtures("tls")


async def still_works(a: Peer, b: Peer) -> None:
    """Check that honest nodes are undisturbed."""
    before = len(a.inbox)
    await b.send(0, "honest", "t")
    assert (await a.receive(before + 1))[-1].payload == "honest"
    assert a.lost == b.lost == b.events == []


@on_loop
async def test_parameters_are_not_readable_on_the_wire() -> None:
    secret = torch.arange(30_000, dtype=torch.float32)
    content = bytes(raw(secret))
    for options, seen in (({}, False), ({"security": None}, True)):
        async with proxied([[], []], **options) as ((a, b), (_, proxy)):
            a.send(1, secret, "a-tag")
            await b.receive(1)
            assert torch.equal(b.inbox[0].payload, secret)
            assert (content[1000:1100] in bytes(proxy.passed)) is seen
            assert (b"a-tag" in bytes(proxy.passed)) is seen
            assert (TOKEN in bytes(proxy.passed)) is seen
            assert len(proxy.passed) > secret.nbytes


@on_loop
async def test_peer_with_wrong_key_is_refused(strangers: list[Security]) -> None:
    async with network(2) as ((a, b), _), network(2, security=strangers[1]) as ((_, stranger), _):
        stranger.transport.addresses[0] = a.address
        stranger.send(0, "let me in", "t")
        await a.until(lambda: a.events)
        assert a.events[0][1].startswith("stranger at 127.0.0.1:")
        assert a.inbox == []
        # It rejects node 0, which it does not trust either, before it sends anything.
        await stranger.until(lambda: stranger.events)
        assert "certificate verify failed" in stranger.events[0][1]
        await still_works(a, b)


@on_loop
async def test_rank_cannot_impersonate_another(securities: list[Security]) -> None:
    async with network(3) as ((a, b, _), _), network(3, security=securities[2]) as ((_, liar, _), _):
        liar.transport.addresses[0] = a.address
        liar.send(0, "I am node 1", "t")
        await a.until(lambda: a.events)
        assert a.events[0][1].endswith("claims to be rank 1, but does not have its key")
        assert a.inbox == []
        await still_works(a, b)


@on_loop
async def test_answer_of_another_rank_is_refused(securities: list[Security]) -> None:
    async with network(3) as ((a, _, c), _):
        a.transport.addresses[1] = c.address
        a.send(1, "for node 1 alone", "t")
        await a.until(lambda: a.events)
        assert a.events[0][1].endswith("answered with another rank's key")
        assert c.inbox == []


def first_flight(key: Path, greeting: bytes, early_data: bytes) -> bytes:
    """A server's answer to a client's greeting together with early application data, which TLS 1.3 allows and the
    module ssl does not offer."""
    openssl = Binding().lib
    ffi = Binding().ffi
    context = openssl.SSL_CTX_new(openssl.TLS_server_method())
    for use in (
        openssl.SSL_CTX_use_certificate_chain_file(context, os.fsencode(key)),
        openssl.SSL_CTX_use_PrivateKey_file(context, os.fsencode(key), openssl.SSL_FILETYPE_PEM),
    ):
        assert use == 1
    openssl.SSL_CTX_set_max_early_data(context, 16_384)
    end = openssl.SSL_new(context)
    incoming, outgoing = (openssl.BIO_new(openssl.BIO_s_mem()) for _ in range(2))
    openssl.SSL_set_bio(end, incoming, outgoing)
    openssl.SSL_set_accept_state(end)
    assert openssl.BIO_write(incoming, greeting, len(greeting)) == len(greeting)
    buffer, count = ffi.new("char[]", 65_536), ffi.new("size_t *")
    assert openssl.SSL_read_early_data(end, buffer, len(buffer), count) == 2  # the client sent none
    assert openssl.SSL_write_early_data(end, early_data, len(early_data), count) == 1
    flight = bytes(ffi.buffer(buffer, openssl.BIO_read(outgoing, buffer, len(buffer))))
    openssl.SSL_free(end)
    openssl.SSL_CTX_free(context)
    return flight


@on_loop
async def test_early_data_is_held_until_the_peer_is_verified(
    tmp_path: Path,
) -> None:
    identities = [issue() for _ in range(3)]
    certificates = [identity.certificate for identity in identities]
    keys = [tmp_path / f"{rank}.pem" for rank in range(3)]
    for path, identity in zip(keys, identities, strict=True):
        path.write_bytes(identity.pem)
    security = Security(identities[0].pem, certificates)
    early_data = hello(1, TOKEN, 2**32 - 1) + BEAT
    loop = asyncio.get_running_loop()
    for answers, events in ((2, ["answered with another rank's key"]), (1, [])):
        async with network(1, raw_ranks=2, security=security) as ((a,), (listener, _)):
            a.send(1, "for node 1 alone", "t")
            end, _ = await loop.sock_accept(listener)
            with end:
                end.setblocking(False)
                greeting = await loop.sock_recv(end, 65_536)
                await loop.sock_sendall(end, first_flight(keys[answers], greeting, early_data))
                peer = a.transport.peers[1]
                while not (a.events or peer.outgoing):
                    await asyncio.sleep(0)
            assert [text.partition(") ")[2] for _, text in a.events] == events
            assert peer.incarnation == (None if events else 2**32 - 1)


@on_loop
async def test_another_run_of_the_same_nodes_is_refused(securities: list[Security]) -> None:
    async with network(2) as ((a, b), _), network(2) as ((_, other), _):
        other.transport.token = b"of another run.."
        other.transport.addresses[0] = a.address
        other.send(0, "hello", "t")
        await a.until(lambda: a.events)
        assert a.events[0][1].endswith("has the token of another run")
        await still_works(a, b)


@pytest.mark.parametrize(
    "said",
    [
        hello(1, TOKEN),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 300,
        b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
    ],
)
@on_loop
async def test_non_tls_bytes_are_refused(said: bytes) -> None:
    async with network(2) as ((a, b), _):
        async with await dial(a, said) as end:
            while not end.eof:
                try:
                    end.eof = not await asyncio.get_running_loop().sock_recv(end.end, 1000)
                except ConnectionError:
                    end.eof = True
        await a.until(lambda: a.events)
        assert len(a.events) == 1
        assert "broke TLS" in a.events[0][1]
        await still_works(a, b)


def trusting() -> ssl.SSLContext:
    """The context of a client that trusts every server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def is_refused(context: ssl.SSLContext, reason: str) -> None:
    """Check that a client does not get past the handshake."""
    async with network(2) as ((a, b), _):
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            reader, writer = await asyncio.open_connection(*a.address, ssl=context)
            writer.write(hello(1, TOKEN))
            try:
                await reader.readexactly(1)
            finally:
                writer.transport.abort()
        await a.until(lambda: a.events)
        assert a.events[0][1].endswith(reason)
        await still_works(a, b)


@on_loop
async def test_old_tls_version_is_refused() -> None:
    context = trusting()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    await is_refused(context, "broke TLS: unsupported protocol")


@on_loop
async def test_client_without_a_key_is_refused() -> None:
    await is_refused(trusting(), "broke TLS: peer did not return a certificate")


@on_loop
async def test_client_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    context = trusting()
    (tmp_path / "key.pem").write_bytes(issue().pem)
    context.load_cert_chain(tmp_path / "key.pem")
    await is_refused(context, "certificate verify failed")


@on_loop
async def test_stalled_handshake_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HELLO_TIMEOUT_S", 0.05)
    async with network(2) as ((a, b), _):
        async with await dial(a, b"\x16\x03\x01"):
            await a.until(lambda: a.events)
        assert "did not identify itself within 0.05 s" in a.events[0][1]
        monkeypatch.undo()
        await still_works(a, b)


@on_loop
async def test_tls_sessions_are_not_resumed(securities: list[Security]) -> None:
    """Every connection proves its key again: there is no session ticket."""
    async with network(2) as ((a, _), _):
        reader, writer = await asyncio.open_connection(
            *a.address, ssl=securities[1].client, server_hostname=""
        )
        writer.write(hello(1, TOKEN))
        assert await reader.readexactly(4) == b"gsmr"
        session = writer.get_extra_info("ssl_object").session
        assert not session.has_ticket
        assert session.ticket_lifetime_hint == 0
        writer.transport.abort()


def test_certificate_dates_are_ignored() -> None:
    """A key is valid for its run, regardless of clocks."""
    keys, certificates = [], []
    for rank, (since, until) in enumerate([(2001, 2002), (2900, 2901)]):
        key = Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, str(rank))])
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(datetime.datetime(since, 1, 1))
            .not_valid_after(datetime.datetime(until, 1, 1))
            .sign(key, None)
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        keys.append(private + certificate.public_bytes(serialization.Encoding.PEM))
        certificates.append(certificate.public_bytes(serialization.Encoding.DER))
    ends = [Security(pem, certificates) for pem in keys]
    assert handshake(ends[0].client, ends[1].server) == certificates[1]


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> bytes | None:
    """Shake hands in memory; gives the server's certificate."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0].getpeercert(binary_form=True)


@on_loop
async def test_certificate_signed_by_a_peer_is_refused(tmp_path: Path) -> None:
    """Only the run's certificates are trusted, not those that their keys sign."""
    identities = [issue() for _ in range(2)]
    transport_scene.securities[:] = [
        Security(identity.pem, [peer.certificate for peer in identities]) for identity in identities
    ]
    key_text = identities[1].pem
    signer = serialization.load_pem_private_key(key_text, None)
    issuer = x509.load_pem_x509_certificate(key_text[key_text.index(b"-----BEGIN CERT") :])
    assert isinstance(signer, Ed25519PrivateKey)
    key = Ed25519PrivateKey.generate()
    certificate = (
        x509.CertificateBuilder(issuer.subject, issuer.subject, key.public_key(), 7)
        .not_valid_before(datetime.datetime(2001, 1, 1))
        .not_valid_after(datetime.datetime(2900, 1, 1))
        .sign(signer, None)
    )
    file = tmp_path / "issued.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
        + issuer.public_bytes(serialization.Encoding.PEM)
    )
    context = trusting()
    context.load_cert_chain(file)
    await is_refused(context, "")


@pytest.mark.parametrize(
    ("listening", "dialled", "named"),
    [
        ("0.0.0.0", "127.0.0.1", "0.0.0.0"),
        ("127.0.0.1", "10.1.2.3", "10.1.2.3:9000"),
        ("127.0.0.1", "a.example", "a.example:9000"),
    ],
)
@on_loop
async def test_without_keys_only_loopback_is_accepted(listening: str, dialled: str, named: str) -> None:
    def build(**options: object) -> Peer:
        return Peer(0, listener, [("127.0.0.1", 9000), (dialled, 9000)], **options)

    with listen(listening) as listener:
        with pytest.raises(
            BadInput, match=f"address {named}.*: not loopback; accepted: loopback, or TLS keys"
        ):
            build(security=None)
        identities = [issue() for _ in range(2)]
        security = Security(identities[0].pem, [identity.certificate for identity in identities])
        await build(security=security).transport.close()


def test_handshake_requires_the_exact_key(securities: list[Security], strangers: list[Security]) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(securities[0].client, strangers[1].server)
    assert securities[0].belongs_to(handshake(securities[0].client, securities[2].server), 2)
    assert not securities[0].belongs_to(handshake(securities[0].client, securities[2].server), 1)
    assert not securities[0].belongs_to(None, 1)
    assert not securities[0].belongs_to(securities[0]._certificates[1], 99)


def test_signature_is_bound_to_rank_and_text() -> None:
    identities = [issue() for _ in range(2)]
    certificates = [identity.certificate for identity in identities]
    signer, verifier = (Security(identity.pem, certificates) for identity in identities)
    signature = signer.sign(b"key")
    assert verifier.verify(0, b"key", signature)
    wrong = [(1, b"key", signature), (0, b"another", signature), (-2, b"key", signature), (0, b"key", b"")]
    assert not any(verifier.verify(*claim) for claim in (*wrong, (2, b"key", signature)))
