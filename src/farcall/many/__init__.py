"""Many at once: selections of workers, and references and futures by worker name.

    farcall.workers("rollout*").call(step, weights)

Rules
- A plural returns a dict by worker name. If a worker fails, the operation fails with a `GroupCallError`, which has the
  errors and the results by worker name.
- The first failure that makes an operation impossible cancels what is still under way.
- A selection is looked up anew for each operation, so it follows workers that join, leave and are lost.
"""
