"""What the programs share: their place in the group, as torchrun says it in the environment."""

import os


class Ranks:
    """The rank of this process, the number of processes, and where they meet."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.host = os.environ["MASTER_ADDR"]
        self.port = int(os.environ["MASTER_PORT"])
