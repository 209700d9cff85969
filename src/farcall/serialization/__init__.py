"""Serializes the arguments, results and exceptions of calls, and rebuilds them.

    payload      values, arguments and results, mostly by pickle
    by_value     functions and classes that pickle cannot send by name: lambdas, closures, local classes
    arrays       arrays of numbers, without pickle
    buffers      bytes, bytearray, memoryview and array.array, as buffers
    callables    functions that are sent by name
    exceptions   exceptions, with the traceback of the worker that raised them
    references   handles of references, which are sent in the header of a message
    registry     reducers: how single types are pickled, for parts such as farcall.pytorch
    unpicklable  finds the part of a value that cannot be pickled, for error messages
    restricted/  unpickling for workers with an allow-list

This package takes and returns bytes. It has no sockets, no threads and no agent.
"""

from farcall.serialization.arrays import (
    ARRAYS,
    ARRAYS_MARK,
    OUT_OF_BAND_MIN_BYTES,
    SINGLE_ARRAY_START,
    Packed,
    dtype_code,
    pack_array,
    pack_array_header,
    register_array_type,
    unpack_small_array,
)
from farcall.serialization.callables import callable_name, encode_function, resolve_function
from farcall.serialization.exceptions import (
    decode_failure,
    describe_failure,
    encode_failure,
    encode_failure_text,
    find_raising_function,
)
from farcall.serialization.payload import (
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
    not_rebuilt_error,
)
from farcall.serialization.references import collect, collecting, offered, offering, take_offered
from farcall.serialization.registry import dumps_reduced, register_family_reducer, register_reducer
from farcall.serialization.restricted.unpickler import (
    Guard,
    find_allowed,
    loads_restricted,
    loads_restricted_arguments,
    register_plain,
)

__all__ = [
    "ARRAYS",
    "ARRAYS_MARK",
    "ATOMS",
    "OUT_OF_BAND_MIN_BYTES",
    "SINGLE_ARRAY_START",
    "Guard",
    "Packed",
    "Pickled",
    "callable_name",
    "collect",
    "collecting",
    "decode_failure",
    "describe_failure",
    "dtype_code",
    "dumps",
    "dumps_arguments",
    "dumps_atom",
    "dumps_inline",
    "dumps_plain_arguments",
    "dumps_plain_result",
    "dumps_reduced",
    "dumps_result",
    "encode_failure",
    "encode_failure_text",
    "encode_function",
    "find_allowed",
    "find_raising_function",
    "loads",
    "loads_arguments",
    "loads_atom",
    "loads_restricted",
    "loads_restricted_arguments",
    "not_rebuilt_error",
    "offered",
    "offering",
    "pack_array",
    "pack_array_header",
    "register_array_type",
    "register_family_reducer",
    "register_plain",
    "register_reducer",
    "resolve_function",
    "take_offered",
    "unpack_small_array",
]
