"""The sockets of the Unix transport: their directory and its permissions, cleaning, addresses, other users.

`test_ring_setup` and `test_shared_buffers` test what its links agree on.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from farcall.testing.conformance import (
    HANDSHAKE_LIMIT,
    TIMEOUT_S,
    FakeWorker,
    LinkPair,
    assert_ends,
    establish,
    in_thread,
    open_links,
    oserror_of,
    receive_frames,
)
from farcall.transports import unix
from farcall.transports.unix import UnixLink, UnixListener, UnixTransport

NewWorker = Callable[..., FakeWorker]
CHILD = """
import sys
from farcall.transports.unix import UnixTransport
listener = UnixTransport([sys.argv[1]]).listen(None, 1000)
print(listener.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def transport(root: Path) -> UnixTransport:
    return UnixTransport([str(root)])


def shared(root: Path) -> Path:
    return root / f"farcall-{os.geteuid()}"


def path_of(address: str) -> Path:
    return Path(address.removeprefix("unix:"))


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path != shared(root))


def full_server(path: Path) -> tuple[socket.socket, list[socket.socket]]:
    """A listener that has as many connections waiting as it lets."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(0)
    clients = []
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        clients.append(client)
        if client.connect_ex(str(path)):
            return server, clients


def listen(transport: UnixTransport) -> UnixListener:
    return transport.listen(None, HANDSHAKE_LIMIT)


def connect(transport: UnixTransport, address: str) -> UnixLink:
    return transport.connect(address, TIMEOUT_S, HANDSHAKE_LIMIT)


def test_only_the_user_may_see_and_use_a_socket(transport: UnixTransport, root: Path) -> None:
    old = os.umask(0)
    try:
        listener = transport.listen("ignored", HANDSHAKE_LIMIT)
    finally:
        os.umask(old)
    path = path_of(listener.address)
    assert path.parent == shared(root)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_ISSOCK(path.stat().st_mode)
    listener.close()


def test_closing_leaves_no_file(transport: UnixTransport, root: Path) -> None:
    listener = listen(transport)
    assert files(root) == [f"{shared(root).name}/{path_of(listener.address).name}"]
    listener.close()
    listener.close()
    assert files(root) == []


def test_closing_again_takes_nothing_from_others(transport: UnixTransport) -> None:
    listener = listen(transport)
    listener.close()
    path_of(listener.address).write_text("somebody else's")
    listener.close()
    assert path_of(listener.address).read_text() == "somebody else's"


def test_the_accepted_end_names_the_process(transport: UnixTransport) -> None:
    listener = listen(transport)
    ours, theirs = open_links(transport, listener)
    assert ours.address == listener.address
    assert theirs.address == f"unix:process {os.getpid()}"
    for end in (ours, theirs, listener):
        end.close()


def test_a_burst_of_small_frames_fits_without_a_ring(transport: UnixTransport, new_worker: NewWorker) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        if plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 4 << 20:
            pytest.skip("this kernel grants no more")
    listener = listen(transport)
    pair = LinkPair(*open_links(transport, listener), new_worker(use_rings=False), new_worker(use_rings=False))
    establish(pair)
    for sender, receiver in pair.directions():
        for _ in range(5000):
            sender.send(b"x" * 60)
        assert sender.backlog == 0
        assert len(receive_frames(receiver, 5000)) == 5000
    pair.close()
    listener.close()


@pytest.mark.parametrize("address", ["unix:", "unix:relative.sock", "unix:\0abstract", "unix:/a\0b", "tcp:/a"])
def test_malformed_addresses_are_refused(transport: UnixTransport, address: str) -> None:
    with pytest.raises(OSError, match="it looks like unix:/directory/name"):
        connect(transport, address)


def test_a_path_that_does_not_exist_is_named(transport: UnixTransport, root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"unix:{root}/none.sock"):
        connect(transport, f"unix:{root}/none.sock")


def test_a_connect_that_waits_for_room_goes_on_when_somebody_is_accepted(transport: UnixTransport, root: Path) -> None:
    server, clients = full_server(root / "full.sock")
    joined = in_thread(lambda: connect(transport, f"unix:{root}/full.sock").close())
    for _ in range(len(clients)):  # one of those did not get in; the one that waits takes its place
        server.accept()[0].close()
    joined()
    for end in (server, *clients):
        end.close()


def test_the_socket_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(
    transport: UnixTransport, root: Path
) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        addresses = [child.stdout.readline().decode().strip() for child in children]  # type: ignore[union-attr]
        children[0].send_signal(signal.SIGKILL)
        children[0].wait(TIMEOUT_S)
        assert all(path_of(address).exists() for address in addresses)
        listen(transport).close()
        assert [path_of(address).exists() for address in addresses] == [False, True]
        connect(transport, addresses[1]).close()
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_the_cleaning_does_not_disturb_a_listener(transport: UnixTransport) -> None:
    first = listen(transport)
    second = listen(transport)
    assert first.accept() is None
    ours, theirs = open_links(transport, first)
    for end in (ours, theirs, first, second):
        end.close()


@pytest.mark.parametrize(("name", "age", "stays"), [("a.sock.new", 50, True), ("a.sock.new", 70, False)])
def test_a_socket_under_construction_has_a_minute(
    transport: UnixTransport, root: Path, name: str, age: float, stays: bool
) -> None:
    listen(transport).close()
    path = shared(root) / name
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    listen(transport).close()
    assert path.exists() == stays


def test_the_cleaning_leaves_what_is_no_socket_of_ours(transport: UnixTransport, root: Path) -> None:
    listen(transport).close()
    (shared(root) / "notes.txt").write_text("mine")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(shared(root) / "other"))
    listen(transport).close()
    assert files(root) == [f"{shared(root).name}/notes.txt", f"{shared(root).name}/other"]


def take_the_name_by_symlink(root: Path) -> None:
    (root / "elsewhere").mkdir(mode=0o700)
    shared(root).symlink_to(root / "elsewhere")


def take_the_name_by_file(root: Path) -> None:
    shared(root).write_text("")


def take_the_name_by_open_directory(root: Path) -> None:
    shared(root).mkdir()
    shared(root).chmod(0o750)


@pytest.mark.parametrize("take", [take_the_name_by_symlink, take_the_name_by_file, take_the_name_by_open_directory])
def test_a_directory_that_is_not_ours_alone_is_replaced(
    transport: UnixTransport, root: Path, take: Callable[[Path], None]
) -> None:
    take(root)
    before = files(root)
    listener = listen(transport)
    directory = path_of(listener.address).parent
    assert directory.parent == root
    assert directory.name.startswith(f"{shared(root).name}-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for end in (*open_links(transport, listener), listener):
        end.close()
    assert files(root) == before


def test_a_directory_of_another_user_is_replaced(
    transport: UnixTransport, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    shared(root).mkdir(mode=0o700)
    listener = listen(transport)
    assert path_of(listener.address).parent.name.startswith(f"{shared(root).name}-")
    listener.close()


@pytest.mark.parametrize(("age", "stays"), [(50, True), (70, False)])
def test_an_empty_directory_of_a_killed_process_is_removed(
    transport: UnixTransport, root: Path, age: float, stays: bool
) -> None:
    left = root / f"{shared(root).name}-abcdefgh"
    left.mkdir(mode=0o700)
    then = left.stat().st_mtime - age
    os.utime(left, (then, then))
    listen(transport).close()
    assert left.exists() == stays


def test_too_long_a_root_is_passed_over(root: Path) -> None:
    long = root / ("x" * 100)
    long.mkdir()
    listener = listen(UnixTransport([str(long), str(root)]))
    assert path_of(listener.address).parent == shared(root)
    listener.close()
    assert files(root) == [long.name]


def test_the_longest_root_that_is_taken_works_in_a_directory_of_its_own_too(root: Path) -> None:
    name = 107 - len(str(root)) - len("/") - len(f"/{shared(root).name}-12345678/{'x' * 16}.sock.new")
    longest, longer = root / ("x" * name), root / ("y" * (name + 1))
    for directory in (longest, longer):
        directory.mkdir()
        take_the_name_by_file(directory)
    listen(UnixTransport([str(longest)])).close()
    with pytest.raises(OSError, match="too long a path"):
        listen(UnixTransport([str(longer)]))


def test_the_roots_are_the_temporary_directory_and_tmp(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    listener = listen(UnixTransport())
    assert path_of(listener.address).parent == shared(root)
    listener.close()
    seen: list[str] = []

    def no_directory(roots: tuple[str, ...]) -> None:
        seen.extend(roots)
        raise PermissionError

    monkeypatch.setattr(unix, "_choose_directory", no_directory)
    oserror_of(listen, UnixTransport())
    assert seen == [str(root), "/tmp"]


def test_without_any_root_the_error_says_why(root: Path) -> None:
    (root / "file").write_text("")
    roots = [str(root / ("x" * 100)), str(root / "absent"), str(root / "file")]
    with pytest.raises(OSError, match="no directory for unix sockets") as caught:
        listen(UnixTransport(roots))
    assert f"{roots[0]} is too long a path" in str(caught.value)
    assert f"{roots[1]}: No such file or directory" in str(caught.value)
    assert f"{roots[2]}: Not a directory" in str(caught.value)
    assert "Set TMPDIR" in str(caught.value)


def test_a_failed_listen_leaves_nothing(transport: UnixTransport, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_rename(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    take_the_name_by_file(root)
    monkeypatch.setattr(os, "rename", no_rename)
    before = len(os.listdir("/proc/self/fd"))
    assert isinstance(oserror_of(listen, transport), PermissionError)
    assert len(os.listdir("/proc/self/fd")) == before
    shared(root).unlink()
    assert files(root) == []


def test_another_user_is_turned_away_on_both_sides(
    transport: UnixTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen(transport)
    us = os.geteuid()
    links = [connect(transport, listener.address) for _ in range(2)]
    monkeypatch.setattr(unix, "_peer_credentials", lambda sock: (1, us + 1, 1))
    assert [listener.accept() for _ in links] == [None, None]
    for link in links:
        assert_ends(link)
        link.close()
    with pytest.raises(PermissionError, match=f"user {us + 1} listens there, not {us}"):
        connect(transport, listener.address)
    assert caplog.text.count(f"a connection of user {us + 1} to {listener.address} was closed") == 1
    listener.close()


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unix._peer_credentials(ours) == (os.getpid(), os.geteuid(), os.getegid())
