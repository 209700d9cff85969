"""Looking for a store between hosts, while something about the encryption is set wrong: it is said at once, and why."""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rendezvous_stage import GROUP

from certificate_stage import ODDITIES, both_sides
from eventually import eventually
from farcall.errors import EncryptionError, RendezvousError, RendezvousTimeoutError
from farcall.rendezvous import client as client_module
from farcall.rendezvous import server as server_module
from farcall.rendezvous.addresses import listen
from farcall.rendezvous.client import Candidate, find_store, is_alive
from farcall.rendezvous.server import StoreServer
from farcall.security import Credentials
from farcall.security.encryption import Encryption

LONG = 60.0
"""More than a test may take: who waits it out fails."""


@pytest.fixture(autouse=True)
def _far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if loopback were another host."""
    for module in (server_module, client_module):
        monkeypatch.setattr(module, "is_loopback", lambda host: False)
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.1)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("oddity", ODDITIES)
def test_who_joins_hears_what_is_wrong_and_so_does_the_host(
    oddity: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs, heard = both_sides(tmp_path, oddity)
    server = StoreServer(listen("127.0.0.1", [0]), GROUP, 2, "host", credentials=Credentials(encryption=theirs))
    place = Candidate("127.0.0.1", server.port, GROUP)
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(RendezvousError, match=heard) as caught:
            find_store(lambda: [place], False, "there", "w", 1, LONG, credentials=Credentials(encryption=ours))
        assert not isinstance(caught.value, RendezvousTimeoutError)
        assert isinstance(caught.value.__cause__, EncryptionError)
        assert "rank 0" not in str(caught.value)
        assert ("signed by one tls_authority" in str(caught.value)) == ("certificates" in oddity or "author" in oddity)
        eventually(lambda: f"the store on port {server.port}" in caplog.text)
        assert " from 127.0.0.1: " in server.refusals()
        assert not is_alive(place, Credentials(encryption=ours), LONG), "it has proved nothing, and may be anybody"
    finally:
        server.close()
    assert len([line for line in caplog.messages if "the store on port" in line]) == 1, "the same again and again"
    said = {"encrypted here only": "encrypts (it speaks TLS)", "encrypted there only": "does not encrypt"}
    assert said.get(oddity, "the encrypted connection failed") in caplog.text


def test_who_hangs_up_before_it_is_encrypted_wakes_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a worker that was too slow, and comes again."""
    server = StoreServer(listen("127.0.0.1", [0]), GROUP, 2, "host", credentials=Credentials(encryption=Encryption()))
    with caplog.at_level(logging.INFO):
        socket.create_connection(("127.0.0.1", server.port)).close()
        eventually(lambda: "before it was encrypted" in caplog.text)
    server.close()
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert server.refusals() == ""


def test_who_ends_in_the_midst_of_it_is_tried_again(background: ThreadPoolExecutor) -> None:
    """A store that is just ending, and the next one on its port."""
    credentials = Credentials(encryption=Encryption())
    with listen("127.0.0.1", [0]) as ending:
        port = ending.getsockname()[1]
        place = Candidate("127.0.0.1", port, GROUP)
        finding = background.submit(find_store, lambda: [place], True, "there", "w", 1, LONG, None, credentials)
        for _ in range(3):
            sock, _ = ending.accept()
            sock.recv(1 << 16)
            sock.close()
        server = StoreServer(ending.dup(), GROUP, 2, "host", credentials=credentials)
    finding.result(LONG)[0].close()
    server.close(linger=0)


def test_if_that_lasts_the_error_says_what_it_may_be(background: ThreadPoolExecutor) -> None:
    with listen("127.0.0.1", [0]) as ending:

        def hang_up() -> None:
            while True:
                sock, _ = ending.accept()
                with sock:
                    if sock.recv(1 << 16) == b"enough":
                        return

        hanging_up = background.submit(hang_up)
        place = Candidate("127.0.0.1", ending.getsockname()[1], GROUP)
        began = time.monotonic()
        with pytest.raises(
            RendezvousTimeoutError, match="closed the connection before it was encrypted: it may be sta"
        ):
            find_store(lambda: [place], True, "there", "w", 1, 0.3, credentials=Credentials(encryption=Encryption()))
        assert time.monotonic() - began >= 0.3
        with socket.create_connection(ending.getsockname()) as last:
            last.sendall(b"enough")
        hanging_up.result(10)
