"""A model in three parts on three workers, trained as a pipeline: each part works on another piece of the batch.

    farcall run -n 4 examples/training_pipeline.py

worker0 has the data and the loss. It cuts a batch into pieces and sends all of them into the first part at once; each
part passes its result to the next worker itself, so all three compute at the same time. One backward pass goes through
all pieces on all workers, and one optimizer takes the step on each of them. Needs torch (`pip install
'farcall[torch]'`); if rich is installed, worker0 shows a progress bar on a terminal, and with matplotlib and
`--plot FILE` it draws the loss.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

import torch
from torch import nn

import farcall.pytorch as rpc
from farcall.pytorch import autograd as dist_autograd
from farcall.pytorch.optim import DistributedOptimizer
from progress import Progress

WIDTH, BATCH, PIECES = 32, 128, 4


def make_part(inputs: int, outputs: int) -> nn.Module:
    """Runs on the worker that gets this part."""
    torch.manual_seed(inputs + outputs)
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


def parameters_of(part: Any) -> list[Any]:
    """Runs where the part is."""
    return [rpc.RRef(parameter) for parameter in part.local_value().parameters()]


def pass_through(parts: list[Any], piece: torch.Tensor) -> torch.Tensor:
    """Runs on the worker of the first of these parts, which passes on what it computed to the next."""
    result: torch.Tensor = parts[0].local_value()(piece)
    if parts[1:]:
        result = rpc.rpc_sync(parts[1].owner(), pass_through, args=(parts[1:], result))
    return result


def spirals(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals, and which of the two each is on."""
    classes = torch.randint(2, (BATCH,), generator=generator)
    turns = torch.rand(BATCH, generator=generator) * 0.75
    angles = turns * 2 * math.pi + classes * math.pi
    return torch.stack([turns * angles.cos(), turns * angles.sin()], 1), classes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150, metavar="N")
    parser.add_argument("--plot", metavar="FILE", help="draw the loss there")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != 4:
        raise SystemExit("the pipeline has three parts: farcall run -n 4 examples/training_pipeline.py")
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        train(options.steps, options.plot)
    rpc.shutdown()


def train(steps: int, plot: str | None) -> None:
    """worker0's part."""
    widths = [2, WIDTH, WIDTH, 2]
    parts = [rpc.remote(f"worker{number + 1}", make_part, args=widths[number : number + 2]) for number in range(3)]
    parameters = [each for part in parts for each in rpc.rpc_sync(part.owner(), parameters_of, args=(part,))]
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.02)
    generator = torch.Generator().manual_seed(0)
    progress, losses = Progress("training", steps), []
    for _ in range(steps):
        points, classes = spirals(generator)
        with dist_autograd.context() as context:
            futures = [
                rpc.rpc_async(parts[0].owner(), pass_through, args=(parts, piece)) for piece in points.chunk(PIECES)
            ]
            loss = nn.functional.cross_entropy(torch.cat([future.wait() for future in futures]), classes)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
        progress.step(f"loss {losses[-1]:.3f}")
    progress.close()
    print(f"loss {losses[0]:.2f} at first, {sum(losses[-5:]) / 5:.2f} after {steps} steps")
    if plot:
        progress.plot(plot, {"loss": losses})


if __name__ == "__main__":
    main()
