"""Other people's packages that use `torch.distributed.rpc`, on torch and on farcall. `make clients` runs it."""
