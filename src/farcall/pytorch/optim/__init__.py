"""`DistributedOptimizer`: applies gradients to parameters on many workers, with one optimizer on each of them."""

from farcall.pytorch.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
