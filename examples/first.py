import farcall


def hello(name: str) -> str:
    return f"hello {name}, this is {farcall.worker().name}"


with farcall.Group() as group:  # joins: returns when both workers are there
    if group.info.name == "worker0":
        print(farcall.worker("worker1").call(hello, "worker0"))
# the end of the block leaves: it waits until both workers are done
