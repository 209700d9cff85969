"""`DistributedOptimizer`: one optimizer on each worker that has parameters, all steps at once."""

from farcall.pytorch.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
