"""What URL, arguments and environment say together, and what is said when they do not say enough."""

from __future__ import annotations

import pytest

from farcall.errors import UsageError
from farcall.rendezvous.urls import FilePlace, Plan, TcpPlace, candidate_ports, read_plan

ENVIRONMENT = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}
PLACE = TcpPlace("10.0.0.1", (29500,), "10.0.0.1:29500")


def test_env_takes_all_from_the_environment() -> None:
    assert read_plan("env://", -1, None, ENVIRONMENT) == Plan(1, 4, PLACE)


def test_arguments_count_before_the_environment() -> None:
    assert read_plan("env://", 0, 2, ENVIRONMENT) == Plan(0, 2, PLACE)


def test_the_url_counts_before_the_environment() -> None:
    assert read_plan("env://?rank=2&world_size=3", -1, None, ENVIRONMENT) == Plan(2, 3, PLACE)


@pytest.mark.parametrize(
    ("rank", "size"),
    [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")],
)
def test_what_other_launchers_set_is_understood(rank: str, size: str) -> None:
    environment = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", rank: "1", size: "4"}
    assert read_plan("env://", -1, None, environment) == Plan(1, 4, PLACE)
    assert read_plan("env://", -1, None, environment | {"RANK": "0", "WORLD_SIZE": "2"}) == Plan(0, 2, PLACE)


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_each_missing_variable_is_named_with_how_to_set_it(variable: str) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != variable}
    for broken in (environment, environment | {variable: ""}):
        with pytest.raises(UsageError, match=variable) as caught:
            read_plan("env://", -1, None, broken)
        assert "farcall run" in str(caught.value)


@pytest.mark.parametrize("variable", ["MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_named(variable: str) -> None:
    with pytest.raises(UsageError, match=f"{variable} must be a whole number, not 'one'"):
        read_plan("env://", -1, None, ENVIRONMENT | {variable: "one"})


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_out_of_range_is_refused(port: str) -> None:
    with pytest.raises(UsageError, match="between 1 and 65535"):
        read_plan("env://", -1, None, ENVIRONMENT | {"MASTER_PORT": port})


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("tcp://10.0.0.1:29500", PLACE),
        ("tcp://10.0.0.1:29500/", PLACE),
        ("tcp://Node0:1", TcpPlace("node0", (1,), "node0:1")),
        ("tcp://[::1]:29500", TcpPlace("::1", (29500,), "[::1]:29500")),
        ("file:///tmp/x", FilePlace("/tmp/x")),
        ("file:///tmp/a%20b", FilePlace("/tmp/a b")),
        ("file://localhost/tmp/x", FilePlace("/tmp/x")),
    ],
)
def test_places(url: str, place: object) -> None:
    assert read_plan(url, 1, 2, {}) == Plan(1, 2, place)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["tcp://10.0.0.1:29500", "file:///tmp/x"])
def test_rank_and_size_may_stand_in_any_url_and_in_the_environment(scheme: str) -> None:
    plan = read_plan(f"{scheme}?rank=2&world_size=3", -1, None, {})
    assert (plan.rank, plan.world_size) == (2, 3)
    plan = read_plan(scheme, -1, None, ENVIRONMENT)
    assert (plan.rank, plan.world_size) == (1, 4)


def test_env_and_tcp_workers_of_one_address_are_one_group() -> None:
    assert read_plan("env://", -1, None, ENVIRONMENT).place == read_plan("tcp://10.0.0.1:29500", 0, 4, {}).place


@pytest.mark.parametrize(
    "url", ["tcp://10.0.0.1", "tcp://:29500", "tcp://10.0.0.1:0", "tcp://h:1x", "tcp://h:70000", "tcp://h:1/path"]
)
def test_a_tcp_url_needs_host_and_port(url: str) -> None:
    with pytest.raises(UsageError, match="must be tcp://host:port"):
        read_plan(url, 0, 1, {})


def test_a_file_url_names_no_host() -> None:
    with pytest.raises(UsageError, match=r"has 'here' where a host would be; write three slashes"):
        read_plan("file://here/x", 0, 1, {})


