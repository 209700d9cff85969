"""Two workloads of PyTorch's own RPC benchmarks, written anew, once for farcall and torch alike, and run side by side.

A workload knows neither system by name: it has the functions that both have under the same names (`remote`, `rpc_sync`,
`rpc_async`, `functions.async_execution`, `RRef`), through `sides`. What it computes is the same on both sides, through
`computing`. Only two things differ: the module that carries the calls, and the arrays that are its natural cargo.
"""
