from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall.testing.conformance import PATIENCE, TransportConformance, in_thread, open_pair, read, refusal
from farcall.transports import unix
from farcall.transports.unix import UnixTransport

CHILD = """
import sys
from farcall.transports.unix import UnixTransport
listener = UnixTransport([sys.argv[1]]).listen()
print(listener.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a short path, which pytest's own may not have."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def transport(root: Path) -> UnixTransport:
    return UnixTransport([str(root)])


def shared(root: Path) -> Path:
    return root / f"farcall-{os.geteuid()}"


def path_of(address: str) -> Path:
    return Path(address.removeprefix("unix:"))


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path != shared(root))


def crowded(path: Path) -> tuple[socket.socket, list[socket.socket]]:
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


class TestUnixTransport(TransportConformance):
    @pytest.fixture
    def transport(self, root: Path) -> UnixTransport:
        return UnixTransport([str(root)])

    @pytest.fixture
    def crowded_address(self, root: Path) -> Iterator[str]:
        server, clients = crowded(root / "crowded.sock")
        yield f"unix:{root}/crowded.sock"
        for end in (server, *clients):
            end.close()


def test_only_the_user_may_see_and_use_a_socket(transport: UnixTransport, root: Path) -> None:
    old = os.umask(0)
    try:
        listener = transport.listen("ignored")
    finally:
        os.umask(old)
    path = path_of(listener.address)
    assert path.parent == shared(root)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_ISSOCK(path.stat().st_mode)
    listener.close()


def test_closing_leaves_no_file(transport: UnixTransport, root: Path) -> None:
    listener = transport.listen()
    assert files(root) == [f"{shared(root).name}/{path_of(listener.address).name}"]
    listener.close()
    listener.close()
    assert files(root) == []


def test_closing_again_takes_nothing_from_others(transport: UnixTransport) -> None:
    listener = transport.listen()
    listener.close()
    path_of(listener.address).write_text("somebody else's")
    listener.close()
    assert path_of(listener.address).read_text() == "somebody else's"


def test_the_accepted_end_names_the_process(transport: UnixTransport) -> None:
    listener = transport.listen()
    ours, theirs = open_pair(transport, listener)
    assert ours.address == listener.address
    assert theirs.address == f"unix:process {os.getpid()}"
    for end in (ours, theirs, listener):
        end.close()


def test_a_burst_of_small_messages_fits(transport: UnixTransport) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        if plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 4 << 20:
            pytest.skip("this kernel grants no more")
    listener = transport.listen()
    for sender, receiver in (pair := open_pair(transport, listener), pair[::-1]):
        assert [sender.send(b"x" * 64) for _ in range(5000)] == [64] * 5000
        assert read(receiver, 64 * 5000) == b"x" * 64 * 5000
    for end in (*pair, listener):
        end.close()


@pytest.mark.parametrize("address", ["unix:", "unix:relative.sock", "unix:\0abstract", "unix:/a\0b", "tcp:/a"])
def test_malformed_addresses_are_refused(transport: UnixTransport, address: str) -> None:
    with pytest.raises(OSError, match="it looks like unix:/directory/name"):
        transport.connect(address, PATIENCE)


def test_a_path_that_does_not_exist_is_named(transport: UnixTransport, root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"unix:{root}/none.sock"):
        transport.connect(f"unix:{root}/none.sock", PATIENCE)


def test_who_waits_for_room_goes_on_when_somebody_is_accepted(transport: UnixTransport, root: Path) -> None:
    server, clients = crowded(root / "crowded.sock")
    joined = in_thread(lambda: transport.connect(f"unix:{root}/crowded.sock", PATIENCE).close())
    for _ in range(len(clients)):  # one of those did not get in; the one that waits takes its place
        server.accept()[0].close()
    joined()
    for end in (server, *clients):
        end.close()


def test_the_socket_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(
    transport: UnixTransport, root: Path
) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        addresses = [child.stdout.readline().decode().strip() for child in children]
        children[0].send_signal(signal.SIGKILL)
        children[0].wait(PATIENCE)
        assert all(path_of(address).exists() for address in addresses)
        transport.listen().close()
        assert [path_of(address).exists() for address in addresses] == [False, True]
        transport.connect(addresses[1], PATIENCE).close()
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_the_sweep_does_not_disturb_a_listener(transport: UnixTransport) -> None:
    first = transport.listen()
    second = transport.listen()
    assert first.accept() is None
    ours, theirs = open_pair(transport, first)
    for end in (ours, theirs, first, second):
        end.close()


@pytest.mark.parametrize(("name", "age", "stays"), [("a.sock.new", 50, True), ("a.sock.new", 70, False)])
def test_a_socket_in_the_making_has_a_minute(
    transport: UnixTransport, root: Path, name: str, age: float, stays: bool
) -> None:
    transport.listen().close()
    path = shared(root) / name
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    transport.listen().close()
    assert path.exists() == stays


def test_the_sweep_leaves_what_is_no_socket_of_ours(transport: UnixTransport, root: Path) -> None:
    transport.listen().close()
    (shared(root) / "notes.txt").write_text("mine")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(shared(root) / "other"))
    transport.listen().close()
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
def test_a_directory_that_is_not_ours_alone_is_replaced(transport: UnixTransport, root: Path, take) -> None:
    take(root)
    before = files(root)
    listener = transport.listen()
    directory = path_of(listener.address).parent
    assert directory.parent == root
    assert directory.name.startswith(f"{shared(root).name}-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for end in (*open_pair(transport, listener), listener):
        end.close()
    assert files(root) == before


def test_a_directory_of_another_user_is_replaced(
    transport: UnixTransport, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    shared(root).mkdir(mode=0o700)
    listener = transport.listen()
    assert path_of(listener.address).parent.name.startswith(f"{shared(root).name}-")
    listener.close()


@pytest.mark.parametrize(("age", "stays"), [(50, True), (70, False)])
def test_an_empty_directory_of_a_killed_process_is_swept(
    transport: UnixTransport, root: Path, age: float, stays: bool
) -> None:
    left = root / f"{shared(root).name}-abcdefgh"
    left.mkdir(mode=0o700)
    then = left.stat().st_mtime - age
    os.utime(left, (then, then))
    transport.listen().close()
    assert left.exists() == stays


def test_too_long_a_root_is_passed_over(root: Path) -> None:
    long = root / ("x" * 100)
    long.mkdir()
    listener = UnixTransport([str(long), str(root)]).listen()
    assert path_of(listener.address).parent == shared(root)
    listener.close()
    assert files(root) == [long.name]


def test_the_longest_root_that_is_taken_works_in_a_directory_of_its_own_too(root: Path) -> None:
    name = 107 - len(str(root)) - len("/") - len(f"/{shared(root).name}-12345678/{'x' * 16}.sock.new")
    longest, longer = root / ("x" * name), root / ("y" * (name + 1))
    for directory in (longest, longer):
        directory.mkdir()
        take_the_name_by_file(directory)
    UnixTransport([str(longest)]).listen().close()
    with pytest.raises(OSError, match="too long a path"):
        UnixTransport([str(longer)]).listen()


def test_the_roots_are_the_temporary_directory_and_tmp(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    listener = UnixTransport().listen()
    assert path_of(listener.address).parent == shared(root)
    listener.close()
    seen = []

    def no_directory(roots: tuple[str, ...]) -> None:
        seen.extend(roots)
        raise PermissionError

    monkeypatch.setattr(unix, "_directory", no_directory)
    refusal(UnixTransport().listen)
    assert seen == [str(root), "/tmp"]


def test_without_any_root_the_error_says_why(root: Path) -> None:
    (root / "file").write_text("")
    roots = [str(root / ("x" * 100)), str(root / "absent"), str(root / "file")]
    with pytest.raises(OSError, match="no directory for unix sockets") as caught:
        UnixTransport(roots).listen()
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
    assert isinstance(refusal(transport.listen), PermissionError)
    assert len(os.listdir("/proc/self/fd")) == before
    shared(root).unlink()
    assert files(root) == []


def test_another_user_is_turned_away_on_both_sides(
    transport: UnixTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = transport.listen()
    us = os.geteuid()
    channels = [transport.connect(listener.address, PATIENCE) for _ in range(2)]
    monkeypatch.setattr(unix, "_peer_credentials", lambda sock: (1, us + 1, 1))
    assert [listener.accept() for _ in channels] == [None, None]
    for channel in channels:
        assert channel.receive(1) == b""
        channel.close()
    with pytest.raises(PermissionError, match=f"user {us + 1} listens there, not {us}"):
        transport.connect(listener.address, PATIENCE)
    assert caplog.text.count(f"a connection of user {us + 1} to {listener.address} was closed") == 1
    listener.close()


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unix._peer_credentials(ours) == (os.getpid(), os.geteuid(), os.getegid())
