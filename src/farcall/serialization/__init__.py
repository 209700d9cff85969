"""How objects become buffers, and how functions and exceptions travel.

`pickler` for values and arguments, `callables` for functions that have a name, `failures` for exceptions, `guarded` for
workers that restrict what may be loaded. No sockets, no threads, no agent: bytes in and out.
"""

from farcall.serialization.callables import callable_name, encode_function, resolve_function
from farcall.serialization.failures import decode_failure, describe_failure, encode_failure, encode_text
from farcall.serialization.guarded import Guard, find_guarded, loads_arguments_guarded, loads_guarded, register_plain
from farcall.serialization.handles import collect, collecting, offered, offering, take_offered
from farcall.serialization.pickler import (
    ATOMS,
    Pickled,
    dumps,
    dumps_arguments,
    dumps_atom,
    dumps_inline,
    dumps_plain_arguments,
    dumps_plain_result,
    dumps_result,
    loads,
    loads_arguments,
    loads_atom,
    not_rebuilt,
)
from farcall.serialization.plain_arrays import (
    ARRAYS,
    MARK,
    OUT_OF_BAND_SIZE,
    VALUE,
    Packed,
    code_of,
    head_of,
    pack_value,
    register_kind,
    small_array,
)
from farcall.serialization.reducers import dumps_reduced, register_family_reducer, register_reducer

__all__ = [
    "ARRAYS",
    "ATOMS",
    "MARK",
    "OUT_OF_BAND_SIZE",
    "VALUE",
    "Guard",
    "Packed",
    "Pickled",
    "callable_name",
    "code_of",
    "collect",
    "collecting",
    "decode_failure",
    "describe_failure",
    "dumps",
    "dumps_arguments",
    "dumps_atom",
    "dumps_inline",
    "dumps_plain_arguments",
    "dumps_plain_result",
    "dumps_reduced",
    "dumps_result",
    "encode_failure",
    "encode_function",
    "encode_text",
    "find_guarded",
    "head_of",
    "loads",
    "loads_arguments",
    "loads_arguments_guarded",
    "loads_atom",
    "loads_guarded",
    "not_rebuilt",
    "offered",
    "offering",
    "pack_value",
    "register_family_reducer",
    "register_kind",
    "register_plain",
    "register_reducer",
    "resolve_function",
    "small_array",
    "take_offered",
]
