"""A training step with distributed autograd, on torch's RPC and on farcall: the same program on both."""
