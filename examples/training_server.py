"""Two trainers and one server that has the embedding table: its rows get their gradients over distributed autograd.

    farcall run -n 4 examples/training_server.py

Trainers learn which of two classes a set of words is of, each from examples of its own. The table of the words'
features is on the server; the layer behind it is each trainer's own. worker0 only watches: it starts the trainers, and
has the loss of each step reported to it. Needs torch (`pip install 'farcall[torch]'`); if rich is installed, worker0
shows a progress bar on a terminal, and with matplotlib and `--plot FILE` it draws the losses.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

import farcall.pytorch as rpc
from farcall.pytorch import autograd as dist_autograd
from farcall.pytorch.nn import RemoteModule
from farcall.pytorch.optim import DistributedOptimizer
from progress import Progress

WORDS, FEATURES, LENGTH, BATCH = 200, 8, 6, 32
SERVER, TRAINERS = "worker1", ("worker2", "worker3")


class Watching:
    """The losses of all trainers, at worker0."""

    def __init__(self, steps: int) -> None:
        self.losses: dict[str, list[float]] = {trainer: [] for trainer in TRAINERS}
        self.progress = Progress("training", steps * len(TRAINERS))

    def report(self, trainer: str, loss: float) -> None:
        """A trainer has taken a step."""
        self.losses[trainer].append(loss)
        self.progress.step(f"loss {loss:.3f}")


def examples(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets of words, and whether most words of each are even numbers."""
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    return words, ((words % 2 == 0).sum(1) > LENGTH // 2).long()


watching: Watching | None = None  # there is one in the process of rank 0 only


def report(trainer: str, loss: float) -> None:
    """What trainers call on worker0."""
    assert watching is not None
    watching.report(trainer, loss)


def train(table: RemoteModule, steps: int) -> None:
    """Runs on each trainer."""
    me = rpc.get_worker_info()
    generator = torch.Generator().manual_seed(me.id)
    layer = nn.Linear(FEATURES, 2)
    parameters = [*table.remote_parameters(), *map(rpc.RRef, layer.parameters())]
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.05)
    for _ in range(steps):
        words, classes = examples(generator)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(layer(table(words)), classes)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        rpc.rpc_sync("worker0", report, args=(me.name, loss.item()))


def watch(steps: int, plot: str | None) -> None:
    """worker0's part."""
    global watching
    watching = Watching(steps)
    table = RemoteModule(f"{SERVER}/cpu", nn.EmbeddingBag, args=(WORDS, FEATURES))
    futures = [rpc.rpc_async(trainer, train, args=(table, steps), timeout=0) for trainer in TRAINERS]
    for future in futures:
        future.wait()
    watching.progress.close()
    for trainer, losses in watching.losses.items():
        print(f"{trainer}: loss {losses[0]:.2f} at first, {sum(losses[-5:]) / 5:.2f} at the end")
    if plot:
        watching.progress.plot(plot, watching.losses)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each trainer")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses there")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != 4:
        raise SystemExit("the story has four workers: farcall run -n 4 examples/training_server.py")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        watch(options.steps, options.plot)
    rpc.shutdown()


if __name__ == "__main__":
    main()
