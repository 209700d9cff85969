from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Mapping

import pytest

from farcall.cli import main, run
from farcall.errors import UsageError


def parse(*argv: str) -> argparse.Namespace:
    return main.parse(["run", *argv])


def environments(*argv: str, environ: Mapping[str, str] | None = None) -> list[Mapping[str, str]]:
    return [plan.environment for plan in run.make_plans(parse(*argv), environ or {})]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["script.py"], ["script.py"]),
        (["script.py", "-n", "7", "--name", "x", "-m"], ["script.py", "-n", "7", "--name", "x", "-m"]),
        (["script.py", "--", "-x"], ["script.py", "--", "-x"]),
        (["--", "script.py", "-x"], ["script.py", "-x"]),
        (["-m", "package.module", "-m", "--grace=1"], ["-m", "package.module", "-m", "--grace=1"]),
        (["--name", "x", "-m", "module", "a b"], ["-m", "module", "a b"]),
    ],
)
def test_all_that_follows_the_target_is_the_targets(argv: list[str], command: list[str]) -> None:
    (plan,) = run.make_plans(parse("-n", "1", *argv), {})
    assert plan.command == [sys.executable, *command]


def test_each_worker_is_told_who_it_is() -> None:
    told = environments("-n", "2", "--name", "trainer", "--master-port", "4000", "x.py", environ={"HOME": "there"})
    assert [{key: value for key, value in each.items() if key != "FARCALL_SECRET"} for each in told] == [
        {
            "HOME": "there",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "4000",
            "RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": "2",
            "FARCALL_WORKER_NAME": f"trainer{rank}",
            "PYTHONUNBUFFERED": "1",
        }
        for rank in ("0", "1")
    ]


def test_the_plans_carry_name_and_rank() -> None:
    plans = run.make_plans(parse("-n", "2", "x.py"), {})
    assert [(plan.name, plan.rank) for plan in plans] == [("worker0", 0), ("worker1", 1)]


def test_on_a_later_node_ranks_and_names_go_on() -> None:
    nodes = ("--nodes", "3", "--node-rank", "2", "--master-addr", "10.0.0.1", "--master-port", "4000")
    told = environments("-n", "2", *nodes, "x.py")
    assert [(each["RANK"], each["LOCAL_RANK"], each["FARCALL_WORKER_NAME"]) for each in told] == [
        ("4", "0", "worker4"),
        ("5", "1", "worker5"),
    ]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"]) for each in told} == {
        ("6", "2", "10.0.0.1")
    }


def test_the_workers_share_a_secret_that_is_fresh_for_each_run() -> None:
    (first,) = {each["FARCALL_SECRET"] for each in environments("-n", "2", "x.py")}
    (second,) = {each["FARCALL_SECRET"] for each in environments("-n", "2", "x.py", environ={"FARCALL_SECRET": ""})}
    assert len(bytes.fromhex(first)) == len(bytes.fromhex(second)) == 32
    assert first != second


def test_a_secret_in_the_environment_is_kept() -> None:
    (told,) = environments("-n", "1", "x.py", environ={"FARCALL_SECRET": "known to all"})
    assert told["FARCALL_SECRET"] == "known to all"


def test_no_secret_is_made_up_where_other_nodes_could_not_know_it() -> None:
    (told,) = environments("-n", "1", "--nodes", "2", "--master-addr", "h", "--master-port", "1", "x.py")
    assert "FARCALL_SECRET" not in told


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-n", "0"], "-n must be at least 1, not 0"),
        (["-n", "1", "--nodes", "0"], "--nodes must be at least 1, not 0"),
        (["-n", "1", "--node-rank", "1"], "--node-rank must be from 0 to 0 with --nodes 1, not 1"),
        (["-n", "1", "--nodes", "2", "--node-rank", "-1"], "--node-rank must be from 0 to 1"),
        (["-n", "1", "--nodes", "2", "--master-addr", "h"], "give --master-addr and --master-port"),
        (["-n", "1", "--nodes", "2", "--master-port", "1"], "give --master-addr and --master-port"),
        (["-n", "1", "--master-port", "0"], "--master-port must be from 1 to 65535, not 0"),
        (["-n", "1", "--master-port", "65536"], "--master-port must be from 1 to 65535, not 65536"),
        (["-n", "1", "--grace", "-1"], "--grace must be 0 or more seconds"),
        (["-n", "1", "--grace", "nan"], "--grace must be 0 or more seconds"),
        (["-n", "1"], "the script 'missing.py' does not exist"),
        (["-n", "1", "--"], "the script 'missing.py' does not exist"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run.check_arguments(parse(*argv, "missing.py"))


def test_dashes_without_a_target_are_refused() -> None:
    with pytest.raises(UsageError, match="Name a script"):
        run.check_arguments(parse("-n", "1", "--"))


def test_a_script_that_is_there_and_any_module_are_taken() -> None:
    run.check_arguments(parse("-n", "1", __file__))
    run.check_arguments(parse("-n", "1", "-m", "missing"))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_a_free_port_can_be_bound(address: str) -> None:
    port = run.free_port(address)
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as taken:
        taken.bind(where)


def test_an_address_of_another_host_gives_no_port() -> None:
    with pytest.raises(UsageError, match=r"--master-addr '192\.0\.2\.1'.*give an address of this host"):
        run.free_port("192.0.2.1")


@pytest.mark.parametrize("address", ["x" * 64, "..", "a\0b"])
def test_what_cannot_be_a_host_name_gives_no_port(address: str) -> None:
    with pytest.raises(UsageError, match=r"cannot find a free port on --master-addr .*give an address of this host"):
        run.free_port(address)
