"""Unpickling for workers with an allow-list (the option `allow`), and of failure replies for all workers.

unpickler    the restricted unpickler, which checks before it loads, calls or changes anything
opcodes      checks a pickle before it is unpickled: its depth, its memory, the cost of hashing
plain_types  the types of plain data, and the arguments and states that they may get
arrays       numpy's arrays and dtypes, rebuilt from checked parts
exceptions   what an exception may contain, so that printing it has no side effects
"""
