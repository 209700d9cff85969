"""What is pickled: data of every kind, a function and a class that go by name."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers()
)
plain_data = st.recursive(
    scalars.filter(lambda value: value == value),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def train(model: Any, lock: Any = None, *rest: Any, rate: float = 0.1) -> None: ...


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)