@pytest.mark.parametrize("url", ["file://", "file:///tmp/"])
def test_a_file_url_needs_a_file(url: str) -> None:
    with pytest.raises(UsageError, match="must name a file"):
        read_plan(url, 0, 1, {})


@pytest.mark.parametrize("url", ["", "etcd://x", "10.0.0.1:29500", "tcp://[::1"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="init_method"):
        read_plan(url, 0, 1, {})


@pytest.mark.parametrize(
    ("url", "rank", "size", "text"),
    [
        ("env://?rank=2", 1, 4, "rank is given twice: 1 as an argument, 2 in init_method"),
        ("env://?world_size=2", 1, 4, "world_size is given twice"),
        ("env://?rank=1&rank=2", -1, 4, "has rank 2 times"),
        ("env://?rank=x", -1, 4, "must be a whole number"),
        ("env://?rnak=1", -1, 4, "a parameter 'rnak'"),
        ("env://", 4, 4, "rank 4 does not exist in a group of 4 workers; ranks go from 0 to 3"),
        ("env://", -2, 4, "rank must be 0 or more"),
        ("env://?rank=-1", -1, 4, "rank -1 does not exist"),
        ("env://", 0, 0, "world_size must be at least 1"),
    ],
)
def test_contradictions_and_nonsense_are_refused(url: str, rank: int, size: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        read_plan(url, rank, size, ENVIRONMENT)


def test_saying_the_same_twice_is_no_contradiction() -> None:
    assert read_plan("env://?rank=2", 2, 4, ENVIRONMENT).rank == 2


def test_in_a_group_with_a_size_the_rank_must_come_from_somewhere() -> None:
    with pytest.raises(UsageError, match="this worker has no rank"):
        read_plan("tcp://h:1", -1, 2, {})


@pytest.mark.parametrize("empty", [{}, {"WORLD_SIZE": ""}])
@pytest.mark.parametrize(
    ("url", "rank", "taken"), [("tcp://h:1", -1, -1), ("tcp://h:1", 7, 7), ("file:///f?rank=3", -1, 3)]
)
def test_without_a_size_the_group_is_open_and_ranks_are_not_needed(
    url: str, rank: int, taken: int, empty: dict[str, str]
) -> None:
    plan = read_plan(url, rank, None, empty)
    assert (plan.rank, plan.world_size) == (taken, None)


def test_an_open_group_may_meet_through_the_environment() -> None:
    plan = read_plan("env://", -1, None, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "2"})
    assert (plan.rank, plan.world_size, plan.place) == (2, None, PLACE)


def test_an_open_group_has_no_negative_ranks() -> None:
    with pytest.raises(UsageError, match="rank must be 0 or more, not -1; in an open group leave it out"):
        read_plan("tcp://h:1?rank=-1", -1, None, {})


def test_under_torchrun_the_port_is_another_and_the_run_is_part_of_the_group() -> None:
    torchrun = ENVIRONMENT | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"}
    place = read_plan("env://", -1, None, torchrun).place
    assert isinstance(place, TcpPlace)
    assert place.ports == candidate_ports(29500, "a", "0")
    for change in ({"TORCHELASTIC_RUN_ID": "b"}, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        other = read_plan("env://", -1, None, torchrun | change).place
        assert isinstance(other, TcpPlace)
        assert other.ports != place.ports
        assert other.group != place.group
    assert read_plan("env://", -1, None, torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).place == PLACE


def test_candidate_ports_are_many_distinct_and_always_the_same() -> None:
    ports = candidate_ports(29500, "run", "0")
    assert ports == candidate_ports(29500, "run", "0")
    assert len(set(ports)) == 16
    assert all(20000 <= port < 60000 and port != 29500 for port in ports)


def test_the_port_that_is_taken_anyway_is_no_candidate() -> None:
    assert 21777 not in candidate_ports(21777, "run", "0")  # the hash of this very port would give it


def test_places_read_well() -> None:
    assert str(PLACE) == "tcp://10.0.0.1:29500"
    assert str(TcpPlace("h", (1, 2), "")) == "h, ports 1, 2"
    assert str(FilePlace("/tmp/x")) == "the file /tmp/x"
